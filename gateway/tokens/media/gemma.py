"""Gemma 3: a fixed number of tokens between newlines, more with pan and scan. Gemma 4: a budget of soft tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import Family, ModelFiles, Rule, only, whole
from gateway.tokens.media.sizes import ImageSize

_SOFT_TOKENS = (70, 140, 280, 560, 1120)


def gemma3(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """Each image is two newlines, a start, its tokens, an end and two newlines. Pan and scan is not counted here."""
    only(kwargs, ("do_pan_and_scan",))
    if kwargs.get("do_pan_and_scan", files.image_processor.get("do_pan_and_scan")):
        raise UnknownMedia("pan and scan is on")
    image_tokens = whole(files.processor, "image_seq_length", 256)
    return Family(
        image=Rule(
            placeholder="<start_of_image>",
            target="<start_of_image>",
            tokens=lambda size: image_tokens + 4,
            seams=newline_seams,
        )
    )


def newline_seams(texts: Sequence[str]) -> int:
    """Tokens that merge where an image's two newlines meet one or two more.

    Runs of newlines are single tokens; vLLM merges runs of up to four, not of more (models/gemma3_mm.py).
    """
    merged = 0
    for index, text in enumerate(texts):
        newlines = text.strip("\n") == ""
        if 0 < index < len(texts) - 1 and newlines:
            merged += len(text) <= 2
            continue
        if index > 0:
            merged += 1 <= len(text) - len(text.lstrip("\n")) <= 2
        if index < len(texts) - 1:
            merged += 1 <= len(text) - len(text.rstrip("\n")) <= 2
    return merged


def gemma4(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """As many soft tokens as patches, pooled, fit the budget at the image's shape, between a start and an end."""
    only(kwargs, ("max_soft_tokens",))
    patch = whole(files.vision, "patch_size", 16)
    pooled = whole(files.vision, "pooling_kernel_size", 3)
    most = kwargs.get("max_soft_tokens")
    if most is None:
        most = whole(files.vision, "default_output_length")
    elif most not in _SOFT_TOKENS:
        raise UnknownMedia(f"max_soft_tokens {most!r} is none that the model knows", refused=True)

    def tokens(size: ImageSize) -> int:
        unit = patch * pooled
        scale = math.sqrt(most * pooled**2 / ((size.height / patch) * (size.width / patch)))
        height = max(unit, math.floor(size.height * scale / unit) * unit)
        width = max(unit, math.floor(size.width * scale / unit) * unit)
        soft = (height // patch) * (width // patch) // pooled**2
        return min(soft, most) + 2

    return Family(image=Rule(placeholder="<image_soft_token>", target="<|image|>", tokens=tokens))
