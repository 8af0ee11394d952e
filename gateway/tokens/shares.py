"""What each message of a chat costs by itself, wherever it stands: the sums that trimming a conversation goes by.

A template renders a message differently by its neighbours (Qwen3 drops the reasoning of turns before the last question,
joins tool results that follow each other). A share is measured in a fixed, smallest conversation instead, as the
difference the message makes there, so that the same message always has the same share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.tokens.errors import CannotCount
from gateway.tokens.estimate import size_of
from gateway.tokens.lru import Lru
from gateway.types import ChatPrompt

CountChat = Callable[[ChatPrompt], int]
Measure = Callable[[str], int]
Cache = Lru[tuple[bytes, bytes], int]

# About 200 bytes each.
CACHE_ENTRIES = 20_000
# What a template puts around a message, where it cannot be asked.
_FRAME_TOKENS = 5

_USER = {"role": "user", "content": "x"}
_ASSISTANT = {"role": "assistant", "content": "x"}
_CALL_ID = "call00001"


class Shares:
    """Shares of one prompt's messages. ``count`` counts a whole chat with the defaults of its server bound in."""

    def __init__(self, prompt: ChatPrompt, defaults: Mapping[str, Any], count: CountChat, measure: Measure) -> None:
        self._prompt = prompt
        self._bare = replace(
            prompt,
            messages=[],
            tools=None,
            tool_choice=None,
            documents=None,
            add_generation_prompt=False,
            continue_final_message=False,
        )
        self._count = count
        self._measure = measure
        switches = (prompt.chat_template, prompt.chat_template_kwargs, prompt.reasoning_effort, defaults)
        self._switches = _digest(switches)
        self._frames: dict[str, int] = {}

    def of_messages(self, cache: Cache) -> tuple[int, ...]:
        """Tokens of each message, at least 0. Never raises: what the template refuses is measured as text."""
        return tuple(self._share(message, cache) for message in self._prompt.messages)

    def overhead(self, shares: Sequence[int]) -> int:
        """Tokens that belong to no message: tools, default system prompt, the opening of the answer."""
        messages = self._prompt.messages
        head = next((n for n, each in enumerate(messages) if _role(each) not in ("system", "developer")), len(messages))
        try:
            whole = self._count(replace(self._prompt, messages=[*messages[:head], _USER]))
            return max(0, whole - sum(shares[:head]) - self._frame("user"))
        except CannotCount:
            extras = [extra for extra in (self._prompt.tools, self._prompt.documents) if extra]
            return sum(map(self._measured, extras)) + 2 * _FRAME_TOKENS

    def _share(self, message: Any, cache: Cache) -> int:
        key = (self._switches, _digest(message))
        known = cache.get(key)
        if known is None:
            try:
                known = max(0, self._difference(message))
            except CannotCount:
                known = self._measured(message) + _FRAME_TOKENS
            cache.put(key, known)
        return known

    def _difference(self, message: Any) -> int:
        """What ``message`` adds to the smallest conversation in which it can stand."""
        role = _role(message)
        if role == "user":
            return self._chat(message) - self._chat(_USER) + self._frame("user")
        if role == "assistant" and message.get("tool_calls"):
            answer = _result(_first_call_id(message))
            with_it, without = self._chat(_USER, message, answer), self._chat(_USER, _call(), _result())
            return with_it - without + self._frame("call")
        if role == "assistant":
            with_it, without = self._chat(_USER, message, _USER), self._chat(_USER, _ASSISTANT, _USER)
            return with_it - without + self._frame("assistant")
        if role == "tool":
            with_it = self._chat(_USER, _call(message.get("tool_call_id")), message)
            return with_it - self._chat(_USER, _call(), _result()) + self._frame("tool")
        return self._chat(message, _USER) - self._chat(_USER)

    def _frame(self, role: str) -> int:
        """Tokens of the smallest message of a role (``call``: of an assistant that calls a tool)."""
        if role not in self._frames:
            self._frames[role] = self._smallest(role)
        return self._frames[role]

    def _smallest(self, role: str) -> int:
        """Templates that want turns to alternate are asked in a second way, which is a few tokens less exact."""
        one = self._chat(_USER)
        if role == "user":
            try:
                return self._chat(_USER, _USER) - one
            except CannotCount:
                return self._chat(_USER, _ASSISTANT, _USER) - self._chat(_USER, _ASSISTANT)
        if role == "assistant":
            return self._chat(_USER, _ASSISTANT, _USER) - one - self._frame("user")
        both = self._chat(_USER, _call(), _result(), _USER) - one - self._frame("user")
        try:
            call = self._chat(_USER, _call(), _USER) - one - self._frame("user")
        except CannotCount:
            call = self._chat(_USER, _call()) - one
        return call if role == "call" else both - call

    def _chat(self, *messages: Any) -> int:
        return self._count(replace(self._bare, messages=list(messages)))

    def _measured(self, value: Any) -> int:
        """Tokens of ``value`` written as JSON; by its size if it holds media or cannot be encoded."""
        size = size_of(replace(self._bare, messages=[value])) if isinstance(value, dict) else None
        if size is not None and size.media:
            return round(size.prompts_bytes[0] / 3) + size.fixed_tokens
        text = json.dumps(value, ensure_ascii=False, default=str)
        try:
            return self._measure(text)
        except CannotCount:
            return len(text.encode("utf-8", "surrogatepass"))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _call(call_id: Any = _CALL_ID) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "x", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _result(call_id: Any = _CALL_ID) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "x"}


def _first_call_id(message: Mapping[str, Any]) -> Any:
    calls = message["tool_calls"]
    first = calls[0] if isinstance(calls, list) else None
    return first.get("id", _CALL_ID) if isinstance(first, Mapping) else _CALL_ID


def _digest(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
