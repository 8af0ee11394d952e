"""What the readers of histories share: an item before its tokens are known, and content as texts and media."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.history import Item, Media, Path, Text

# What a template puts around a message, and a picture of one screen, about.
FRAME_TOKENS = 5
MEDIA_TOKENS = 1200

_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_MEDIA_TYPES = frozenset(
    {"image", "image_url", "input_image", "audio_url", "input_audio", "video_url", "file", "input_file", "document"}
)


@dataclass(frozen=True, slots=True)
class Sketch:
    """An item whose tokens are not known yet. ``others`` are texts that count but cannot be shortened."""

    item: Item
    others: tuple[str, ...] = ()


@dataclass(slots=True)
class Content:
    """A message's content, sorted."""

    texts: list[Text]
    media: list[Media]
    others: list[str]


def content_of(content: Any, path: Path) -> Content:
    """Texts, media and the rest of ``content``, which is a string, a list of parts, or nothing known."""
    found = Content([], [], [])
    if isinstance(content, str):
        found.texts.append(Text(path, content))
    elif isinstance(content, list):
        for number, part in enumerate(content):
            _take(part, (*path, number), found)
    elif content is not None:
        found.others.append(written(content))
    return found


def _take(part: Any, path: Path, found: Content) -> None:
    if isinstance(part, str):
        found.texts.append(Text(path, part))
        return
    named = part.get("type") if isinstance(part, Mapping) else None
    kind = named if isinstance(named, str) else None
    if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
        found.texts.append(Text((*path, "text"), part["text"]))
    elif kind in _MEDIA_TYPES or (kind is None and isinstance(part, Mapping) and "image_url" in part):
        found.media.append(Media(path, MEDIA_TOKENS))
    else:
        found.others.append(written(part))


def written(value: Any) -> str:
    """``value`` as JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)


def ids(*values: Any) -> frozenset[str]:
    """The strings among ``values``."""
    return frozenset(value for value in values if isinstance(value, str))
