"""Sizes of media items, as a formula takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Pixels of an image as vLLM sees it, that is after its EXIF orientation is applied."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class AudioSize:
    """Samples of one channel, and how many make a second."""

    samples: int
    rate_hz: int
