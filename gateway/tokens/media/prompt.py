"""Media in a chat prompt: find the items, put stand-ins into the messages, and count what vLLM puts in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gateway.tokens.media.data_urls import Bytes, data_url_bytes
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import Family, Rule
from gateway.tokens.media.headers import image_size
from gateway.tokens.media.parts import KNOWN_PART_KEYS, MediaPart, is_media
from gateway.tokens.media.sizes import AudioSize, ImageSize, MediaSize, VideoSize
from gateway.tokens.media.sounds import audio_size
from gateway.tokens.media.videos import video_size

Modality = Literal["image", "audio", "video"]
_Size = TypeVar("_Size", ImageSize, AudioSize, VideoSize)

_KEYS: tuple[tuple[str, Modality], ...] = (
    ("image_url", "image"),
    ("audio_url", "audio"),
    ("input_audio", "audio"),
    ("video_url", "video"),
)


@dataclass(frozen=True, slots=True)
class Item:
    """One item of media and where it comes from: a data URL or another."""

    modality: Modality
    url: str


def find_items(messages: Sequence[Any]) -> list[Item]:
    """All media of a conversation, in order. Raises ``UnknownMedia`` for kinds that are not counted here."""
    return [
        _item(part)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
        if is_media(part)
    ]


def with_stand_ins(messages: Sequence[Any], family: Family, inline: bool = False) -> list[Any]:
    """The messages with a ``MediaPart`` for each item; ``inline`` as there."""
    numbers: dict[Modality, int] = {"image": 0, "audio": 0, "video": 0}
    return [_with_stand_ins(message, family, numbers, inline) for message in messages]


def measured(items: Sequence[Item], remote: Mapping[str, MediaSize]) -> list[MediaSize]:
    """The size of each item. ``remote``: of those at other addresses than data URLs. Raises ``UnknownMedia``."""
    return [_measured(item, remote) for item in items]


def expanded(text: str, sizes: Sequence[MediaSize], family: Family) -> tuple[str, int]:
    """A rendered prompt as it is to be encoded for counting, and the tokens to add to those of its text.

    Raises ``UnknownMedia`` where the model has no rule for an item, or the template shows fewer than there are.
    """
    text, image_tokens = _expanded(text, [size for size in sizes if isinstance(size, ImageSize)], family.image)
    text, audio_tokens = _expanded(text, [size for size in sizes if isinstance(size, AudioSize)], family.audio)
    text, video_tokens = _expanded(text, [size for size in sizes if isinstance(size, VideoSize)], family.video)
    return text, image_tokens + audio_tokens + video_tokens


def noted(sizes: Sequence[MediaSize], family: Family) -> tuple[str, ...]:
    """Texts within the items, whose tokens come on top, each encoded by itself."""
    notes = family.video.notes if family.video is not None else None
    if notes is None:
        return ()
    return tuple(note for size in sizes if isinstance(size, VideoSize) for note in notes(size))


def size_of_item(data: Bytes, modality: Modality) -> MediaSize:
    """The size of an item from its bytes. Raises ``UnknownMedia``."""
    match modality:
        case "image":
            return image_size(data)
        case "audio":
            return audio_size(data)
        case "video":
            return video_size(data)


def _measured(item: Item, remote: Mapping[str, MediaSize]) -> MediaSize:
    data = data_url_bytes(item.url)
    if data is not None:
        if item.modality == "video" and item.url[5:16].lower() == "video/jpeg;":
            raise UnknownMedia("a video of single pictures")
        return size_of_item(data, item.modality)
    if item.url not in remote:
        raise UnknownMedia("an item at a remote address")
    return remote[item.url]


def _expanded(text: str, sizes: Sequence[_Size], rule: Rule[_Size] | None) -> tuple[str, int]:
    if not sizes:
        return text, 0
    if rule is None:
        raise UnknownMedia("what the model makes of this kind of media is not known here")
    pieces = text.split(rule.target, len(sizes))
    if len(pieces) <= len(sizes):
        raise UnknownMedia("the chat template leaves media out", refused=True)
    added = sum(map(rule.tokens, sizes)) - rule.stand_in_tokens * len(sizes)
    if rule.seams is not None:
        added -= rule.seams(pieces)
    return (text if rule.stand_in is None else rule.stand_in.join(pieces)), added


def _with_stand_ins(message: Any, family: Family, numbers: dict[Modality, int], inline: bool) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(map(is_media, content)):
        return message
    parts = [_stand_in(part, family, numbers, inline) if is_media(part) else part for part in content]
    return {**message, "content": parts}


def _stand_in(part: Mapping[str, Any], family: Family, numbers: dict[Modality, int], inline: bool) -> MediaPart:
    modality = _item(part).modality
    numbers[modality] += 1
    rule = {"image": family.image, "audio": family.audio, "video": family.video}[modality]
    if rule is None:
        raise UnknownMedia("what the model makes of this kind of media is not known here")
    extra = {key: value for key, value in part.items() if key not in KNOWN_PART_KEYS}
    placeholder = rule.placeholder and rule.placeholder.replace("{number}", str(numbers[modality]))
    return MediaPart({"type": modality, **extra}, placeholder, inline)


def _item(part: Mapping[str, Any]) -> Item:
    """Raises ``UnknownMedia`` for embeddings, items known by their uuid alone, and what vLLM refuses."""
    kind, keyed = part.get("type"), part.get("uuid") is not None or part.get("type") is None
    for key, modality in _KEYS:
        if key in part if keyed else kind == key or (kind, key) == ("input_image", "image_url"):
            url = _url(part.get(key), key, strict=not keyed and kind != "input_image")
            if url is None:
                raise UnknownMedia("an item that the server is to have cached")
            return Item(modality, url)
    raise UnknownMedia("embeddings are not counted here")


def _url(value: Any, key: str, *, strict: bool) -> str | None:
    if key == "input_audio":
        data = value.get("data") if isinstance(value, Mapping) else None
        return f"data:audio/any;base64,{data}" if isinstance(data, str) and data else None
    if isinstance(value, Mapping):
        value = value.get("url")
    elif strict:
        raise UnknownMedia(f"{key} must be an object with a url", refused=True)
    if value is not None and not isinstance(value, str):
        raise UnknownMedia("the address of an item must be a string", refused=True)
    return value or None
