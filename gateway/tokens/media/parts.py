"""Content parts that hold media, and what stands for them in templates of either content format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tokens.media.errors import UnknownMedia

MEDIA_KEYS = frozenset(
    {
        "input_image",
        "image_url",
        "image_embeds",
        "image_pil",
        "audio_url",
        "audio_embeds",
        "input_audio",
        "video_url",
        "video_embeds",
        "prompt_embeds",
    }
)
"""Types, and keys, of content parts that hold media (vLLM 0.32's ``MM_PARSER_MAP`` less the textual ones)."""

KNOWN_PART_KEYS = MEDIA_KEYS | {
    "type",
    "text",
    "refusal",
    "thinking",
    "closed",
    "name",
    "uuid",
    "data",
    "file",
    "prompt_cache_breakpoint",
}
"""Keys of content parts that vLLM knows; any other key reaches a template that takes parts."""


def is_media(part: Any) -> bool:
    """Whether vLLM reads a content part as media: by its type, or by its keys where it has no type or a uuid."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if isinstance(kind, str) and kind in MEDIA_KEYS:
        return True
    return (kind is None or part.get("uuid") is not None) and not MEDIA_KEYS.isdisjoint(part)


class MediaPart(dict[str, Any]):
    """What a template that takes parts sees: ``{"type": "image"}`` and the part's unknown keys.

    ``placeholder`` is the text that stands for the item where the template takes strings; ``None``: none. ``inline``:
    it stands where the item is, not before the message's text (``--interleave-mm-strings``).
    """

    def __init__(self, seen: Mapping[str, Any], placeholder: str | None, inline: bool = False) -> None:
        super().__init__(seen)
        self.placeholder = placeholder
        self.inline = inline and placeholder is not None


def placeholders_first(message: Any) -> Any:
    """The message with its media parts as one text part before the others, as vLLM 0.32 does it for string templates.

    Placeholders that the client wrote into the text itself are left where they are and not added again
    (``_get_full_multimodal_text_prompt``). Raises ``UnknownMedia`` if there are more of them than items.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    media = [part for part in content if isinstance(part, MediaPart)]
    if not media:
        return message
    rest = [
        {"type": "text", "text": part.placeholder} if isinstance(part, MediaPart) else part
        for part in content
        if not isinstance(part, MediaPart) or part.inline
    ]
    missing = _missing([part.placeholder for part in media if part.placeholder], "\n".join(map(_text, rest)))
    first = [{"type": "text", "text": "\n".join(missing)}] if missing else []
    return {**message, "content": first + rest}


def _missing(placeholders: Sequence[str], text: str) -> list[str]:
    missing: list[str] = []
    for placeholder in dict.fromkeys(placeholders):
        lacking = placeholders.count(placeholder) - text.count(placeholder)
        if lacking < 0:
            raise UnknownMedia("the text has more placeholders than there are items", refused=True)
        missing += [placeholder] * lacking
    return missing


def _text(part: Any) -> str:
    if isinstance(part, Mapping):
        part = next((part[key] for key in ("text", "refusal", "thinking") if key in part), "")
    return part if isinstance(part, str) else ""
