"""What a plan must say beside its numbers because vLLM decides it by itself, or because the command needs more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.planner.storage import declared_dtype, resolved_dtype
from gateway.planner.weights import canonical_quant, quant_of

if TYPE_CHECKING:
    from gateway.planner.cards import Card
    from gateway.planner.geometry import ModelGeometry
    from gateway.planner.versions import Behaviour
    from gateway.planner.wish import Subject, Wish

# Quantisations vLLM applies itself while it loads a wide checkpoint, in the spelling of its --quantization (0.32).
_WHILE_LOADING = {"fp8": "fp8", "bnb-4bit": "bitsandbytes"}


def cautions(subject: Subject, card: Card, wish: Wish, behaviour: Behaviour) -> list[str]:
    """Sentences for the person, in the order they matter."""
    geometry = subject.geometry
    return [
        *_cache_dtype(geometry, card, wish, behaviour),
        *_checkpoint(subject, wish),
        *_drafter(geometry, wish),
        *_video(geometry, wish, behaviour),
    ]


def quantization_flag(subject: Subject, wish: Wish) -> str:
    """The value of ``--quantization`` that makes vLLM quantise the named checkpoint; empty where none is needed."""
    quant = _asked_beside_checkpoint(subject, wish)
    return _WHILE_LOADING.get(quant, "")


def _asked_beside_checkpoint(subject: Subject, wish: Wish) -> str:
    """The quantisation asked for where the checkpoint is not quantised by its config or name; else empty."""
    if not wish.quant or subject.quant_from_name or quant_of(subject.geometry.quantization) != "none":
        return ""
    quant = canonical_quant(wish.quant)
    return "" if quant == "none" else quant


def _cache_dtype(geometry: ModelGeometry, card: Card, wish: Wish, behaviour: Behaviour) -> list[str]:
    kept = resolved_dtype(geometry, wish.kv_dtype, card, behaviour)
    if kept == wish.kv_dtype:
        return []
    declared = declared_dtype(geometry.quantization)
    reason = "the checkpoint declares it" if declared else "vLLM's default for this model on this card"
    return [f"--kv-cache-dtype auto means {kept} here: {reason}. --kv-cache-dtype bfloat16 keeps the cache wide."]


def _checkpoint(subject: Subject, wish: Wish) -> list[str]:
    quant = _asked_beside_checkpoint(subject, wish)
    if not quant or quant in _WHILE_LOADING:
        return []
    return [
        f"--quant {quant} plans a checkpoint that is quantised already: in the command, put its name in place of "
        f"{subject.geometry.name}, which would load wide."
    ]


def _drafter(geometry: ModelGeometry, wish: Wish) -> list[str]:
    drafter = wish.speculation
    if drafter is None or drafter.draft or not drafter.method.startswith("eagle"):
        return []
    return [
        f"An {drafter.method} head is a model of its own made for {geometry.name}: name it, as in --speculative "
        f"{drafter.method}:OWNER/HEAD:{drafter.tokens}, or vLLM refuses the command."
    ]


def _video(geometry: ModelGeometry, wish: Wish, behaviour: Behaviour) -> list[str]:
    if not geometry.multimodal or wish.text_only or not geometry.model_type.startswith("qwen3_vl"):
        return []
    if behaviour.version[:2] != (0, 11):
        return []
    return [
        "vLLM 0.11 profiles Qwen3-VL with one video of up to 153,600 tokens, which is not planned: 2 to 10 GiB less "
        "for the KV cache in two public reports. --limit-mm-per-prompt '{\"video\": 0}' avoids it."
    ]
