"""Fixed conversations on which two ways of counting are compared before one of them is trusted."""

from __future__ import annotations

from gateway.types import ChatPrompt, TextPrompts

_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for, e.g. « café »"}},
            "required": ["query"],
        },
    },
}

PROBES: tuple[ChatPrompt | TextPrompts, ...] = (
    ChatPrompt([{"role": "user", "content": "Hello! How many tokens is this?"}]),
    ChatPrompt(
        [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": [{"type": "text", "text": "Say hi"}, {"type": "text", "text": "in 日本語."}]},
            {"role": "assistant", "content": "こんにちは"},
            {"role": "user", "content": "Thanks."},
        ]
    ),
    ChatPrompt([{"role": "user", "content": "Who won?"}], tools=[_TOOL]),
    TextPrompts(("Once upon a time, there were 3 tokens.\n",)),
)
