"""Fixed requests on which ways of counting are compared before one of them is trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.types import Ask, ChatPrompt, Dialect, TextPrompts

_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What to look for, e.g. « café »"}},
    "required": ["query"],
}
_TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "Search the web.", "parameters": _PARAMETERS},
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"query": "café"}'}}

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
    ChatPrompt(
        [
            {"role": "user", "content": "Where is it?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Rue de la Paix"},
        ],
        tools=[_TOOL],
    ),
    ChatPrompt([{"role": "user", "content": "Think it over."}], reasoning_effort="low"),
    TextPrompts(("Once upon a time, there were 3 tokens.\n",)),
)

# An Anthropic request, and the chat that it becomes: for the endpoint that counts no other.
_MESSAGES: dict[str, Any] = {
    "system": "You are terse.",
    "messages": [
        {"role": "user", "content": "Where is it?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "call_1", "name": "search", "input": {"query": "café"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "Rue de la Paix"}]},
    ],
    "tools": [{"name": "search", "description": "Search the web.", "input_schema": _PARAMETERS}],
}
_AS_CHAT = ChatPrompt(
    [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Where is it?"},
        {
            "role": "assistant",
            "tool_calls": [{**_CALL, "function": {"name": "search", "arguments": '{"query": "caf\\u00e9"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rue de la Paix"},
    ],
    tools=[_TOOL],
    from_messages=True,
)
MESSAGES_PROBE = Ask(Dialect.MESSAGES, "/v1/messages", "", _AS_CHAT, b"", _MESSAGES)


def probes_for(source: str) -> tuple[tuple[ChatPrompt | TextPrompts, Ask | None], ...]:
    """What a source is tried on, each with the request it is of, if it must have one."""
    if source == "count_tokens":
        return ((_AS_CHAT, MESSAGES_PROBE),)
    return tuple((prompt, None) for prompt in PROBES if source == "tokenize" or isinstance(prompt, ChatPrompt))


@dataclass(slots=True)
class Comparison:
    """How one source compared with the local counter. ``difference``: the first, in words, if there was one."""

    source: str
    equal: int = 0
    asked: int = 0
    difference: str = ""
    absent: str = ""

    def __str__(self) -> str:
        if self.asked == 0:
            return f"{self.source}: {self.absent or 'not asked'}"
        return f"{self.source}: equal on {self.equal} of {self.asked} probes"
