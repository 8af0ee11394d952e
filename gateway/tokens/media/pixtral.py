"""Pixtral and Mistral Small 3.x: patches in rows, each row ended by a token of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.tokens.media.family import Family, ModelFiles, Rule, only, whole
from gateway.tokens.media.sizes import ImageSize

_IMAGE = "[IMG]"


def pixtral(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """Pixtral as transformers keeps it (a LLaVA with a Pixtral tower). vLLM takes the size from the tower."""
    only(kwargs, ())
    longest = whole(files.vision, "image_size", 1024)
    patch = whole(files.vision, "patch_size", 16) * whole(files.config, "spatial_merge_size", 1)
    # Unlike Mistral3, its class is LLaVA's, whose placeholder is "<image>": no token of this model.
    return _family("<image>", longest, patch)


def mistral3(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """Mistral Small 3.x: the longest side from the image processor, 2 × 2 patches to a token."""
    only(kwargs, ("size",))
    size = files.image_processor.get("size")
    size = dict(size) if isinstance(size, Mapping) else {"longest_edge": 1024}
    if isinstance(kwargs.get("size"), Mapping):
        size |= kwargs["size"]
    patch = whole(files.vision, "patch_size", 14 if not files.vision else 16)
    return _family(None, whole(size, "longest_edge"), patch * whole(files.config, "spatial_merge_size", 2))


def row_tokens(size: ImageSize, longest_px: int, patch_px: int) -> int:
    """Tokens of an image shrunk to ``longest_px``: rows of patches, each with a break or, the last, an end."""
    width, height = size.width, size.height
    ratio = max(width / longest_px, height / longest_px)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    columns, rows = (width - 1) // patch_px + 1, (height - 1) // patch_px + 1
    return (columns + 1) * rows


def _family(placeholder: str | None, longest_px: int, patch_px: int) -> Family:
    return Family(
        image=Rule(placeholder=placeholder, target=_IMAGE, tokens=lambda size: row_tokens(size, longest_px, patch_px))
    )
