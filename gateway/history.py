"""A conversation as trimming sees it, and the edits trimming asks for: plain data with no dialect in it.

Shared by ``api``, which makes a ``History`` of a request's body and applies ``Edit``s to a copy of the body, and
``guard``, which decides what goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

# Where something stands within its message: keys and indices, followed one after the other.
Path = tuple[str | int, ...]
# Tokens of a bare text.
Measure = Callable[[str], int]

# Written into the place of what was removed. Constant text: a number that changed with every turn would change the
# prefix with every turn.
IMAGE_NOTE = "[image removed by the gateway to fit the context window]"


class Role(StrEnum):
    """Who speaks. ``developer`` is ``SYSTEM``; a tool's result is ``TOOL``, whatever its dialect wraps it in."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Text:
    """A text that may be shortened, or thoughts that may be removed."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """An image, or what else is no text, that may be replaced by a note."""

    path: Path
    tokens: int


@dataclass(frozen=True, slots=True)
class Item:
    """One message, or the part of one that trimming handles apart (a tool's results in Anthropic's user messages).

    ``place`` is the index of its message in the body's list; ``blocks`` are the content blocks that belong to it, or
    ``None`` for the whole message. ``tokens`` depend on the message alone, not on its neighbours. ``reasoning`` are
    thoughts, removed whole or not at all; the path ``()`` stands for the whole message. ``calls`` and ``answers`` are
    ids of tool calls made and answered. ``typed``: a person wrote it.
    """

    place: int
    role: Role
    tokens: int
    texts: tuple[Text, ...] = ()
    reasoning: tuple[Text, ...] = ()
    media: tuple[Media, ...] = ()
    calls: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()
    typed: bool = False
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class History:
    """A conversation, oldest item first. ``overhead_tokens`` belong to no item: tools, a system prompt that stands
    apart from the messages, the template's own text."""

    items: tuple[Item, ...]
    overhead_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The sum, which is close to the count of the whole but need not equal it."""
        return self.overhead_tokens + sum(item.tokens for item in self.items)


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove the item."""

    item: int


@dataclass(frozen=True, slots=True)
class Shorten:
    """Put ``text``, which has a marker in its middle, into the place of the text at ``path``."""

    item: int
    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class DropReasoning:
    """Remove all thoughts of the item."""

    item: int


@dataclass(frozen=True, slots=True)
class DropMedia:
    """Put ``IMAGE_NOTE`` into the place of every image of the item."""

    item: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Say that messages are missing. ``joined``: at the end of item ``after``; else as a message of its own by ``role``
    behind it. ``after`` is ``None`` where the conversation has no user message: then it stands before item ``before``.
    """

    text: str
    role: Role
    after: int | None
    joined: bool = False
    before: int = 0


Edit = Drop | Shorten | DropReasoning | DropMedia | Notice
