"""Speculative decoding as a plan sees it: drafted tokens, the drafter's own cached layers and its weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from gateway.planner.errors import ContradictoryFlags
from gateway.planner.geometry import ModelGeometry
from gateway.planner.layers import Layer, LayerKind
from gateway.planner.parameters import count_parameters
from gateway.planner.weights import layers_by_part

_ONE_LAYER = ("mtp", "eagle", "eagle3", "deepseek_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
_NO_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
_UNPLANNED = ("dflash", "dspark")


@dataclass(frozen=True, slots=True)
class Speculation:
    """``tokens`` drafted a step by ``method``; ``draft`` names a separate draft model."""

    method: str
    tokens: int
    draft: str | None = None

    @property
    def has_cache(self) -> bool:
        return self.method not in _NO_CACHE

    @property
    def unplanned(self) -> bool:
        """Whether the drafter's own cache and weights are laid out by rules not modelled here."""
        return self.method in _UNPLANNED

    def layers(self, target: ModelGeometry, draft: ModelGeometry | None) -> tuple[Layer, ...]:
        """The cached layers the drafter adds beside the target's."""
        if not self.has_cache or self.unplanned:
            return ()
        if draft is not None:
            return draft.layers
        repeat = max(target.mtp_layers, 1) if "mtp" in self.method else 1
        return last_attention_caches(target) * repeat

    def parameters(self, target: ModelGeometry, draft: ModelGeometry | None) -> int:
        """Parameters the drafter loads beside the target's."""
        if not self.has_cache or self.unplanned:
            return 0
        if draft is not None:
            return count_parameters(draft).total
        counted, layers = count_parameters(target), layers_by_part(target)
        feed = counted.dense + counted.shared + counted.experts + counted.router
        repeat = max(target.mtp_layers, 1) if "mtp" in self.method else 1
        one = counted.attention // max(layers["attention"], 1) + feed // max(layers["dense"], 1)
        return (one + 2 * target.hidden * target.hidden) * repeat

    def as_flag(self) -> str:
        """The JSON of ``--speculative-config``."""
        shape: dict[str, object] = {"method": self.method, "num_speculative_tokens": self.tokens}
        if self.draft:
            shape["model"] = self.draft
        return json.dumps(shape)


def parse_speculation(text: str | None) -> Speculation | None:
    """``mtp:3``, ``eagle3:2``, ``ngram:4``, ``draft_model:NAME:5`` or vLLM's own JSON. Raises ContradictoryFlags."""
    if not text or text.lower() in ("none", "off"):
        return None
    if text.lstrip().startswith("{"):
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ContradictoryFlags(f"--speculative is not valid JSON: {error}.") from error
        number, draft = raw.get("num_speculative_tokens", 1), raw.get("model")
        if not isinstance(number, int) or isinstance(number, bool) or not isinstance(draft, str | None):
            raise ContradictoryFlags("--speculative: num_speculative_tokens is a whole number, model a name.")
        return _checked(str(raw.get("method") or ("draft_model" if draft else "")), number, draft)
    match = re.fullmatch(r"([\w-]+?)(?:[: ](.+?))?(?:[: ](\d+))?", text.strip())
    if not match:
        raise ContradictoryFlags(f"--speculative {text!r} is not understood; write mtp:3, eagle3:2, ngram:4 or JSON.")
    method, middle, number = match[1].lower(), match[2], match[3]
    if middle and middle.isdigit() and number is None:
        middle, number = None, middle
    return _checked(method, int(number or 1), middle)


def last_attention_caches(target: ModelGeometry) -> tuple[Layer, ...]:
    """The caches of the target's last keep-everything decoder layer: what a head of the same kind adds."""
    # A drafting head always has an indexer, also where the target's last layer reuses another's choice.
    most = max((len(caches) for caches in target.decoder_layers), default=0) if target.uses_mla else 0
    for caches in reversed(target.decoder_layers):
        if len(caches) < most:
            continue
        if any(layer.kind in (LayerKind.FULL, LayerKind.MLA) for layer in caches):
            return tuple(layer for layer in caches if layer.kind is not LayerKind.STATE)
    return ()


def _checked(method: str, tokens: int, draft: str | None) -> Speculation:
    if tokens < 1:
        raise ContradictoryFlags("--speculative drafts at least 1 token a step.")
    if method in ("draft", "draft_model"):
        if not draft:
            raise ContradictoryFlags("--speculative draft_model needs the draft model: draft_model:NAME:5.")
        return Speculation("draft_model", tokens, draft)
    if method not in _ONE_LAYER and method not in _NO_CACHE and method not in _UNPLANNED:
        known = ", ".join((*_ONE_LAYER[:3], *_NO_CACHE[:2], *_UNPLANNED, "draft_model"))
        raise ContradictoryFlags(f"Unknown speculative method {method!r}; known: {known}.")
    return Speculation(method, tokens, draft)
