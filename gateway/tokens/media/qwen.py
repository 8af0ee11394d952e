"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5: the image is resized to whole patches within a budget of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import ModelFiles, Rule, only, whole
from gateway.tokens.media.sizes import ImageSize

_MOST_ASPECT = 200
_LEAST_PIXELS = 56 * 56
_MOST_PIXELS = 28 * 28 * 1280


def qwen_images(files: ModelFiles, kwargs: Mapping[str, Any]) -> Rule[ImageSize]:
    """``size`` or ``min_pixels`` and ``max_pixels`` bound the pixels (transformers' Qwen2VLImageProcessor)."""
    only(kwargs, ("min_pixels", "max_pixels", "size"))
    settings = files.image_processor
    merge = whole(settings, "merge_size", 2)
    patch = whole(settings, "patch_size", 14)
    least, most = pixel_bounds(settings, kwargs, (_LEAST_PIXELS, _MOST_PIXELS))

    def tokens(size: ImageSize) -> int:
        height, width = smart_resize(size, patch * merge, least, most)
        return (height // patch) * (width // patch) // (merge * merge)

    return Rule(placeholder="<|vision_start|><|image_pad|><|vision_end|>", target="<|image_pad|>", tokens=tokens)


def smart_resize(size: ImageSize, factor: int, least_pixels: int, most_pixels: int) -> tuple[int, int]:
    """Height and width in pixels after resizing. Raises ``UnknownMedia`` for shapes the processor refuses."""
    height, width = size.height, size.width
    aspect = max(height, width) / min(height, width)
    if aspect > _MOST_ASPECT:
        raise UnknownMedia(f"an image with sides of {aspect:.0f} to 1", refused=True)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > most_pixels:
        ratio = math.sqrt(height * width / most_pixels)
        new_height = max(factor, math.floor(height / ratio / factor) * factor)
        new_width = max(factor, math.floor(width / ratio / factor) * factor)
    elif new_height * new_width < least_pixels:
        ratio = math.sqrt(least_pixels / (height * width))
        new_height = math.ceil(height * ratio / factor) * factor
        new_width = math.ceil(width * ratio / factor) * factor
    return new_height, new_width


def pixel_bounds(settings: Mapping[str, Any], kwargs: Mapping[str, Any], defaults: tuple[int, int]) -> tuple[int, int]:
    """The least and the most pixels, by the processor's settings and arguments. Raises ``UnknownMedia``."""
    size: dict[str, Any] = dict(zip(("shortest_edge", "longest_edge"), defaults, strict=True))
    for layer in (settings, kwargs):
        given = layer.get("size")
        if isinstance(given, Mapping):
            if layer is settings:
                size = {}
            size.update(given)
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if layer.get(key) is not None:
                size[edge] = layer[key]
    return whole(size, "shortest_edge"), whole(size, "longest_edge")
