"""Llama 4: square tiles on the canvas that enlarges the image least (or shrinks it least), then the whole image."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import Family, ModelFiles, Rule, only, whole
from gateway.tokens.media.sizes import ImageSize


def llama4(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """``max_patches`` is the most tiles; each is followed by a separator."""
    only(kwargs, ())
    settings = files.image_processor
    if settings.get("resize_to_max_canvas"):
        raise UnknownMedia("resize_to_max_canvas is on")
    tile_px = whole(files.vision, "image_size", 448)
    patches = (tile_px // whole(files.vision, "patch_size", 14)) ** 2
    ratio = files.vision.get("pixel_shuffle_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise UnknownMedia(f"the model's pixel_shuffle_ratio is {ratio!r}")
    tile_tokens = patches // round(1.0 / ratio**2)
    canvases = tile_counts(whole(settings, "max_patches", 16))

    def tokens(size: ImageSize) -> int:
        tiles = best_canvas(size, canvases, tile_px)
        return (tiles * (tile_tokens + 1) if tiles > 1 else 0) + tile_tokens + 3

    return Family(image=Rule(placeholder="<|image|>", target="<|image|>", tokens=tokens))


def tile_counts(most: int) -> tuple[tuple[int, int], ...]:
    """``(rows, columns)`` of all canvases of up to ``most`` tiles."""
    return tuple((rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1))


def best_canvas(size: ImageSize, canvases: tuple[tuple[int, int], ...], tile_px: int) -> int:
    """Tiles of the canvas that transformers chooses, in its 32-bit arithmetic: on equal scales the smallest."""
    scales = [
        (min(_float32(columns * tile_px / size.width), _float32(rows * tile_px / size.height)), rows * columns)
        for rows, columns in canvases
    ]
    enlarging = [scale for scale, _ in scales if scale >= 1]
    chosen = min(enlarging) if enlarging else max(scale for scale, _ in scales)
    return min(tiles for scale, tiles in scales if scale == chosen)


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
