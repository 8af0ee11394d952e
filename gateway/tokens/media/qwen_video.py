"""Videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: sampled frames, resized together, two to a grid of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import ModelFiles, Rule, only, whole
from gateway.tokens.media.frames import qwen2_frames, qwen3_frames, spread
from gateway.tokens.media.qwen import pixel_bounds, smart_resize
from gateway.tokens.media.sizes import ImageSize, VideoSize

_PLACEHOLDER = "<|vision_start|><|video_pad|><|vision_end|>"
_TARGET = "<|video_pad|>"
_SETTINGS = ("min_pixels", "max_pixels", "size")
_MOST_ASPECT = 200


def qwen2_video(files: ModelFiles, kwargs: Mapping[str, Any], io: Mapping[str, Any]) -> Rule[VideoSize]:
    """Frames are resized as images are, each within the bounds of the video processor (its own, else the image's)."""
    only(kwargs, _SETTINGS)
    grid = _Grid(files, 14)
    least, most = pixel_bounds(grid.settings, kwargs, (128 * 28 * 28, 28 * 28 * 768))

    def tokens(video: VideoSize) -> int:
        pairs = -(-qwen2_frames(video, io) // 2)
        return grid.tokens(pairs, *smart_resize(ImageSize(video.width, video.height), grid.factor, least, most))

    return Rule(placeholder=_PLACEHOLDER, target=_TARGET, tokens=tokens)


def qwen3_video(files: ModelFiles, kwargs: Mapping[str, Any], io: Mapping[str, Any]) -> Rule[VideoSize]:
    """All frames share one budget of pixels, and each pair has its time written before it, in text.

    With transformers 5.10 or later vLLM 0.32 replaces the bare ``<|video_pad|>``: the marks around it stay.
    """
    only(kwargs, _SETTINGS)
    grid = _Grid(files, 16)
    defaults = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
    given = {**defaults, **(grid.settings.get("size") or {}), **(kwargs.get("size") or {})}
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if kwargs.get(key) is not None:
            given[edge] = kwargs[key]
    least, most = whole(given, "shortest_edge"), whole(given, "longest_edge")
    fps, fewest = whole(grid.settings, "fps", 2), whole(grid.settings, "min_frames", 4)
    frames_most = whole(grid.settings, "max_frames", 768)
    if grid.settings.get("num_frames") is not None:
        raise UnknownMedia("the video processor's num_frames is set")

    def sampled(video: VideoSize) -> list[int]:
        indices = qwen3_frames(video, io)
        if len(indices) == video.frames:  # vLLM then lets the processor sample once more
            indices = spread(video, fps, fewest, frames_most)
        return indices

    def tokens(video: VideoSize) -> int:
        count = len(sampled(video))
        pairs = -(-count // 2)
        return grid.tokens(pairs, *_resized(video, count, grid.factor, least, most)) + 2 * pairs

    def notes(video: VideoSize) -> tuple[str, ...]:
        times = [index / video.fps for index in sampled(video)]
        times += times[-1:] * (len(times) % 2)
        return tuple(f"<{(one + two) / 2:.1f} seconds>" for one, two in zip(times[::2], times[1::2], strict=True))

    return Rule(placeholder=_PLACEHOLDER, target=_TARGET, tokens=tokens, notes=notes)


class _Grid:
    """Patches of the video processor, and how many of them make a token."""

    def __init__(self, files: ModelFiles, patch_px: int) -> None:
        self.settings = files.video_processor
        if whole(self.settings, "temporal_patch_size", 2) != 2 or self.settings.get("cap_pixels_per_frame"):
            raise UnknownMedia("the video processor's settings are not known here")
        if self.settings.get("do_sample_frames") and patch_px == 14:
            raise UnknownMedia("the video processor samples frames itself")
        if self.settings.get("do_resize") is False:
            raise UnknownMedia("the video processor does not resize")
        self._patch = whole(self.settings, "patch_size", patch_px)
        merge = whole(self.settings, "merge_size", 2)
        self.factor = self._patch * merge
        self._merged = whole(files.image_processor, "merge_size", 2) ** 2

    def tokens(self, pairs: int, height: int, width: int) -> int:
        """Tokens of so many pairs of frames, resized to so many pixels."""
        return pairs * (height // self._patch) * (width // self._patch) // self._merged


def _resized(video: VideoSize, frames: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Height and width in pixels of each of ``frames`` frames that share a budget (Qwen3VLVideoProcessor)."""
    height, width = video.height, video.width
    if frames < 2:
        raise UnknownMedia("a video of one frame", refused=True)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _MOST_ASPECT:
        raise UnknownMedia("a video of too long a side", refused=True)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    even = round(frames / 2) * 2
    if even * new_height * new_width > most:
        ratio = math.sqrt(frames * height * width / most)
        new_height = max(factor, math.floor(height / ratio / factor) * factor)
        new_width = max(factor, math.floor(width / ratio / factor) * factor)
    elif even * new_height * new_width < least:
        ratio = math.sqrt(least / (frames * height * width))
        new_height = math.ceil(height * ratio / factor) * factor
        new_width = math.ceil(width * ratio / factor) * factor
    return new_height, new_width
