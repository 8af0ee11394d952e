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


@dataclass(frozen=True, slots=True)
class VideoSize:
    """Pixels of a frame as vLLM sees it, that is turned; the frames that can be shown, and how many make a second."""

    width: int
    height: int
    frames: int
    fps: float

    @property
    def duration_s(self) -> float:
        """How long the video is, as vLLM reckons it."""
        return self.frames / self.fps


MediaSize = ImageSize | AudioSize | VideoSize
"""The size of an item of any modality."""
