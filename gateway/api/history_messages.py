"""Anthropic ``messages`` as items: one each, but a user message that answers tool calls is two, its results and the
rest, since results go with their calls and what the user typed does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.history_parts import Content, Sketch, content_of, ids, written
from gateway.history import Item, Path, Role, Text

_ROLES = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
# Claude Code wraps what it adds to the user's words in this.
_REMINDER = "<system-reminder>"


def read(messages: Sequence[Any]) -> list[Sketch]:
    """The items of ``messages``. What is no message is kept as one that cannot be touched."""
    found: list[Sketch] = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found.append(Sketch(Item(place, Role.SYSTEM, 0), (written(message),)))
            continue
        named = message.get("role")
        role = _ROLES.get(named, Role.USER) if isinstance(named, str) else Role.USER
        content = message.get("content")
        if role is Role.ASSISTANT and isinstance(content, list):
            found.append(_answer(place, content))
        elif role is Role.USER and isinstance(content, list):
            found += _question(place, content)
        else:
            found.append(_plain(place, role, content_of(content, ("content",))))
    return found


def _plain(place: int, role: Role, content: Content, blocks: tuple[int, ...] | None = None) -> Sketch:
    typed = role is Role.USER and any(not text.text.lstrip().startswith(_REMINDER) for text in content.texts)
    item = Item(
        place=place,
        role=role,
        tokens=0,
        texts=tuple(content.texts),
        media=tuple(content.media),
        typed=typed or (role is Role.USER and bool(content.media)),
        blocks=blocks,
    )
    return Sketch(item, tuple(content.others))


def _answer(place: int, blocks: Sequence[Any]) -> Sketch:
    content, thoughts, calls = Content([], [], []), [], []
    for number, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in ("thinking", "redacted_thinking"):
            said = block.get("thinking") or block.get("data")
            thoughts.append(Text(("content", number), said if isinstance(said, str) else ""))
        elif kind == "tool_use":
            calls.append(block.get("id"))
            content.others.append(written({"name": block.get("name"), "arguments": block.get("input")}))
        else:
            _add(content, block, ("content", number))
    item = Item(
        place=place,
        role=Role.ASSISTANT,
        tokens=0,
        texts=tuple(content.texts),
        reasoning=tuple(thoughts),
        media=tuple(content.media),
        calls=ids(*calls),
    )
    return Sketch(item, tuple(content.others))


def _question(place: int, blocks: Sequence[Any]) -> list[Sketch]:
    results, rest = Content([], [], []), Content([], [], [])
    result_blocks, rest_blocks, answers = [], [], []
    for number, block in enumerate(blocks):
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            result_blocks.append(number)
            answers.append(block.get("tool_use_id"))
            inner = content_of(block.get("content"), ("content", number, "content"))
            results.texts += inner.texts
            results.media += inner.media
            results.others += inner.others
        else:
            rest_blocks.append(number)
            _add(rest, block, ("content", number))
    if not result_blocks:
        return [_plain(place, Role.USER, rest)]
    item = Item(
        place=place,
        role=Role.TOOL,
        tokens=0,
        texts=tuple(results.texts),
        media=tuple(results.media),
        answers=ids(*answers),
        blocks=tuple(result_blocks),
    )
    found = [Sketch(item, tuple(results.others))]
    if rest_blocks:
        found.append(_plain(place, Role.USER, rest, tuple(rest_blocks)))
    return found


def _add(content: Content, block: Any, path: Path) -> None:
    """Sort one block, which stands at ``path``, into ``content``."""
    found = content_of([block], ())
    content.texts += [Text((*path, *text.path[1:]), text.text) for text in found.texts]
    content.media += [type(media)((*path, *media.path[1:]), media.tokens) for media in found.media]
    content.others += found.others
