"""Request bodies: a small chat, and conversations of a coding agent that grow turn by turn, each unlike every other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from bench.canned_backend import MODEL, whole_event_count
from bench.load import Request

# Tokens of a list of messages, as the backend would report them.
CountTokens = Callable[[list[dict[str, Any]]], int]

_WORDS = """
request response window token budget backend engine block cache prefix segment template message render count
queue lease place retry stream event usage limit offer ledger scrape gauge sample metric header body chunk parse
encode decode buffer socket client server config option value result error state model weight batch step index
table column record branch commit merge review build deploy rollout replica volume mount secret region account
invoice order customer payment refund shipment warehouse supplier contract report summary draft comment author
""".split()  # noqa: SIM905


class Writer:
    """Writes plausible text from a seed: code, tool results and prose, about 4 bytes a token."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _some(self, count: int) -> list[str]:
        return self._random.choices(_WORDS, k=count)

    def prose(self, length: int) -> str:
        """About ``length`` characters of sentences."""
        parts: list[str] = []
        size = 0
        while size < length:
            words = self._some(self._random.randint(6, 14))
            parts.append(" ".join(words).capitalize() + ".")
            size += len(parts[-1]) + 1
        return " ".join(parts)

    def code(self, length: int) -> str:
        """About ``length`` characters of Python."""
        parts: list[str] = []
        size = 0
        while size < length:
            name, first, second, third, kind = self._some(5)
            parts.append(
                f"def {name}_{first}({second}: list[{kind.capitalize()}], limit: int = {self._random.randint(1, 999)}) "
                f"-> int:\n    {third} = 0\n    for {kind} in {second}:\n        if {kind}.{first} > limit:\n"
                f"            {third} += {kind}.{first} - limit\n    return {third}\n\n"
            )
            size += len(parts[-1])
        return "".join(parts)

    def rows(self, length: int) -> str:
        """About ``length`` characters of JSON, a tool's result."""
        rows: list[dict[str, Any]] = []
        size = 0
        while size < length:
            first, second, third = self._some(3)
            rows.append({"name": f"{first}-{second}", "status": third, "count": self._random.randint(0, 9999)})
            size += len(first) + len(second) + len(third) + 50
        return json.dumps({"rows": rows})

    def turn(self, number: int, length: int) -> list[dict[str, Any]]:
        """The answer to the last question, with a tool call and its result, and the next question."""
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "read_records", "arguments": json.dumps({"path": "/".join(self._some(3))})},
        }
        return [
            {"role": "assistant", "content": self.prose(length // 10), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": self.rows(length * 4 // 10)},
            {
                "role": "assistant",
                "content": self.prose(length // 10) + "\n```python\n" + self.code(length * 3 // 10) + "```",
            },
            {"role": "user", "content": self.prose(length // 10)},
        ]


def assemble(messages: bytes, tokens: int, *, chunks: int = 0, hold: bool = False) -> Request:
    """The request of serialised ``messages``; ``chunks`` > 0 streams as many events."""
    stream = int(chunks > 0)
    body = (
        b'{"model":"%b","messages":[%b],"temperature":0.2,"max_tokens":1024,"stream":%b,'
        b'"user":"kvbench;tokens=%d;chunks=%d;stream=%d;hold=%d"}'
    ) % (MODEL.encode(), messages, b"true" if stream else b"false", tokens, chunks or 64, stream, hold)
    return Request(body, tokens, whole_event_count(chunks) if chunks else 0)


def small(count_tokens: CountTokens, *, chunks: int = 0, hold: bool = False) -> Request:
    """A chat of two short messages."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."},
        {"role": "user", "content": "Which planet of the solar system has the most moons, and how many are known?"},
    ]
    return assemble(_joined(messages), count_tokens(messages), chunks=chunks, hold=hold)


class Conversation:
    """A conversation of about ``base_tokens`` at its first request, growing by ``growth_bytes`` a turn."""

    def __init__(self, seed: int, base_tokens: int, turns: int, growth_bytes: int, count_tokens: CountTokens) -> None:
        writer = Writer(seed)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are a coding agent. " + writer.prose(2000)},
            {"role": "user", "content": writer.prose(400)},
        ]
        number = 0
        while (tokens := count_tokens(messages)) < base_tokens:
            missing_bytes = (base_tokens - tokens) * 4
            messages += writer.turn(number, max(400, min(8000, missing_bytes)))
            number += 1
        self._pieces = [_joined(messages)]
        self.tokens = [tokens]
        for _ in range(turns):
            grown = writer.turn(number, growth_bytes)
            messages += grown
            number += 1
            self._pieces.append(_joined(grown))
            self.tokens.append(count_tokens(messages))

    def request(self, turn: int, *, chunks: int = 0) -> Request:
        """The request of ``turn`` (0 is the first), with everything said before it."""
        return assemble(b",".join(self._pieces[: turn + 1]), self.tokens[turn], chunks=chunks)


def _joined(messages: list[dict[str, Any]]) -> bytes:
    return b",".join(json.dumps(message, separators=(",", ":")).encode() for message in messages)


def local_count(folder: str) -> CountTokens:
    """Count with the gateway's own counter of the model in ``folder``. Raises ``gateway.tokens.errors.CannotLoad``."""
    from gateway.tokens.local import TemplateOptions, load
    from gateway.types import ChatPrompt

    counter = load(folder, TemplateOptions(), hub=False, cache_bytes=256 << 20)

    def count(messages: list[dict[str, Any]]) -> int:
        return counter.count(ChatPrompt(messages=messages, tools=None), {})[0]

    return count
