"""What a family of models says of its media: where they stand in the prompt and how many tokens each becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.sizes import AudioSize, ImageSize, VideoSize

Size = TypeVar("Size", ImageSize, AudioSize, VideoSize)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What formulas are made of: a model's JSON files.

    ``config.json``, ``preprocessor_config.json``, ``processor_config.json``, ``video_preprocessor_config.json``.
    """

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    video_preprocessor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vision(self) -> Mapping[str, Any]:
        """The vision part of the configuration."""
        vision = self.config.get("vision_config")
        return vision if isinstance(vision, Mapping) else {}

    @property
    def image_processor(self) -> Mapping[str, Any]:
        """Settings of the image processor, which newer models keep within ``processor_config.json``."""
        inner = self.processor.get("image_processor")
        return {**self.preprocessor, **inner} if isinstance(inner, Mapping) else self.preprocessor

    @property
    def video_processor(self) -> Mapping[str, Any]:
        """Settings of the video processor: within ``processor_config.json``, else its own file, else the image's."""
        inner = self.processor.get("video_processor")
        return inner if isinstance(inner, Mapping) else self.video_preprocessor or self.preprocessor

    @property
    def feature_extractor(self) -> Mapping[str, Any]:
        """Settings of the audio feature extractor."""
        inner = self.processor.get("feature_extractor")
        return {**self.preprocessor, **inner} if isinstance(inner, Mapping) else self.preprocessor


@dataclass(frozen=True, slots=True)
class Rule(Generic[Size]):
    """How items of one modality enter a prompt.

    ``placeholder`` is what vLLM puts into the text of a message if the template takes strings (``None``: nothing);
    ``{number}`` in it counts the items of the conversation.
    ``target`` is what vLLM looks for in the rendered text, once an item; it becomes ``tokens(size)`` tokens, raising
    ``UnknownMedia``. For counting, ``target`` is replaced by ``stand_in``, of ``stand_in_tokens`` tokens. ``seams``
    takes the texts between the targets and says how many tokens merge where items meet text. ``notes`` are texts that
    the model is given within an item, each encoded by itself; their tokens come on top.
    """

    placeholder: str | None
    target: str
    tokens: Callable[[Size], int]
    stand_in: str | None = None
    stand_in_tokens: int = 1
    seams: Callable[[Sequence[str]], int] | None = None
    notes: Callable[[Size], tuple[str, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """The modalities whose tokens can be told from an item's size."""

    image: Rule[ImageSize] | None = None
    audio: Rule[AudioSize] | None = None
    video: Rule[VideoSize] | None = None


def whole(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number of a configuration. Raises ``UnknownMedia`` if it is something else, or absent."""
    value = source.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UnknownMedia(f"the model's {key} is {value!r}")
    return value


def only(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ``UnknownMedia`` for processor arguments whose effect is not known here."""
    for key in kwargs:
        if key not in known:
            raise UnknownMedia(f"what mm_processor_kwargs.{key} does to this model is not known here")
