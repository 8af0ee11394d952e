"""DeepSeek-V4's pool: compressed caches, a window and compressor states of five page sizes packed side by side.

Follows vLLM 0.25 (``_get_kv_cache_groups_uniform_groups``, one slot a page size) and 0.28 to 0.32 (a block is as wide
as its widest group). Rows of the packed fp8 format: 584 B of attention, 132 B of indexer, pages aligned to 576 B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.planner.figures import ceil_div
from gateway.planner.layers import LayerKind
from gateway.planner.pool import Group, Pool, PoolSettings, Spec
from gateway.planner.versions import Behaviour

_ALIGN_BYTES = 576
_ROW_BYTES, _INDEX_ROW_BYTES = 584, 132
_BLOCK_TOKENS, _WINDOW_BLOCK_TOKENS = 256, 64
# (block tokens, window tokens, float32 elements a token) of the compressors' states, by compression ratio
_FINE_STATE = (4, 8, 2 * 2 * 512)
_FINE_INDEX_STATE = (4, 8, 2 * 2 * 128)
_COARSE_STATE = (8, 128, 2 * 512)


def build_v4_pool(config: Mapping[str, Any], mtp_layers: int, settings: PoolSettings, behaviour: Behaviour) -> Pool:
    """The pool of one rank; latent rows are the same on every tensor-parallel rank."""
    count = int(config["num_hidden_layers"])
    ratios = [int(ratio) for ratio in (config.get("compress_ratios") or [])[:count]]
    fine, coarse = sum(ratio == 4 for ratio in ratios), sum(ratio > 4 for ratio in ratios)
    windows = count + mtp_layers
    pages = (_page(_BLOCK_TOKENS // 4 * _ROW_BYTES), _page(_BLOCK_TOKENS // 4 * _INDEX_ROW_BYTES))
    coarse_page = _page(_BLOCK_TOKENS // 128 * _ROW_BYTES)
    full_bytes = fine * sum(pages) + coarse * coarse_page
    repeats = _least_padding([fine, windows, fine, coarse], fine)
    packed = not behaviour.pages_side_by_side
    window_page = _page(_WINDOW_BLOCK_TOKENS * _ROW_BYTES)
    fine_page, coarse_state_page = _state_page(_FINE_STATE), _state_page(_COARSE_STATE)
    if packed:
        # Smaller pages are padded up to the full group's, whose slots they share.
        window_page = fine_page = coarse_state_page = pages[0]
    groups = [Group(Spec(LayerKind.MLA, _BLOCK_TOKENS, full_bytes), 2 * fine + coarse, full_bytes)]
    parts = ceil_div(windows, repeats)
    window = int(config.get("sliding_window") or 128)
    for part in range(parts):
        layers = len(range(part, windows, parts))
        groups.append(_local(window, _WINDOW_BLOCK_TOKENS, layers, layers * window_page))
    groups += [
        _local(_FINE_STATE[1], _FINE_STATE[0], 2 * fine, fine * (fine_page + _state_page(_FINE_INDEX_STATE))),
        _local(_COARSE_STATE[1], _COARSE_STATE[0], coarse, coarse * coarse_state_page),
    ]
    if not packed:
        return Pool(tuple(groups), max(group.page_bytes for group in groups), settings)
    slots = max(fine, coarse, *(group.layers for group in groups[1 : 1 + parts]))
    block = slots * pages[0] + fine * pages[1] + coarse * coarse_page
    return Pool(tuple(groups), block, settings, check_block_bytes=slots * (sum(pages) + coarse_page), weighted=True)


def _local(window: int, block_tokens: int, layers: int, page_bytes: int) -> Group:
    return Group(Spec(LayerKind.SLIDING, block_tokens, page_bytes, window), layers, page_bytes)


def _page(nbytes: int) -> int:
    return ceil_div(nbytes, _ALIGN_BYTES) * _ALIGN_BYTES


def _state_page(state: tuple[int, int, int]) -> int:
    return _page(state[0] * state[2] * 4)


def _least_padding(counts: list[int], at_least: int) -> int:
    """The group size that pads all counts least, the larger of equals (vLLM ``_approximate_gcd``)."""
    sizes = range(max(at_least, 1), max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-number % size for number in counts), -size))
