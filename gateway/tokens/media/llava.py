"""LLaVA 1.5, NeXT and OneVision: a fixed grid of patches, or tiles of such grids cut to the image's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import Family, ModelFiles, Rule, only, whole
from gateway.tokens.media.frames import uniform_frames
from gateway.tokens.media.sizes import ImageSize, VideoSize

# Image and patch size where the configuration leaves them out, by vision tower (transformers' configuration classes).
_TOWERS = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16)}


def llava(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """Every image takes the same number of tokens."""
    only(kwargs, ())
    tower = _Tower(files, "clip_vision_model", (336, 14), "default")
    return _family(lambda size: tower.base_tokens)


def llava_next(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """The whole image in one grid, and again in the tiles that fit its shape best, with a newline token a row."""
    only(kwargs, ())
    tower = _Tower(files, "clip_vision_model", (336, 14), "default")
    pinpoints = _pinpoints(files.config)

    def tokens(size: ImageSize) -> int:
        rows, columns = _unpadded(size, tower, pinpoints)
        return tower.base_tokens + rows * columns + rows

    return _family(tokens)


def llava_onevision(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """As LLaVA-NeXT, but tiles beyond nine grids (``anyres_max_9``, which vLLM 0.32 takes for granted) are shrunk."""
    only(kwargs, ())
    tower = _Tower(files, "siglip_vision_model", (384, 14), "full")
    pinpoints = _pinpoints(files.config)

    def tokens(size: ImageSize) -> int:
        rows, columns = _unpadded(size, tower, pinpoints)
        ratio = math.sqrt(rows * columns / (9 * tower.grid**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return tower.base_tokens + rows * columns + rows

    return _family(tokens)


def onevision_video(files: ModelFiles, kwargs: Mapping[str, Any], io: Mapping[str, Any]) -> Rule[VideoSize]:
    """Each sampled frame takes one grid, pooled by two, and the video one newline."""
    only(kwargs, ())
    if files.video_processor.get("do_sample_frames"):
        raise UnknownMedia("the video processor samples frames itself")
    tower = _Tower(files, "siglip_vision_model", (384, 14), "full")
    frame_tokens = math.ceil(tower.grid / whole(files.config, "spatial_pool_stride", 2)) ** 2
    return Rule(
        placeholder="<video>",
        target="<video>",
        tokens=lambda video: frame_tokens * uniform_frames(video, io) + 1,
    )


def _family(tokens: Callable[[ImageSize], int]) -> Family:
    return Family(image=Rule(placeholder="<image>", target="<image>", tokens=tokens))


class _Tower:
    """A vision tower: ``grid`` patches on a side, ``base_tokens`` of an image that fills it."""

    def __init__(self, files: ModelFiles, default_kind: str, whole_default: tuple[int, int], strategy: str) -> None:
        vision = files.vision
        kind = vision.get("model_type", default_kind)
        if kind not in _TOWERS:
            raise UnknownMedia(f"a vision tower of type {kind!r}")
        image_default, patch_default = _TOWERS[kind] if vision else whole_default
        self.image_px = whole(vision, "image_size", image_default)
        self.grid = self.image_px // whole(vision, "patch_size", patch_default)
        encoded = self.grid**2 + (1 if kind == "clip_vision_model" else 0)
        chosen = files.config.get("vision_feature_select_strategy", strategy)
        if chosen not in ("default", "full"):
            raise UnknownMedia(f"vision_feature_select_strategy {chosen!r}")
        self.base_tokens = encoded - 1 if chosen == "default" else encoded


def _pinpoints(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    given = config.get("image_grid_pinpoints")
    try:
        pinpoints = tuple((int(height), int(width)) for height, width in given or ())
    except (TypeError, ValueError):
        pinpoints = ()
    if not pinpoints:
        raise UnknownMedia("the model has no image_grid_pinpoints")
    return pinpoints


def _unpadded(size: ImageSize, tower: _Tower, pinpoints: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Rows and columns of patches that are not padding."""
    best_height, best_width = best_resolution(size, pinpoints)
    rows = tower.grid * (best_height // tower.image_px)
    columns = tower.grid * (best_width // tower.image_px)
    if size.width / size.height > columns / rows:
        inner = int(round(size.height * (columns / size.width), 7))
        rows -= (rows - inner) // 2 * 2
    else:
        inner = int(round(size.width * (rows / size.height), 7))
        columns -= (columns - inner) // 2 * 2
    return rows, columns


def best_resolution(size: ImageSize, resolutions: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Of ``(height, width)`` that which keeps most of the image's pixels, and of equals that which wastes least."""
    best, best_kept, best_wasted = None, 0, math.inf
    for height, width in resolutions:
        scale = min(width / size.width, height / size.height)
        kept = min(int(size.width * scale) * int(size.height * scale), size.width * size.height)
        wasted = width * height - kept
        if kept > best_kept or (kept == best_kept and wasted < best_wasted):
            best, best_kept, best_wasted = (height, width), kept, wasted
    if best is None:  # every resolution shrinks one side of the image to nothing
        raise UnknownMedia(f"an image of {size.width} x {size.height} pixels fits no resolution", refused=True)
    return best
