"""Chat ``messages`` as items: one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.history_parts import Sketch, content_of, ids, written
from gateway.history import Item, Role, Text

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}


def read(messages: Sequence[Any]) -> list[Sketch]:
    """One item a message. What is no message is kept as one that cannot be touched."""
    return [_sketch(place, message) for place, message in enumerate(messages)]


def _sketch(place: int, message: Any) -> Sketch:
    if not isinstance(message, Mapping):
        return Sketch(Item(place, Role.SYSTEM, 0), (written(message),))
    named = message.get("role")
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        role = Role.TOOL if message.get("tool_call_id") else Role.USER
    content = content_of(message.get("content"), ("content",))
    reasoning: tuple[Text, ...] = ()
    calls: frozenset[str] = frozenset()
    others = content.others
    if role is Role.ASSISTANT:
        reasoning = _thoughts(message)
        made = message.get("tool_calls")
        called = [call for call in made if isinstance(call, Mapping)] if isinstance(made, list) else []
        function = message.get("function_call")
        calls = ids(*(call.get("id") for call in called))
        if isinstance(function, Mapping):
            calls |= ids(function.get("name"))
            called.append(function)
        others += map(written, called)
    answers = ids(message.get("tool_call_id"), message.get("name")) if role is Role.TOOL else frozenset()
    item = Item(
        place=place,
        role=role,
        tokens=0,
        texts=tuple(content.texts),
        reasoning=reasoning,
        media=tuple(content.media),
        calls=calls,
        answers=answers,
        typed=named == "user",
    )
    return Sketch(item, tuple(others))


def _thoughts(message: Mapping[str, Any]) -> tuple[Text, ...]:
    """vLLM reads ``reasoning`` and, if that is absent, ``reasoning_content``; clients send either, or both alike."""
    found: list[Text] = []
    for key in ("reasoning", "reasoning_content"):
        said = message.get(key)
        if isinstance(said, str) and said:
            found.append(Text((key,), "" if found else said))
    return tuple(found)
