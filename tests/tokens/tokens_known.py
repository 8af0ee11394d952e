"""Requests with the ``usage.prompt_tokens`` that vLLM 0.32.0 reported for them (Qwen3's tokenizer and template)."""

from __future__ import annotations

from typing import Any

WEATHER: dict[str, Any] = {
    "function": {
        "strict": True,
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"unit": {"enum": ["°C", "°F"]}, "city": {"type": "string", "description": "e.g. São Paulo"}},
        },
        "name": "get_weather",
        "x-vendor": {"dropped": True},
    },
    "type": "function",
    "cache_control": {"type": "ephemeral"},
}
CALLS: list[dict[str, Any]] = [
    {"index": 0, "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}, "id": "a", "type": "function"},
    {"type": "function", "id": "b", "function": {"arguments": "not json", "name": "get_weather"}},
]

# name: (body less the model, prompt tokens)
KNOWN: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({"messages": [{"role": "user", "content": "Hello!"}]}, 10),
    "empty system": ({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "a\n\n"}]}, 15),
    "unicode": (
        {"messages": [{"role": "user", "content": "e\u0301 👩‍👩‍👧‍👦 日本語 \u00a0\u200b <|im_start|>x<think>"}]},
        30,
    ),
    "parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"text": "one", "type": "text", "cache_control": {}},
                        {"type": "text", "text": ""},
                        {"type": "text", "text": "two"},
                    ],
                }
            ]
        },
        11,
    ),
    "tools": ({"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}, 171),
    "tools unused": (
        {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER], "tool_choice": "none"},
        171,
    ),
    "parallel calls": (
        {
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning_content": "two cities"},
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "12 °C"}]},
                {"role": "tool", "tool_call_id": "b", "content": ""},
                {"role": "assistant", "content": "12."},
                {"role": "user", "content": "Thanks"},
            ],
            "tools": [WEATHER],
        },
        244,
    ),
    "developer": (
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "developer", "content": "Be terse."},
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "y"},
            ]
        },
        26,
    ),
    "effort none": ({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none"}, 13),
    "effort low, thinking off": (
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        },
        13,
    ),
    "continued": (
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is "}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        17,
    ),
    "no generation prompt": ({"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}, 6),
    "tools in kwargs": (
        {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"tools": [{"b": 1, "a": 2}]}},
        103,
    ),
    "truncated": ({"messages": [{"role": "user", "content": "many words " * 30}], "truncate_prompt_tokens": 20}, 20),
    "unknown role": ({"messages": [{"role": "critic", "content": "Hm", "name": "bob"}]}, 3),
    "several choices": ({"messages": [{"role": "user", "content": "Hi"}], "n": 2}, 9),
}
