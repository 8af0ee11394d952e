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
    for spelling in dict.fromkeys((wanted, _bare(wanted), _bare(wanted.split("/")[-1]))):
        for key, entry in known.items():
            if spelling in (_key(key), _key(key.split("/")[-1])):
                return entry
    return None


def find_relative(name: str) -> Entry | None:
    """The entry of the same family and size by its name: instruct, thinking, dated and base share a geometry."""
    plain = _untuned(_bare(_key(name).split("/")[-1]))
    for key, entry in entries().items():
        if plain == _untuned(_bare(_key(key.split("/")[-1]))):
            return entry
    return None


def _bare(key: str) -> str:
    """Without the quantisation a name ends in, nor the owner who only quantised."""
    stripped = re.sub(
        r"-(awq|gptq.*|int4.*|int8.*|fp8.*|nvfp4|w4a16.*|w8a8|quantized\.\w+|bnb-4bit|4bit|gguf)$", "", key
    )
    return re.sub(r"^(unsloth|redhatai|neuralmagic|nvidia|quanttrio|cyankiwi|casperhansen)/", "", stripped)


def _untuned(key: str) -> str:
    """Without what tuning adds: instruct, chat and thinking models keep their base's geometry."""
    return re.sub(r"-(instruct|it|chat|thinking|base|hf)(-\d{4})?(?=$)", "", re.sub(r"-\d{4}$", "", key))


def suffix_quant(name: str) -> str | None:
    """The quantisation a repository's name announces (``-AWQ``, ``-FP8``, ``-NVFP4`` …), if any."""
    match = re.search(r"[-_](awq|gptq|int4|int8|fp8|nvfp4|w4a16|w8a8|mxfp4|bnb-4bit)\b", name.lower())
    return match[1] if match else None


def nearest(name: str, count: int = 3) -> list[str]:
    """Catalogue names like ``name``, for the error that says it is not there."""
    import difflib

    return difflib.get_close_matches(name, list(entries()), n=count, cutoff=0.5)


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower()).replace("meta-llama-3", "llama-3")
