"""From layers to blocks: the groups vLLM makes, the bytes of one pool block, what fits and what a request needs.

Follows vLLM 0.32 ``v1/core/kv_cache_utils.py`` and ``platforms/interface.py`` (block-size alignment of hybrid models),
with what differed in earlier releases taken from :mod:`gateway.planner.versions`. Pure arithmetic in whole bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from gateway.planner.errors import ContradictoryFlags
from gateway.planner.figures import GIB, ceil_div
from gateway.planner.kvdtypes import attention_token_bytes, mla_token_bytes, unquantised_layers
from gateway.planner.layers import Layer, LayerKind
from gateway.planner.versions import Behaviour

_GROW_TOGETHER = (LayerKind.FULL, LayerKind.MLA, LayerKind.INDEXER)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What decides the shape of the pool beside the model. ``in_flight_tokens`` are scheduled but unsettled tokens."""

    kv_dtype: str = "auto"
    tp: int = 1
    dcp: int = 1
    model_bytes: int = 2
    block_tokens: int = 16
    in_flight_tokens: int = 2048
    drafted_tokens: int = 0
    prefix_caching: bool = True
    every_state_kept: bool = False
    checkpoint_blocks: int = 0
    chunk_tokens: int = 1
    hybrid_manager: bool = True
    encoder_tokens: int = 0
    align_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Spec:
    """One layer's cache as the allocator sees it: equal specs share a group."""

    kind: LayerKind
    block_tokens: int
    page_bytes: int
    span_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table. ``layers`` counts them; ``page_bytes`` is what the whole group puts in a block."""

    spec: Spec
    layers: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The block pool of one GPU: ``block_bytes`` each, drawn from by every group.

    ``check_block_bytes`` is what the start-up check counts for a block where that differs; ``weighted``: a request's
    blocks are counted by their groups' bytes (packed pools before 0.28).
    """

    groups: tuple[Group, ...]
    block_bytes: int
    settings: PoolSettings
    padding_layers: int = 0
    check_block_bytes: int | None = None
    weighted: bool = False

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the first keep-everything group (the size vLLM logs)."""
        for group in self.groups:
            if group.spec.kind in _GROW_TOGETHER:
                return group.spec.block_tokens
        return self.groups[0].spec.block_tokens if self.groups else self.settings.block_tokens

    def blocks_per_request(self, tokens: int) -> int:
        """Blocks a request of ``tokens`` takes from the pool, over all groups."""
        counts = [blocks_for(group.spec, tokens, self.settings) for group in self.groups]
        if not self.weighted:
            return sum(counts)
        used = sum(count * group.page_bytes for count, group in zip(counts, self.groups, strict=True))
        return ceil_div(used, self.groups[0].page_bytes)

    def bytes_per_request(self, tokens: int) -> int:
        """Bytes the start-up check asks for at a window of ``tokens``."""
        counts = sum(blocks_for(group.spec, tokens, self.settings) for group in self.groups)
        return counts * (self.check_block_bytes or self.block_bytes)

    def num_blocks(self, available_bytes: int) -> int:
        """Blocks that fit in ``available_bytes`` of one GPU."""
        return max(available_bytes, 0) // self.block_bytes if self.block_bytes else 0

    def marginal_token_bytes(self) -> float:
        """Bytes one more token of a long request costs: the groups that keep everything, at block granularity."""
        growing = [group for group in self.groups if group.spec.kind in _GROW_TOGETHER]
        return sum(self.block_bytes / group.spec.block_tokens for group in growing) / self.settings.dcp

    def fixed_request_bytes(self, tokens: int) -> int:
        """Bytes of a request of ``tokens`` that do not grow with it: windows, chunks, states, encoder caches."""
        fixed = [group for group in self.groups if group.spec.kind not in _GROW_TOGETHER]
        return sum(blocks_for(group.spec, tokens, self.settings) for group in fixed) * self.block_bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool of ``num_blocks`` serves at a window of ``max_model_len``, in vLLM's own rounding."""

    num_blocks: int
    size_tokens: int
    max_concurrency: float
    fits: bool
    needed_bytes: int
    usable_bytes: int


def build_pool(layers: Sequence[Layer], settings: PoolSettings, behaviour: Behaviour) -> Pool:
    """Group ``layers`` (those of the busiest pipeline stage) and size one block. Empty when nothing is cached."""
    if not layers:
        return Pool((), 0, settings)
    specs, settings = _specs(layers, settings)
    if not settings.hybrid_manager:
        specs = [_as_full(spec) for spec in specs]
    if _one_group(specs):
        # All layers of one type: a block holds one page of each, however their sizes differ.
        total = sum(spec.page_bytes for spec in specs)
        return Pool((Group(specs[0], len(specs), total),), total, settings)
    return _grouped(_unified(specs, settings), settings, behaviour)


def capacity(pool: Pool, available_bytes: int, max_model_len: int, behaviour: Behaviour) -> Capacity:
    """Tokens, concurrency and whether one request of ``max_model_len`` passes the start-up check."""
    if not pool.block_bytes:
        return Capacity(1, 0, float("inf"), True, 0, available_bytes)
    blocks = pool.num_blocks(available_bytes)
    per_request = max(pool.blocks_per_request(max_model_len), 1)
    concurrency = blocks / per_request
    usable = available_bytes - (pool.block_bytes if behaviour.null_block_reserved else 0)
    needed = pool.bytes_per_request(max_model_len)
    return Capacity(
        num_blocks=blocks,
        size_tokens=_logged_tokens(pool, blocks, concurrency, max_model_len, behaviour),
        max_concurrency=concurrency,
        fits=needed <= usable,
        needed_bytes=needed,
        usable_bytes=usable,
    )


def largest_window(pool: Pool, available_bytes: int, limit_tokens: int, behaviour: Behaviour) -> int:
    """The largest window that passes the start-up check, at most ``limit_tokens``: vLLM's own binary search."""
    usable = available_bytes - (pool.block_bytes if behaviour.null_block_reserved else 0)
    if not pool.block_bytes:
        return limit_tokens
    low, high, best = 1, limit_tokens, 0
    while low <= high:
        middle = (low + high) // 2
        if pool.bytes_per_request(middle) <= usable:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def bytes_for(pool: Pool, tokens: int, requests: int, behaviour: Behaviour) -> int:
    """KV memory that holds ``requests`` of ``tokens`` each at once, with the null block where it is reserved."""
    spare = pool.block_bytes if behaviour.null_block_reserved else 0
    return pool.bytes_per_request(tokens) * requests + spare


def blocks_for(spec: Spec, tokens: int, settings: PoolSettings) -> int:
    """Blocks one request of ``tokens`` needs in one group (vLLM ``max_memory_usage_bytes`` of each spec)."""
    block = spec.block_tokens
    match spec.kind:
        case LayerKind.SLIDING:
            # Plus one: the window need not start at a block's first token.
            return ceil_div(min(spec.span_tokens - 1 + settings.in_flight_tokens, tokens), block) + 1
        case LayerKind.CHUNKED:
            return ceil_div(min(spec.span_tokens + settings.in_flight_tokens, tokens), block)
        case LayerKind.STATE:
            return _state_blocks(tokens, block, settings)
        case LayerKind.CROSS:
            return ceil_div(settings.encoder_tokens, block)
        case _:
            return ceil_div(ceil_div(tokens, settings.dcp), block)


def _state_blocks(tokens: int, block: int, settings: PoolSettings) -> int:
    """States of one request: every block's (mode "all"), or the current, the cached and the drafted ones ("align")."""
    if not settings.prefix_caching:
        return 1 + settings.drafted_tokens
    if settings.every_state_kept:
        return ceil_div(tokens, block) + settings.drafted_tokens
    return 2 + settings.drafted_tokens + settings.checkpoint_blocks


def _logged_tokens(pool: Pool, blocks: int, concurrency: float, max_model_len: int, behaviour: Behaviour) -> int:
    if behaviour.tokens_from_concurrency:
        return int(concurrency * max_model_len)
    smallest = min(group.spec.block_tokens for group in pool.groups)
    return blocks // len(pool.groups) * smallest * pool.settings.dcp


def token_bytes(layer: Layer, settings: PoolSettings) -> int:
    """Bytes one token takes in ``layer`` on one GPU."""
    if layer.kind is LayerKind.MLA:
        return mla_token_bytes(layer.latent_dim, settings.kv_dtype, settings.model_bytes)
    if layer.kind is LayerKind.INDEXER or layer.latent_dim:
        return layer.latent_dim
    heads = max(1, layer.kv_heads // settings.tp)
    return attention_token_bytes(heads, layer.key_dim, layer.value_dim, settings.kv_dtype, settings.model_bytes)


def _specs(layers: Sequence[Layer], settings: PoolSettings) -> tuple[list[Spec], PoolSettings]:
    """One spec a layer, after the block was enlarged until an attention page holds a recurrent state."""
    states = [layer.state for layer in layers if layer.state is not None]
    # The cache dtype of convolution states is the model's, not the KV dtype (mamba_cache_dtype "auto").
    state_bytes = max(
        (state.bytes_per_request(settings.tp, settings.drafted_tokens, settings.model_bytes) for state in states),
        default=0,
    )
    attention = [layer for layer in layers if layer.state is None]
    block, state_page = settings.block_tokens, state_bytes
    if states and attention:
        first = next((layer for layer in attention if layer.kind in _GROW_TOGETHER), attention[0])
        each = token_bytes(first, settings)
        align = max(settings.align_tokens, settings.block_tokens, 128 if first.kind is LayerKind.MLA else 0)
        if settings.prefix_caching and settings.every_state_kept:
            align = lcm(align, settings.chunk_tokens)
        block = max(block, align * ceil_div(state_bytes, align * each))
        state_page = block * each
    settings = _with_block(settings, block)
    skipped = unquantised_layers(settings.kv_dtype, len(attention), bool(states))
    plain = _with_dtype(settings, "auto")
    specs: list[Spec] = []
    seen = 0
    for layer in layers:
        if layer.state is not None:
            specs.append(Spec(LayerKind.STATE, block, state_page))
            continue
        at_end = seen < skipped // 2 or seen >= len(attention) - skipped // 2
        each = token_bytes(layer, plain if skipped and at_end else settings)
        specs.append(Spec(layer.kind, block, block * each, layer.span_tokens))
        seen += 1
    return specs, settings


def _one_group(specs: Sequence[Spec]) -> bool:
    if all(spec.kind in _GROW_TOGETHER for spec in specs):
        return True
    first = specs[0]
    return all(spec.kind is first.kind and spec.span_tokens == first.span_tokens for spec in specs) and (
        first.kind is not LayerKind.STATE or len({spec.page_bytes for spec in specs}) == 1
    )


def _as_full(spec: Spec) -> Spec:
    """``--disable-hybrid-kv-cache-manager``: local layers keep every token."""
    if spec.kind in (LayerKind.SLIDING, LayerKind.CHUNKED):
        return Spec(LayerKind.FULL, spec.block_tokens, spec.page_bytes)
    return spec


def _unified(specs: Sequence[Spec], settings: PoolSettings) -> list[Spec]:
    """Give every layer one page size: more tokens a block where it divides, else padding."""
    largest = max(spec.page_bytes for spec in specs)
    unified: list[Spec] = []
    for spec in specs:
        block = spec.block_tokens
        if spec.kind is not LayerKind.STATE and largest % spec.page_bytes == 0:
            block *= largest // spec.page_bytes
        elif spec.kind is LayerKind.MLA and largest != spec.page_bytes:
            raise ContradictoryFlags(
                "This mix of latent and other attention pages cannot be unified by vLLM's allocator; "
                "a start-up log of the model is needed."
            )
        unified.append(Spec(spec.kind, block, largest, spec.span_tokens))
    return unified


def _grouped(specs: Sequence[Spec], settings: PoolSettings, behaviour: Behaviour) -> Pool:
    """Split each type into groups of equal size: the smallest type's count, or the largest's when they are close."""
    counts: dict[Spec, int] = {}
    for spec in specs:
        counts[spec] = counts.get(spec, 0) + 1
    smallest, largest = min(counts.values()), max(counts.values())
    close = smallest * behaviour.padding_ratio
    size = largest if largest < close else smallest
    page = specs[0].page_bytes
    groups: list[Group] = []
    padding = 0
    for spec, count in counts.items():
        parts = ceil_div(count, size)
        padding += parts * size - count
        groups.extend(Group(spec, len(range(part, count, parts)), size * page) for part in range(parts))
    widest = max(group.layers for group in groups)
    return Pool(tuple(groups), widest * page, settings, padding)


def _with_block(settings: PoolSettings, block_tokens: int) -> PoolSettings:
    return replace(settings, block_tokens=block_tokens)


def _with_dtype(settings: PoolSettings, kv_dtype: str) -> PoolSettings:
    return replace(settings, kv_dtype=kv_dtype)


def gib(nbytes: float) -> float:
    """Bytes as GiB."""
    return nbytes / GIB
