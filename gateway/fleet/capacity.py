"""From a reading of vLLM's metrics to a KV capacity in blocks of tokens, or to "unknown" where the labels mislead."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.fleet.metrics_text import Reading

# How far `kv_cache_size_tokens` may lie from blocks × block size before the model is taken to have several KV groups.
ONE_GROUP_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """KV cache of one backend.

    ``engine_blocks`` can be allocated in each engine (the null block is not one of them). ``virtual`` says that blocks
    are a unit of account, since a token takes more (or less) than one slot: hybrid models, several KV groups.
    """

    engines: int
    engine_blocks: int
    block_size_tokens: int
    virtual: bool = False

    def __str__(self) -> str:
        tokens = f"of {self.engine_blocks * self.block_size_tokens:,} tokens"
        blocks = f"{self.engine_blocks:,} blocks of {self.block_size_tokens:,}"
        return f"{tokens} ({blocks})" + (f" in each of {self.engines} engines" if self.engines > 1 else "")

    @property
    def blocks(self) -> int:
        """Blocks of all engines together."""
        return self.engines * self.engine_blocks

    @property
    def engine_tokens(self) -> int:
        """Tokens the largest single sequence can have.

        Exact for one KV group: vLLM admits a sequence that takes every block but the null block. A hybrid's token
        figure is rounded, and a pool with nothing to spare hangs (vllm#47272), so there one block is left.
        """
        return max(0, self.engine_blocks - (1 if self.virtual else 0)) * self.block_size_tokens


def kv_capacity(reading: Reading, window_tokens: int | None) -> KvCapacity | None:
    """The capacity ``reading`` describes; ``window_tokens`` is the server's ``max_model_len``. ``None``: unknown.

    - One KV group: blocks × block size. ``kv_cache_size_tokens`` (0.24+) is ``max_concurrency × max_model_len``, which
      falls short of that by the rounding of ``max_model_len`` up to whole blocks; this is reckoned with.
    - Several groups: only ``kv_cache_size_tokens`` can be trusted; capacity is that, in blocks of ``block_size``.
    - Before 0.24 a hybrid shows a block size of 16 whatever its real one. vLLM refuses to start unless one whole
      window fits, so fewer tokens than a window (without an override of the block count) unmask a wrong block size.
    """
    capacity = _described(reading, window_tokens)
    return capacity if capacity is not None and capacity.engine_blocks > 0 else None


def _described(reading: Reading, window_tokens: int | None) -> KvCapacity | None:
    size = reading.block_size_tokens
    if size is None:
        return None
    engines = reading.engines
    tokens = reading.cache_tokens
    if reading.blocks is None:
        if tokens is None:
            return None
        return KvCapacity(engines, max(0, tokens // size - 1), size, virtual=True)
    engine_blocks = reading.blocks // engines
    plain = KvCapacity(engines, max(0, engine_blocks - 1), size)
    if tokens is not None:
        expected = float(engine_blocks * size)
        if window_tokens:
            expected = engine_blocks * window_tokens / -(-window_tokens // size)
        if abs(tokens - expected) <= max(size, ONE_GROUP_TOLERANCE * expected):
            return plain
        return KvCapacity(engines, max(0, tokens // size), size, virtual=True)
    if window_tokens and not reading.overridden and plain.engine_blocks * size + size < window_tokens:
        return None
    return plain


def used_blocks(reading: Reading, capacity: KvCapacity) -> tuple[int, ...] | None:
    """Blocks in use at each engine, by rank, at the moment of the scrape. Cached prefixes nobody uses are free.

    ``usage = 1 − free / (blocks − 1)`` since 0.10.2; before, the null block counted as used and allocatable, which
    makes one block of difference.
    """
    if reading.usage_ratio is None:
        return None
    return tuple(round(reading.usage_ratio[label] * capacity.engine_blocks) for label in reading.labels)
