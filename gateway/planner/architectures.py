"""The architectures vLLM 0.32 lists (``model_executor/models/registry.py``): for any other one a plan is a guess."""

from __future__ import annotations

import functools
import json
from importlib import resources


@functools.cache
def known() -> frozenset[str]:
    """Names as ``architectures`` of a config.json spells them."""
    text = resources.files("gateway.planner").joinpath("architectures.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text))
