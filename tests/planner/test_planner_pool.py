"""The KV arithmetic: every layout by hand, and what must hold for any."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.planner import pool as pools
from gateway.planner.deepseek_v4 import build_v4_pool
from gateway.planner.kvdtypes import KV_DTYPES, attention_token_bytes
from gateway.planner.layers import Layer, LayerKind, StateShape, chunked, cross, full, indexer, mla, recurrent, sliding
from gateway.planner.pool import PoolSettings, build_pool, capacity, largest_window
from gateway.planner.versions import behaviour_of

NEW = behaviour_of("0.32.0")
OLD = behaviour_of("0.19.0")
MIB = 1 << 20
GDN = StateShape("gated_delta_net", 10240, 4, 48 * 128 * 128, 4)


def _pool(layers: list[Layer], behaviour: Any = NEW, **settings: Any) -> pools.Pool:
    return build_pool(layers, PoolSettings(**settings), behaviour)


def test_grouped_query_attention_takes_two_times_heads_times_size() -> None:
    pool = _pool([full(8, 128)] * 64)
    assert pool.marginal_token_bytes() == 64 * 2 * 8 * 128 * 2 == 256 * 1024
    assert pool.block_bytes == 16 * 256 * 1024


def test_kv_heads_are_copied_once_tensor_parallelism_exceeds_them() -> None:
    sizes = [_pool([full(4, 128)] * 10, tp=tp).block_bytes for tp in (1, 2, 4, 8)]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4, sizes[0] // 4]


def test_key_and_value_sizes_may_differ() -> None:
    assert _pool([full(4, 192, 128)]).marginal_token_bytes() == 4 * (192 + 128) * 2


def test_latent_attention_is_not_divided_by_tensor_parallelism() -> None:
    assert _pool([mla(576)] * 27, tp=8).marginal_token_bytes() == 27 * 1152
    assert _pool([mla(576)] * 27, kv_dtype="fp8").marginal_token_bytes() == 27 * 576
    assert _pool([mla(576)] * 61, kv_dtype="fp8_ds_mla").marginal_token_bytes() == 61 * 656
    assert _pool([mla(576)], kv_dtype="nvfp4_ds_mla").marginal_token_bytes() == 352


def test_the_sparse_indexer_adds_its_own_row_whatever_the_dtype() -> None:
    pool = _pool([mla(576), indexer(132)] * 79, kv_dtype="fp8_ds_mla", block_tokens=64)
    assert pool.marginal_token_bytes() == 79 * (656 + 132)
    assert len(pool.groups) == 1


@pytest.mark.parametrize(
    ("kv_dtype", "nbytes"),
    [
        ("auto", 512),
        ("fp8", 256),
        ("int8_per_token_head", 264),
        ("fp8_per_token_head", 264),
        ("int4_per_token_head", 136),
        ("nvfp4", 144),
        ("turboquant_k8v4", 196),
        ("turboquant_4bit_nc", 134),
        ("turboquant_k3v4_nc", 118),
        ("turboquant_3bit_nc", 102),
    ],
)
def test_bytes_of_one_head_of_128_in_every_dtype(kv_dtype: str, nbytes: int) -> None:
    assert attention_token_bytes(1, 128, 128, kv_dtype, 2) == nbytes


def test_turboquant_leaves_two_layers_at_each_end_wide_but_none_in_a_hybrid() -> None:
    dense = _pool([full(2, 128)] * 62, kv_dtype="turboquant_k8v4")
    assert dense.marginal_token_bytes() == 58 * 2 * 196 + 4 * 2 * 512
    hybrid = _pool([full(4, 256)] * 4 + [recurrent(GDN)] * 12, kv_dtype="turboquant_3bit_nc")
    assert {group.spec.page_bytes for group in hybrid.groups if group.spec.kind is LayerKind.FULL} == {
        hybrid.block_tokens * 4 * 198
    }


def test_sliding_layers_hold_the_window_and_what_is_in_flight_plus_one_block() -> None:
    pool = _pool([sliding(8, 64, 128)] * 12 + [full(8, 64)] * 12, in_flight_tokens=4096)
    assert pool.blocks_per_request(131072) == 8192 + (-(-(127 + 4096) // 16) + 1)
    assert pool.blocks_per_request(64) == 4 + 5


def test_chunked_layers_hold_a_chunk_and_what_is_in_flight() -> None:
    pool = _pool([chunked(8, 128, 8192)] * 36 + [full(8, 128)] * 12, in_flight_tokens=2048)
    assert len(pool.groups) == 4
    assert pool.blocks_per_request(100_000) == 6250 + 3 * (8192 + 2048) // 16


def test_without_the_hybrid_manager_local_layers_cost_like_full_ones() -> None:
    layers = [sliding(8, 64, 128)] * 12 + [full(8, 64)] * 12
    pool = _pool(layers, hybrid_manager=False)
    assert len(pool.groups) == 1
    assert pool.marginal_token_bytes() == 24 * 2048


def test_layers_of_close_counts_are_padded_to_the_larger() -> None:
    pool = _pool([sliding(8, 64, 128)] * 12 + [full(8, 64)] * 13)
    assert len(pool.groups) == 2
    assert pool.padding_layers == 1
    assert pool.block_bytes == 13 * 16 * 2048


def test_pages_are_made_equal_by_longer_blocks() -> None:
    """Gemma 4: full heads of 512 make a page twice a sliding page, so sliding blocks hold twice the tokens."""
    pool = _pool([sliding(1, 256, 512)] * 12 + [full(1, 512)] * 3, in_flight_tokens=4096)
    blocks = {group.spec.kind: group.spec.block_tokens for group in pool.groups}
    assert blocks == {LayerKind.SLIDING: 32, LayerKind.FULL: 16}
    assert pool.blocks_per_request(16384) == 1024 + 4 * 145


def test_hybrid_blocks_grow_until_an_attention_page_holds_a_state() -> None:
    layers = [full(4, 256) if index % 4 == 3 else recurrent(GDN) for index in range(64)]
    assert _pool(layers).block_tokens == 784
    assert _pool(layers, kv_dtype="fp8").block_tokens == 1568
    assert _pool(layers, kv_dtype="fp8", tp=2).block_bytes * 2 == _pool(layers, kv_dtype="fp8").block_bytes


def test_hybrid_states_need_spare_blocks_for_prefix_caching_and_drafts() -> None:
    layers = [full(4, 256) if index % 4 == 3 else recurrent(GDN) for index in range(64)]
    with_cache = _pool(layers, kv_dtype="fp8")
    without = _pool(layers, kv_dtype="fp8", prefix_caching=False)
    drafted = _pool([*layers, full(4, 256)], kv_dtype="fp8", drafted_tokens=3)
    assert with_cache.blocks_per_request(131072) == 84 + 3 * 2
    assert without.blocks_per_request(131072) == 84 + 3
    assert drafted.block_tokens == 1600
    assert drafted.blocks_per_request(262144) == 164 + 3 * 5


def test_mamba2_groups_are_copied_when_there_are_fewer_than_ranks() -> None:
    shape = StateShape("mamba2", 1024 + 2 * 2 * 128, 4, 16 * 64 * 128, 4, groups=2, group_elements=256)
    assert shape.bytes_per_request(4, 0, 2) == (1024 + 4 * 256) // 4 * 3 * 2 + 16 * 64 * 128 // 4 * 4


def test_cross_attention_holds_the_encoder_and_not_the_window() -> None:
    pool = _pool([full(20, 64), cross(20, 64)] * 32, encoder_tokens=1500)
    assert pool.blocks_per_request(448) == 28 + 94


def test_decode_context_parallelism_spreads_tokens_over_ranks() -> None:
    pool = _pool([mla(576)] * 10, dcp=4, tp=4, block_tokens=64)
    assert pool.blocks_per_request(131072) == 512
    assert pool.marginal_token_bytes() == 10 * 1152 / 4


def test_a_model_that_caches_nothing_fits_anything() -> None:
    pool = _pool([])
    assert capacity(pool, 0, 512, NEW).fits
    assert largest_window(pool, 0, 512, NEW) == 512


def test_the_null_block_is_reserved_since_0_29() -> None:
    pool = _pool([full(8, 128)] * 64)
    exactly = pool.bytes_per_request(16384)
    assert capacity(pool, exactly, 16384, behaviour_of("0.28.0")).fits
    assert not capacity(pool, exactly, 16384, behaviour_of("0.29.0")).fits
    assert capacity(pool, exactly + pool.block_bytes, 16384, NEW).fits


def test_logged_tokens_of_a_hybrid_up_to_0_20_0_disagree_with_the_concurrency() -> None:
    layers = [full(4, 256) if index % 4 == 3 else recurrent(GDN) for index in range(64)]
    pool = _pool(layers)
    held = 1019 * pool.block_bytes
    assert capacity(pool, held, 65536, OLD).size_tokens == 199136
    assert capacity(pool, held, 65536, behaviour_of("0.20.0")).size_tokens == 199136  # logs of 0.20.0 and 0.20.2 differ
    assert capacity(pool, held, 65536, behaviour_of("0.20.2")).size_tokens == 742013


def test_deepseek_v4_packs_five_groups_into_one_block() -> None:
    config = {"num_hidden_layers": 43, "compress_ratios": [0, 0, *[4, 128] * 20, 4], "sliding_window": 128}
    settings = PoolSettings(kv_dtype="fp8_ds_mla", in_flight_tokens=8192)
    old = build_v4_pool(config, 1, settings, behaviour_of("0.26.0"))
    assert len(old.groups) == 5
    assert old.block_bytes == 22 * 37440 + 21 * 8640 + 20 * 1728
    assert old.blocks_per_request(912128) == 6537
    new = build_v4_pool(config, 1, settings, NEW)
    assert new.block_bytes == 21 * (37440 + 8640) + 20 * 1728
    assert new.blocks_per_request(912128) == 3563 + 2 * 131 + 2051 + 1041


layer_lists = st.lists(
    st.one_of(
        st.builds(full, st.sampled_from([1, 2, 4, 8]), st.sampled_from([64, 128, 256])),
        st.builds(sliding, st.sampled_from([1, 2, 4]), st.sampled_from([64, 128]), st.integers(16, 4096)),
        st.just(recurrent(GDN)),
    ),
    min_size=1,
    max_size=12,
).filter(lambda layers: len({layer.span_tokens for layer in layers}) <= 3)


@given(
    layers=layer_lists,
    tokens=st.integers(1, 200_000),
    more=st.integers(0, 50_000),
    tp=st.sampled_from([1, 2, 4]),
    kv_dtype=st.sampled_from(["auto", "fp8", "int8_per_token_head"]),
)
def test_longer_requests_never_need_less(layers: list[Layer], tokens: int, more: int, tp: int, kv_dtype: str) -> None:
    pool = _pool(layers, tp=tp, kv_dtype=kv_dtype)
    assert pool.bytes_per_request(tokens) <= pool.bytes_per_request(tokens + more)


@given(layers=layer_lists, mebibytes=st.integers(1, 40_000), limit=st.integers(1, 300_000))
def test_the_largest_window_passes_the_check_and_one_more_token_does_not(
    layers: list[Layer], mebibytes: int, limit: int
) -> None:
    pool = _pool(layers)
    best = largest_window(pool, mebibytes * MIB, limit, NEW)
    if best:
        assert capacity(pool, mebibytes * MIB, best, NEW).fits
    if best < limit:
        assert not capacity(pool, mebibytes * MIB, best + 1, NEW).fits


@given(layers=layer_lists, mebibytes=st.integers(1, 10_000))
def test_fp8_never_holds_fewer_tokens(layers: list[Layer], mebibytes: int) -> None:
    window = 8192
    wide, narrow = _pool(layers), _pool(layers, kv_dtype="fp8")
    if not any(layer.state for layer in layers) and len(wide.groups) == 1:
        held = [capacity(pool, mebibytes * MIB, window, NEW).max_concurrency for pool in (wide, narrow)]
        assert held[1] >= held[0]


def test_every_named_dtype_has_a_size() -> None:
    for kv_dtype in KV_DTYPES:
        assert attention_token_bytes(2, 128, 128, kv_dtype, 2) > 0
