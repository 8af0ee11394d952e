"""Arguments for a model's processor, from the server's and the request's ``mm_processor_kwargs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCOPES = ("text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs")


def image_kwargs(server: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """What reaches the image processor; see ``_scoped``."""
    return _scoped(server, request, "images_kwargs")


def video_kwargs(server: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """What reaches the video processor; see ``_scoped``."""
    return _scoped(server, request, "videos_kwargs")


def _scoped(server: Mapping[str, Any], request: Mapping[str, Any], scope: str) -> dict[str, Any]:
    """What reaches a processor: server, then request; in each the flat keys, then those of its scope.

    Mappings are merged key by key, as vLLM 0.32 merges them (config/multimodal.py). Arguments of other scopes concern
    other media.
    """
    merged: dict[str, Any] = {}
    for given in (server, request):
        flat = {key: value for key, value in given.items() if key not in _SCOPES}
        scoped = given.get(scope)
        for layer in (flat, scoped if isinstance(scoped, Mapping) else {}):
            merged = _merged(merged, layer)
    return merged


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result
