"""Flags that are impossible by themselves, together, or on this model: each refused in one sentence before a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.planner.errors import ContradictoryFlags
from gateway.planner.layers import LayerKind

if TYPE_CHECKING:
    from gateway.planner.geometry import ModelGeometry
    from gateway.planner.wish import Wish

_MOST_GIB, _MOST_COUNTED, _MOST_DRAFTED = 1 << 20, 1 << 40, 1 << 10


def check_flags(geometry: ModelGeometry, wish: Wish) -> None:
    """Raise ContradictoryFlags for the first flag that cannot be meant."""
    for name, number in (
        ("--tp", wish.tp),
        ("--pp", wish.pp),
        ("--dcp", wish.dcp),
        ("--concurrency", wish.concurrency),
        ("--max-num-seqs", wish.seqs),
        ("--max-num-batched-tokens", wish.batched_tokens),
        ("--block-size", wish.block_tokens),
    ):
        if number is not None and number < 1:
            raise ContradictoryFlags(f"{name} must be at least 1.")
        if number is not None and number > _MOST_COUNTED:
            raise ContradictoryFlags(f"{name} {number} cannot be meant: it is more than {_MOST_COUNTED:,}.")
    if wish.kv_memory_gib is not None and not 0 < wish.kv_memory_gib < _MOST_GIB:
        raise ContradictoryFlags("--kv-memory is the KV memory of one GPU in GiB, above 0.")
    if wish.seqs and wish.batched_tokens and wish.batched_tokens < wish.seqs:
        raise ContradictoryFlags(
            f"--max-num-batched-tokens {wish.batched_tokens} is less than --max-num-seqs {wish.seqs}; "
            "vLLM refuses that."
        )
    if wish.utilization is not None and not 0 < wish.utilization <= 1:
        raise ContradictoryFlags("--gpu-memory-utilization is a share between 0 and 1.")
    if wish.context is not None and wish.context < 1:
        raise ContradictoryFlags("--context must be at least 1 token.")
    if wish.context is not None and wish.context > _MOST_COUNTED:
        raise ContradictoryFlags(f"--context {wish.context} cannot be meant: it is more than {_MOST_COUNTED:,} tokens.")
    if wish.speculation is not None and wish.speculation.tokens > _MOST_DRAFTED:
        raise ContradictoryFlags(f"--speculative drafts at most {_MOST_DRAFTED:,} tokens a step here.")
    if wish.lora_adapters and not wish.lora_rank:
        raise ContradictoryFlags("--lora: the rank of an adapter is at least 1.")
    if geometry.attention_heads and geometry.attention_heads % wish.tp:
        raise ContradictoryFlags(
            f"--tp {wish.tp} does not divide the model's {geometry.attention_heads} attention heads; vLLM refuses that."
        )
    if wish.tp % wish.dcp:
        raise ContradictoryFlags(f"--dcp {wish.dcp} must divide --tp {wish.tp}: it splits the same GPUs.")
    if wish.pp > len(geometry.decoder_layers):
        raise ContradictoryFlags(f"--pp {wish.pp} is more stages than the model has layers.")
    if wish.dcp > 1 and any(layer.kind is LayerKind.SLIDING for layer in geometry.layers):
        raise ContradictoryFlags("--dcp does not work with sliding-window layers.")
