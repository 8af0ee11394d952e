"""What a repair rule is, and the dictionary work that rules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.types import Dialect, ModelFacts

Document = Mapping[str, Any]
Message = dict[str, Any]

# The repaired document, or None where there is nothing to repair. What comes in is never changed.
Mend = Callable[[Document, ModelFacts], "dict[str, Any] | None"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One repair. ``mark``: what ``look`` must have found in the messages of a chat for it to be worth a try."""

    name: str
    dialects: frozenset[Dialect]
    mend: Mend
    mark: str | None = None


def without(document: Document, *names: str) -> dict[str, Any]:
    """``document`` less some keys."""
    return {key: value for key, value in document.items() if key not in names}


def each_message(document: Document, mend: Callable[[Message], Message | None]) -> dict[str, Any] | None:
    """``document`` with every message replaced that ``mend`` returns another for; ``None`` if that is none."""
    messages = document.get("messages")
    if not isinstance(messages, list):
        return None
    mended = list(messages)
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            better = mend(message)
            if better is not None:
                mended[index] = better
    if all(new is old for new, old in zip(mended, messages, strict=True)):
        return None
    return {**document, "messages": mended}


def text_of(content: Any) -> str:
    """The text of content in any form; media have none."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (
            part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | dict)
        )
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def merged(first: Any, second: Any) -> Any:
    """Two contents as one: parts stay parts, texts are joined by an empty line."""
    if isinstance(first, list) or isinstance(second, list):
        return [*_parts(first), *_parts(second)]
    return "\n\n".join(text for text in (first, second) if isinstance(text, str) and text)


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if isinstance(content, str) and content else []
