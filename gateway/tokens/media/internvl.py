"""InternVL: square tiles in the grid whose shape is nearest the image's, and a thumbnail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gateway.tokens.media.family import Family, ModelFiles, Rule, only, whole
from gateway.tokens.media.sizes import ImageSize

_KNOWN = ("min_dynamic_patch", "max_dynamic_patch", "dynamic_image_size", "use_thumbnail")


def internvl(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """InternVL 2 to 3.5 as their own repositories keep them (``InternVLChatModel``)."""
    only(kwargs, _KNOWN)
    settings = {**files.config, **kwargs}
    tile_px = whole(files.vision, "image_size", 448)
    shrink = files.config.get("downsample_ratio", 0.5)
    tile_tokens = int((tile_px // whole(files.vision, "patch_size", 14)) ** 2 * shrink**2)
    least, most = 1, 1
    if settings.get("dynamic_image_size", True):
        least, most = whole(settings, "min_dynamic_patch", 1), whole(settings, "max_dynamic_patch", 12)
    grids = target_grids(least, most)
    thumbnail = bool(settings.get("use_thumbnail", True))

    def tokens(size: ImageSize) -> int:
        columns, rows = nearest_grid(size, grids, tile_px)
        tiles = columns * rows
        return tile_tokens * (tiles + 1 if thumbnail and tiles != 1 else tiles) + 2

    # "<image>" is no token of its own here: vLLM replaces it in the text and encodes that again.
    return Family(
        image=Rule(placeholder="<image>", target="<image>", tokens=tokens, stand_in="<img></img>", stand_in_tokens=2)
    )


@lru_cache(maxsize=64)
def target_grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """``(columns, rows)`` of ``least`` to ``most`` tiles, fewer first."""
    grids = {
        (columns, rows)
        for tiles in range(least, most + 1)
        for columns in range(1, tiles + 1)
        for rows in range(1, tiles + 1)
        if least <= columns * rows <= most
    }
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def nearest_grid(size: ImageSize, grids: tuple[tuple[int, int], ...], tile_px: int) -> tuple[int, int]:
    """The grid of the nearest shape; of equally near ones a later one if the image is large enough to fill it."""
    shape = size.width / size.height
    best, best_distance = (1, 1), math.inf
    for columns, rows in grids:
        distance = abs(shape - columns / rows)
        if distance < best_distance:
            best, best_distance = (columns, rows), distance
        elif distance == best_distance and size.width * size.height > 0.5 * tile_px**2 * columns * rows:
            best = (columns, rows)
    return best
