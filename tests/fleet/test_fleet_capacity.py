"""Capacity out of labels that mislead in ways the versions of vLLM differ in."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.fleet.capacity import KvCapacity, kv_capacity, used_blocks
from gateway.fleet.metrics_text import Reading


def reading(**fields: Any) -> Reading:
    return Reading(**{"blocks": 1000, "block_size_tokens": 16, **fields})


def test_the_null_block_of_each_engine_is_not_capacity() -> None:
    assert kv_capacity(reading(), 8192) == KvCapacity(engines=1, engine_blocks=999, block_size_tokens=16)
    four = kv_capacity(reading(blocks=4000, engines=4), 8192)
    assert four is not None
    assert (four.engine_blocks, four.blocks, four.engine_tokens) == (999, 3996, 999 * 16)


def test_one_group_is_known_by_its_token_figure_even_when_the_window_is_no_multiple_of_a_block() -> None:
    # vLLM: blocks / ceil(window / block) requests of a whole window; 100 tokens take 7 blocks of 16.
    tokens = int(1000 / 7 * 100)
    capacity = kv_capacity(reading(cache_tokens=tokens), 100)
    assert capacity == KvCapacity(1, 999, 16)


@pytest.mark.parametrize("tokens", [4000, 12000, 64000])
def test_several_groups_are_reckoned_in_tokens(tokens: int) -> None:
    capacity = kv_capacity(reading(cache_tokens=tokens), 4096)
    assert capacity == KvCapacity(1, tokens // 16, 16, virtual=True)
    assert capacity.engine_tokens == tokens - 16


def test_a_hybrid_of_before_024_shows_a_wrong_block_size_and_is_unknown() -> None:
    # 500 blocks of really 784 tokens; the label says 16, which would be less than a window and could not have started.
    assert kv_capacity(reading(blocks=500), 32768) is None


def test_an_override_may_make_a_cache_smaller_than_a_window() -> None:
    capacity = kv_capacity(reading(blocks=100, overridden=True), 32768)
    assert capacity == KvCapacity(1, 99, 16)
    assert capacity.engine_tokens == 1584


def test_a_cache_of_exactly_one_window_is_believed() -> None:
    assert kv_capacity(reading(blocks=512), 8192) == KvCapacity(1, 511, 16)


@pytest.mark.parametrize(
    "fields", [{"blocks": None}, {"block_size_tokens": None}, {"blocks": 1}, {"blocks": 2, "engines": 2}]
)
def test_what_is_missing_or_empty_is_unknown(fields: dict[str, Any]) -> None:
    assert kv_capacity(reading(**fields), 64) is None


def test_use_is_told_by_rank_and_unknown_without_any() -> None:
    capacity = KvCapacity(engines=2, engine_blocks=1000, block_size_tokens=16)
    reading = Reading(labels=("8", "9"), usage_ratio={"9": 0.2, "8": 0.1})
    assert used_blocks(reading, capacity) == (100, 200)
    assert used_blocks(Reading(), capacity) is None


def test_vllms_ratio_gives_back_the_very_number_of_blocks() -> None:
    capacity = KvCapacity(engines=1, engine_blocks=99_999, block_size_tokens=16)
    for free in range(0, 99_999, 777):
        reading = Reading(labels=("0",), usage_ratio={"0": 1.0 - free / 99_999})
        assert used_blocks(reading, capacity) == (99_999 - free,)


def test_it_is_told_in_words() -> None:
    assert str(KvCapacity(1, 7811, 16)) == "of 124,976 tokens (7,811 blocks of 16)"
    assert str(KvCapacity(4, 100, 32)) == "of 3,200 tokens (100 blocks of 32) in each of 4 engines"
