"""The conversation in a request's body as trimming sees it, and the body again after trimming.

Each dialect has its reader (``history_chat``, ``history_responses``, ``history_messages``); what they find is addressed
by paths, so that writing back is the same for all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from gateway.api import history_chat, history_messages, history_responses
from gateway.api.history_parts import FRAME_TOKENS, MEDIA_TOKENS, Sketch
from gateway.api.rewrite import must_be_read_anew
from gateway.history import (
    IMAGE_NOTE,
    Drop,
    DropMedia,
    DropReasoning,
    Edit,
    History,
    Item,
    Measure,
    Notice,
    Path,
    Shorten,
)
from gateway.types import Ask, Dialect

# The body field that holds the conversation, and the reader of its messages.
_LISTS: Mapping[Dialect, str] = {Dialect.CHAT: "messages", Dialect.RESPONSES: "input", Dialect.MESSAGES: "messages"}
_READERS: Mapping[Dialect, Callable[[Sequence[Any]], list[Sketch]]] = {
    Dialect.CHAT: history_chat.read,
    Dialect.RESPONSES: history_responses.read,
    Dialect.MESSAGES: history_messages.read,
}
# Body fields that are rendered before the conversation.
_APART = ("tools", "system", "instructions", "documents")

# Where sums of parts are scaled to the count of the whole, the factor goes in such steps: one that changed a little
# with every turn would move the cut with every turn. Half a step is left to the correction after counting.
_FACTOR_STEPS = 20
# Each takes some 20 µs to look at and to measure, and a thread of its own, in which one conversation waits for another.
MOST_PARTS = 50_000
# What is looked at of a conversation's opening, on the event loop.
_OPENING_MESSAGES = 1_000
_OPENING_PARTS = 1_000
# The share of a longer message is taken from its texts, as what is cut out of them will be.
_VAST_CHARS = 1_000_000
_EMPTIED = "[reasoning removed by the gateway]"


def history_of(
    ask: Ask, measure: Measure, total_tokens: int | None, shares: tuple[Sequence[int], int] | None = None
) -> tuple[History, Measure] | None:
    """The conversation of ``ask``, and the measure to trim it by; ``None`` if the request has none.

    ``measure``: tokens of a bare text, always the same for the same text. ``shares``: tokens of each message and of all
    else, as the local counter gives them; they are taken for chats, where they belong to the messages one by one.
    Otherwise the parts are measured, and scaled if together they differ from ``total_tokens``, the count of the whole
    (``None``: there is none).
    """
    messages = _messages(ask.document, ask.dialect)
    if messages is None:
        return None
    sketches = _READERS[ask.dialect](messages)
    if shares is not None and ask.dialect is Dialect.CHAT and len(shares[0]) == len(sketches):
        tokens, overhead = shares
        items = tuple(
            replace(sketch.item, tokens=_size(sketch, measure) if _is_vast(sketch.item) else each)
            for sketch, each in zip(sketches, tokens, strict=True)
        )
        return History(items, overhead), measure
    sizes = [_size(sketch, measure) for sketch in sketches]
    apart = sum(measure(_json(ask.document[name])) for name in _APART if ask.document.get(name)) + FRAME_TOKENS
    factor = 1.0 if total_tokens is None else _factor(total_tokens, sum(sizes) + apart)

    def scaled(text: str) -> int:
        return math.ceil(measure(text) * factor)

    items = tuple(
        replace(sketch.item, tokens=math.ceil(size * factor)) for sketch, size in zip(sketches, sizes, strict=True)
    )
    return History(items, math.ceil(apart * factor)), scaled


def by_bytes(text: str) -> int:
    """A measure for where there is no tokenizer: about three bytes a token."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // 3)


def trimmed_body(ask: Ask, history: History, edits: Sequence[Edit]) -> bytes:
    """The body of ``ask`` with ``edits`` made. ``ask.document`` is not changed."""
    if must_be_read_anew(ask):
        return json.dumps(apply(json.loads(ask.body.decode("utf-8-sig")), ask.dialect, history, edits)).encode("ascii")
    return orjson.dumps(apply(ask.document, ask.dialect, history, edits))


def apply(document: Mapping[str, Any], dialect: Dialect, history: History, edits: Sequence[Edit]) -> dict[str, Any]:
    """A copy of ``document`` with ``edits`` made; what is not changed is shared with the original."""
    field = _LISTS[dialect]
    by_item: dict[int, list[Edit]] = {}
    for edit in edits:
        if not isinstance(edit, Notice):
            by_item.setdefault(edit.item, []).append(edit)
    notice = next((edit for edit in edits if isinstance(edit, Notice)), None)
    items: dict[int, list[tuple[int, Item]]] = {}
    for index, item in enumerate(history.items):
        items.setdefault(item.place, []).append((index, item))
    messages: list[Any] = []
    for place, message in enumerate(document[field]):
        here = items.get(place, [])
        before = notice is not None and notice.after is None and any(index == notice.before for index, _ in here)
        if notice is not None and before:
            messages.append(_note(notice))
        if any(by_item.get(index) for index, _ in here):
            message = _edited(message, here, by_item, dialect)
        joined = notice is not None and any(index == notice.after for index, _ in here)
        if notice is not None and joined and notice.joined:
            message = _joined(message, notice.text, dialect)
        if message is not None:
            messages.append(message)
        if notice is not None and joined and not notice.joined:
            messages.append(_note(notice))
    return {**document, field: messages}


def dropped_text(document: Mapping[str, Any], dialect: Dialect, history: History, dropped: Iterable[int]) -> str:
    """What the dropped items said, for a summary: a line of the speaker, then the message as text."""
    messages = document[_LISTS[dialect]]
    parts = []
    for index in dropped:
        item = history.items[index]
        said = "\n".join(text.text for text in item.texts)
        if item.calls:
            said += "\n" + "\n".join(_calls(messages[item.place]))
        parts.append(f"{item.role.value}:\n{said.strip()}")
    return "\n\n".join(parts)


def too_many_parts(ask: Ask) -> bool:
    """Whether the conversation has so many messages, or parts of messages, that trimming it would take long."""
    messages = _messages(ask.document, ask.dialect) or []
    parts = len(messages)
    for message in messages:
        if parts > MOST_PARTS:
            return True
        parts += _parts_in(message)
    return parts > MOST_PARTS


def opening_of(ask: Ask) -> tuple[str, str] | None:
    """What stays fixed at the start of a conversation: the system prompt, and the first user message, as text."""
    messages = _messages(ask.document, ask.dialect)
    if messages is None:
        return None
    system = [_json(_start(ask.document[name])) for name in ("system", "instructions") if ask.document.get(name)]
    for message in messages[:_OPENING_MESSAGES]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "user":
            return "\n".join(system), _json(_start(message.get("content")))
        if role in ("system", "developer"):
            system.append(_json(_start(message.get("content"))))
    return "\n".join(system), ""


def _parts_in(message: Any) -> int:
    """Parts of a message, those within results of tools, too."""
    if not isinstance(message, Mapping):
        return 0
    lists = [message.get(name) for name in ("content", "output", "summary", "tool_calls")]
    parts = [part for one in lists if isinstance(one, list) for part in one]
    inner = [part.get("content") for part in parts if isinstance(part, Mapping)]
    return len(parts) + sum(len(content) for content in inner if isinstance(content, list))


def _start(content: Any) -> Any:
    """The first parts of a message's content."""
    return content[:_OPENING_PARTS] if isinstance(content, list) else content


def _messages(document: Mapping[str, Any], dialect: Dialect) -> list[Any] | None:
    field = _LISTS.get(dialect)
    messages = document.get(field) if field else None
    return messages if isinstance(messages, list) else None


def _size(sketch: Sketch, measure: Measure) -> int:
    item = sketch.item
    texts = (*(text.text for text in (*item.texts, *item.reasoning)), *sketch.others)
    return FRAME_TOKENS + sum(map(measure, texts)) + MEDIA_TOKENS * len(item.media)


def _is_vast(item: Item) -> bool:
    """Whether the local counter may have shied at the message, and said its bytes."""
    return sum(len(text.text) for text in item.texts) > _VAST_CHARS


def _factor(total_tokens: int, sum_tokens: int) -> float:
    ratio = total_tokens / max(1, sum_tokens)
    return min(4.0, max(0.25, math.ceil(ratio * _FACTOR_STEPS - 0.5) / _FACTOR_STEPS))


def _edited(message: Any, here: list[tuple[int, Item]], by_item: Mapping[int, list[Edit]], dialect: Dialect) -> Any:
    """The message as the edits of its items leave it; ``None`` if nothing is left of it."""
    gone: list[Path] = []
    dropped = 0
    copy = _Copy(message)
    for index, item in here:
        for edit in by_item.get(index, ()):
            match edit:
                case Drop():
                    dropped += 1
                    gone += [("content", block) for block in item.blocks or ()]
                case Shorten(path=path, text=text):
                    copy.put(path, text)
                case DropMedia():
                    for media in item.media:
                        copy.put(media.path, _text_part(IMAGE_NOTE, dialect))
                case DropReasoning():
                    gone += [thought.path for thought in item.reasoning]
    if dropped == len(here) or () in gone:
        return None
    copy.remove(gone)
    if gone and copy.value.get("content") == []:
        copy.put(("content",), [_text_part(_EMPTIED, dialect)])
    return copy.value


class _Copy:
    """A copy of a message in which only what changes is copied, and each list once: one may hold 100,000 blocks."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._own: dict[Path, Any] = {}

    def put(self, path: Path, new: Any) -> None:
        """Put ``new`` into the place of what is at ``path``, which is not empty."""
        self._container(path[:-1])[path[-1]] = new

    def remove(self, paths: Sequence[Path]) -> None:
        """Remove what is at ``paths``, which are not empty; they are those of before any removal."""
        by_parent: dict[Path, set[str | int]] = {}
        for path in paths:
            by_parent.setdefault(path[:-1], set()).add(path[-1])
        for parent, keys in by_parent.items():
            container = self._container(parent)
            if isinstance(container, list):
                container[:] = [part for number, part in enumerate(container) if number not in keys]
            else:
                for key in keys:
                    del container[key]

    def _container(self, path: Path) -> Any:
        """The list or object at ``path``, copied if it is still the original's."""
        if path not in self._own:
            if path:
                parent = self._container(path[:-1])
                self._own[path] = parent[path[-1]] = parent[path[-1]].copy()
            else:
                self._own[path] = self.value = self.value.copy()
        return self._own[path]


def _joined(message: Any, text: str, dialect: Dialect) -> Any:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, _text_part(text, dialect)]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}


def _note(notice: Notice) -> dict[str, Any]:
    return {"role": notice.role.value, "content": notice.text}


def _text_part(text: str, dialect: Dialect) -> dict[str, Any]:
    return {"type": "input_text" if dialect is Dialect.RESPONSES else "text", "text": text}


def _calls(message: Any) -> list[str]:
    """Tool calls of a message as text."""
    content, made = message.get("content"), message.get("tool_calls")
    parts = [*(content if isinstance(content, list) else ()), *(made if isinstance(made, list) else ())]
    called = [part for part in parts if isinstance(part, Mapping) and part.get("type") in ("tool_use", "function")]
    return [f"calls {_json(call.get('function') or call)}" for call in called or [message]]


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
