"""What changed between vLLM releases that a plan depends on: defaults, the start-up check and what is logged.

Read in the sources of 0.6 to 0.32; "since" means first seen in a released wheel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.planner.errors import ContradictoryFlags

LATEST = (0, 32, 0)
LATEST_TEXT = "0.32.0"
OLDEST = (0, 6)
DOCKER_IMAGE = "vllm/vllm-openai"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one release plans memory. ``concurrent_batches``: steps whose out-of-window blocks are still held.

    ``mamba_keeps_every_block``: Mamba models cached in mode "all", a state for every block, until "align" took over.
    ``checkpoint_blocks``: the extra state Mamba 2 and KDA export within a prefill since 0.32.
    ``pages_side_by_side``: groups of mixed page sizes pack a block as wide as the widest group, since 0.28.
    ``checkpoint_decides_kv``: ``auto`` takes the cache dtype a quantised checkpoint declares (seen in a 0.15 log).
    ``rows_by_card``: sparse MLA's fp8 rows depend on the card, and layers that reuse another's choice keep no indexer
    cache (not yet so in a 0.24 log, so in one of 0.26).
    """

    version: tuple[int, int, int]
    default_utilization: float
    graphs_subtracted: bool
    tokens_from_concurrency: bool
    null_block_reserved: bool
    concurrent_batches: int
    padding_ratio: float
    engine_v0: bool
    second_runner: bool
    auto_window: bool
    state_prefix_caching: bool
    state_caching_by_default: bool
    mamba_keeps_every_block: bool
    checkpoint_blocks: int
    pages_side_by_side: bool
    checkpoint_decides_kv: bool
    rows_by_card: bool

    @property
    def text(self) -> str:
        return ".".join(str(part) for part in self.version)


def parse_version(text: str) -> tuple[int, int, int]:
    """``0.20.2``, ``v0.9.x``, ``0.30+``, ``0.11.2.dev280`` … as three numbers. Raises ContradictoryFlags."""
    match = re.match(r"\s*v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    if not match:
        raise ContradictoryFlags(f"{text!r} is not a vLLM version; write it like 0.32.0.")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def behaviour_of(version: str | tuple[int, int, int] | None, *, engine: str | None = None) -> Behaviour:
    """The behaviour of a release; the newest one known for None or a later one. ``engine`` V1 was opt-in in 0.7."""
    number = LATEST if version is None else parse_version(version) if isinstance(version, str) else version
    minor = number[:2]
    return Behaviour(
        version=number,
        default_utilization=0.92 if minor >= (0, 20) else 0.90,
        graphs_subtracted=minor >= (0, 20),
        # 0.20.0 still logs blocks divided by groups for hybrids, 0.20.2 concurrency times window
        tokens_from_concurrency=number >= (0, 20, 1),
        # vllm#47272: the block pool's null block is part of the check
        null_block_reserved=minor >= (0, 29),
        # async scheduling keeps two batches in flight, counted by sliding-window specs in 0.28, not yet in 0.25
        concurrent_batches=2 if minor >= (0, 28) else 1,
        padding_ratio=1.5 if minor >= (0, 20) else 1.25 if minor >= (0, 12) else 1.0,
        engine_v0=minor < (0, 8) and engine != "V1",
        second_runner=minor >= (0, 29),
        auto_window=minor >= (0, 14),
        state_prefix_caching=minor >= (0, 15),
        state_caching_by_default=minor >= (0, 28),
        mamba_keeps_every_block=(0, 14) <= minor < (0, 28),
        checkpoint_blocks=1 if minor >= (0, 32) else 0,
        pages_side_by_side=minor >= (0, 28),
        checkpoint_decides_kv=minor >= (0, 15),
        rows_by_card=minor >= (0, 26),
    )


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """``--max-num-batched-tokens`` and ``--max-num-seqs`` of ``vllm serve`` when not given."""

    batched_tokens: int
    seqs: int


def batch_defaults(
    behaviour: Behaviour, memory_gib: float, card_name: str, max_model_len: int, *, unified: bool = False
) -> BatchDefaults:
    """The defaults ``vllm serve`` picks for a card of ``memory_gib`` (``get_batch_defaults`` of 0.32).

    ``unified``: NVML tells no memory of integrated GPUs, so vLLM takes them for small ones (vllm#57378).
    """
    if unified:
        memory_gib = 0.0
    if behaviour.engine_v0:
        # V0 profiles the whole window unless chunked prefill is on, which it is by itself above 32k.
        chunked = 2048 if behaviour.version >= (0, 6, 5) else 512
        return BatchDefaults(chunked if max_model_len > 32768 else max(max_model_len, 2048), 256)
    if memory_gib >= 160 and behaviour.version[:2] >= (0, 20):
        return BatchDefaults(16384, 1024)
    if memory_gib >= 70 and "a100" not in card_name.lower():
        return BatchDefaults(8192, 1024)
    return BatchDefaults(2048, 256)
