"""Responses ``input`` items as items: one each. A model's answer is several: thoughts, message, calls."""

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
}


def read(messages: Sequence[Any]) -> list[Sketch]:
    """One item an input item. What is none is kept as one that cannot be touched."""
    return [_sketch(place, item) for place, item in enumerate(messages)]


def _sketch(place: int, item: Any) -> Sketch:
    if not isinstance(item, Mapping):
        return Sketch(Item(place, Role.SYSTEM, 0), (written(item),))
    kind = item.get("type")
    if kind == "reasoning":
        return _thoughts(place, item)
    if isinstance(kind, str) and kind.endswith("_output"):
        output = content_of(item.get("output"), ("output",))
        found = Item(
            place=place,
            role=Role.TOOL,
            tokens=0,
            texts=tuple(output.texts),
            media=tuple(output.media),
            answers=ids(item.get("call_id")),
        )
        return Sketch(found, tuple(output.others))
    if isinstance(kind, str) and kind != "message":  # calls of whatever kind, and references to earlier answers
        called = written({key: item.get(key) for key in ("name", "arguments", "input", "action") if key in item})
        return Sketch(Item(place, Role.ASSISTANT, 0, calls=ids(item.get("call_id"))), (called,))
    named = item.get("role")
    role = _ROLES.get(named, Role.USER) if isinstance(named, str) else Role.USER
    content = content_of(item.get("content"), ("content",))
    found = Item(
        place=place,
        role=role,
        tokens=0,
        texts=tuple(content.texts),
        media=tuple(content.media),
        typed=named == "user",
    )
    return Sketch(found, tuple(content.others))


def _thoughts(place: int, item: Mapping[str, Any]) -> Sketch:
    """A reasoning item is thoughts and nothing else: removing them removes it."""
    said = [part for key in ("content", "summary") for part in content_parts(item.get(key))]
    return Sketch(Item(place, Role.ASSISTANT, 0, reasoning=(Text((), "\n".join(said)),)))


def content_parts(parts: Any) -> list[str]:
    """The texts of reasoning content or of its summary."""
    if not isinstance(parts, list):
        return []
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
