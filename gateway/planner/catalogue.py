"""The shipped catalogue: geometries of well-known models as facts from their published configs."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One model: its trimmed config, and its exact parameter count where a source states it.

    ``source`` names what the config was held against; empty where nothing was found to hold it against.
    """

    name: str
    config: Mapping[str, Any]
    parameters: int | None
    vision_parameters: int | None
    quantization: Mapping[str, Any] | None
    source: str = ""

    def as_config(self) -> dict[str, Any]:
        """The config in the shape of a config.json."""
        config = dict(self.config)
        if config.pop("multimodal", False):
            config["vision_config"] = {}
        if self.quantization:
            config["quantization_config"] = dict(self.quantization)
        return config


@functools.cache
def entries() -> dict[str, Entry]:
    """Every entry by its name."""
    raw = json.loads(resources.files("gateway.planner").joinpath("catalogue.json").read_text(encoding="utf-8"))
    return {
        name: Entry(
            name,
            item["config"],
            item.get("parameters"),
            item.get("vision_parameters"),
            item.get("quantization"),
            str(item.get("source", "")),
        )
        for name, item in raw.items()
    }


def find(name: str) -> Entry | None:
    """The entry of that name: with or without the owner, in any case, without a quantisation suffix if need be."""
    known = entries()
    if name in known:
        return known[name]
    wanted = _key(name)
    for key, entry in known.items():
        if wanted in (_key(key), _key(key.split("/")[-1])):
            return entry
    stripped = re.sub(
        r"-(awq|gptq.*|int4.*|int8.*|fp8.*|nvfp4|w4a16.*|w8a8|quantized\.\w+|bnb-4bit|4bit|gguf)$", "", wanted
    )
    stripped = re.sub(r"^(unsloth|redhatai|neuralmagic|nvidia|quanttrio|cyankiwi|casperhansen)/", "", stripped)
    return None if stripped == wanted else find(stripped)


def suffix_quant(name: str) -> str | None:
    """The quantisation a repository's name announces (``-AWQ``, ``-FP8``, ``-NVFP4`` …), if any."""
    match = re.search(r"[-_](awq|gptq|int4|int8|fp8|nvfp4|w4a16|w8a8|mxfp4|bnb-4bit)\b", name.lower())
    return match[1] if match else None


def nearest(name: str, count: int = 3) -> list[str]:
    """Catalogue names like ``name``, for the error that says it is not there."""
    import difflib

    return difflib.get_close_matches(name, list(entries()), n=count, cutoff=0.5)


def _key(name: str) -> str:
    return name.lower().replace("_", "-").replace("meta-llama-3", "llama-3")
