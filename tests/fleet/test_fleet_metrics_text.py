"""Readings of vLLM's metrics: both generations, and nothing that can be sent breaks the reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.exposition import Families, labels_and_value
from gateway.fleet.metrics_text import Oddity, Reading, parse

V1 = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen3"} 3.0
vllm:num_requests_waiting{engine="0",model_name="qwen3"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="qwen3",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="qwen3"} 0.25
vllm:num_preemptions_total{engine="0",model_name="qwen3"} 6.0
vllm:num_preemptions_created{engine="0",model_name="qwen3"} 1.7960152150203812e+09
vllm:prompt_tokens_total{engine="0",model_name="qwen3"} 44319.0
vllm:generation_tokens_total{engine="0",model_name="qwen3"} 12539.0
vllm:cache_config_info{block_size="32",effective_attention_block_size="32",engine="0",kv_cache_size_tokens="5120",\
num_cpu_blocks="None",num_gpu_blocks="160",num_gpu_blocks_override="160"} 1.0
process_start_time_seconds 1.79601518434e+09
"""

V0 = b"""vllm:num_requests_running{model_name="llama"} 1.0
vllm:num_requests_waiting{model_name="llama"} 0.0
vllm:gpu_cache_usage_perc{model_name="llama"} 0.5
vllm:cpu_cache_usage_perc{model_name="llama"} 0.9
vllm:cache_config_info{block_size="16",num_gpu_blocks="2048",num_cpu_blocks="2048",sliding_window="None"} 1.0
"""


def test_a_recent_server_is_read() -> None:
    assert parse(V1) == Reading(
        engines=1,
        labels=("0",),
        blocks=160,
        block_size_tokens=32,
        cache_tokens=5120,
        usage_ratio={"0": 0.25},
        running=3,
        waiting=2,
        running_by_engine={"0": 3},
        waiting_by_engine={"0": 2},
        overridden=True,
        started_s=1796015184.34,
        counters={
            "vllm:prompt_tokens_total": 44319.0,
            "vllm:generation_tokens_total": 12539.0,
            "vllm:num_preemptions_total": 6.0,
        },
    )


def test_the_first_generation_has_another_usage_name_and_no_engine_label() -> None:
    reading = parse(V0)
    assert (reading.engines, reading.blocks, reading.block_size_tokens) == (1, 2048, 16)
    assert reading.usage_ratio == {"0": 0.5}
    assert (reading.running, reading.waiting, reading.overridden) == (1, 0, False)
    assert reading.cache_tokens is None


def test_engines_stand_in_the_order_of_their_ranks_and_a_count_that_one_keeps_back_is_unknown_for_all() -> None:
    """A hybrid server names its engines by their ranks in the whole deployment: the first of its own is rank 0."""
    text = "".join(f'vllm:num_requests_running{{engine="{rank}"}} {rank}.0\n' for rank in (11, 8, 10, 9))
    reading = parse(f'{text}vllm:num_requests_waiting{{engine="8"}} 1.0\n'.encode())
    assert reading.labels == ("8", "9", "10", "11")
    assert reading.running_by_engine == {"8": 8, "9": 9, "10": 10, "11": 11}
    assert (reading.waiting, reading.waiting_by_engine) == (1, None)
    assert parse(b"").labels == ()


def test_both_usage_names_at_once_count_once() -> None:
    both = b'vllm:gpu_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    assert parse(both).usage_ratio == {"0": 0.5}


def test_data_parallel_engines_are_summed_but_their_block_count_is_a_sum_already() -> None:
    text = "".join(
        f'vllm:kv_cache_usage_perc{{engine="{rank}"}} 0.{rank + 1}\n'
        f'vllm:num_requests_running{{engine="{rank}"}} {rank}.0\n'
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="4000",'
        f'kv_cache_size_tokens="16000"}} 1\n'
        for rank in range(4)
    )
    reading = parse(text.encode())
    assert (reading.engines, reading.blocks, reading.cache_tokens) == (4, 4000, 16000)
    assert reading.usage_ratio == {"0": 0.1, "1": 0.2, "2": 0.3, "3": 0.4}
    assert reading.running == 6


def test_usage_of_a_part_of_the_engines_is_unknown() -> None:
    text = (
        b'vllm:cache_config_info{engine="0",num_gpu_blocks="10",block_size="16"} 1\n'
        b'vllm:cache_config_info{engine="1",num_gpu_blocks="10",block_size="16"} 1\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    )
    assert parse(text).usage_ratio is None
    assert parse(text).odd == {Oddity.PARTIAL_ENGINES}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-0.5", "37.5", "", "abc", "1e999"])
def test_a_usage_that_makes_no_sense_is_unknown_not_zero(value: str) -> None:
    assert parse(f'vllm:kv_cache_usage_perc{{engine="0"}} {value}\n'.encode()).usage_ratio is None


@pytest.mark.parametrize("value", ["None", "", "0", "-5", "1.5", "1e3", "٣", "9" * 400])
def test_a_block_count_that_makes_no_sense_is_unknown(value: str) -> None:
    text = f'vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="{value}"}} 1\n'
    assert parse(text.encode()).blocks is None


def test_nan_gauges_and_counters_are_unknown() -> None:
    reading = parse(b'vllm:num_requests_running{engine="0"} NaN\nvllm:prompt_tokens_total NaN\n')
    assert reading.running is None
    assert reading.counters == {}


def test_the_effective_block_size_wins_unless_groups_differ() -> None:
    line = 'vllm:cache_config_info{{engine="0",block_size="4",effective_attention_block_size="{}"}} 1\n'
    assert parse(line.format("256").encode()).block_size_tokens == 256
    assert parse(line.format("None").encode()).block_size_tokens == 4


def test_labels_may_hold_quotes_braces_backslashes_and_newlines() -> None:
    text = b'name{a="x\\"y}",b="\\\\",c="1\\n2", d = "," ,} 4 1700000000\nname_longer 5\nname 6'
    read = [labels_and_value(rest) for rest in Families(["name"]).find(text)["name"]]
    assert read == [({"a": 'x"y}', "b": "\\", "c": "1\n2", "d": ","}, 4.0), ({}, 6.0)]


def test_windows_line_ends_and_a_missing_last_one_are_read() -> None:
    assert parse(b'vllm:num_requests_running{engine="0"} 7\r\nvllm:num_requests_waiting{engine="0"} 8').waiting == 8


def test_an_empty_or_foreign_body_is_all_unknown() -> None:
    for body in (b"", b"<html>404</html>", b"\xff\xfe\x00", b"# only a comment\n"):
        assert parse(body) == Reading()


def test_a_sleeping_server_says_so_and_an_old_one_says_nothing() -> None:
    states = "".join(
        f'vllm:engine_sleep_state{{engine="{rank}",sleep_state="{state}"}} {value}\n'
        for rank in (0, 1)
        for state, value in (("awake", 1 - rank), ("weights_offloaded", rank), ("discard_all", 0))
    )
    assert parse(states.encode()).awake is False
    assert parse(states.replace(" 0\n", " 1\n").encode()).awake is True
    assert parse(V0).awake is None


def test_prefix_cache_counters_are_read_under_either_name_and_never_twice() -> None:
    old = 'vllm:gpu_prefix_cache_queries_total{engine="0"} 90\nvllm:gpu_prefix_cache_hits_total{engine="0"} 30\n'
    assert (parse(old.encode()).queried_tokens, parse(old.encode()).hit_tokens) == (90.0, 30.0)
    both = old + old.replace("gpu_", "")
    assert (parse(both.encode()).queried_tokens, parse(both.encode()).hit_tokens) == (90.0, 30.0)


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "garbage"])
def test_a_value_that_makes_no_sense_is_named(value: str) -> None:
    page = V1.decode().replace('running{engine="0",model_name="qwen3"} 3.0', f'running{{engine="0"}} {value}')
    assert parse(page.encode()).odd == {Oddity.BAD_VALUE}
    assert parse(page.encode()).running is None
    assert parse(V1).odd == frozenset()


def test_two_engines_under_one_label_are_unknown_and_one_told_twice_is_one() -> None:
    told = parse(V1 + b'vllm:kv_cache_usage_perc{engine="0",model_name="qwen3"} 0.25\n')
    assert (told.usage_ratio, told.odd) == ({"0": 0.25}, {Oddity.DUPLICATE_ENGINE})
    two = parse(V1 + b'vllm:kv_cache_usage_perc{engine="0",model_name="qwen3",instance="b"} 0.25\n')
    assert (two.usage_ratio, two.odd) == (None, {Oddity.DUPLICATE_ENGINE})


def test_a_page_is_empty_without_an_engine_and_not_for_an_odd_one() -> None:
    assert parse(b"process_start_time_seconds 1.7e9\npython_info 1\n").empty
    assert not parse(V0).empty
    assert not parse(b'vllm:kv_cache_usage_perc{engine="0"} NaN\n').empty


@given(st.binary(max_size=400))
def test_no_bytes_are_an_error(noise: bytes) -> None:
    parse(noise)


@given(st.data())
def test_no_damage_to_a_real_page_is_an_error(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(V1)))
    end = data.draw(st.integers(start, min(len(V1), start + 60)))
    reading = parse(V1[:start] + data.draw(st.binary(max_size=8)) + V1[end:])
    assert reading.usage_ratio is None or all(0 <= ratio <= 1 for ratio in reading.usage_ratio.values())


def test_labels_without_an_end_cost_no_time() -> None:
    parse(b"vllm:cache_config_info{" + b'a="b" , ' * 7000 + b"\n")
    parse(b"vllm:cache_config_info{" + b'a="' + b"\\" * 60000)


def test_no_family_is_read_that_vllm_does_not_have() -> None:
    """The names are spelled as vLLM's; a page of a real 0.32 server is kept to prove it."""
    page = Path(__file__).with_name("vllm_0.32.0_metrics.txt").read_bytes()
    reading = parse(page)
    assert (reading.blocks, reading.block_size_tokens, reading.cache_tokens) == (160, 32, 5120)
    assert reading.usage_ratio is not None
    assert len(reading.counters) == 3
    assert (reading.queried_tokens, reading.hit_tokens, reading.awake) == (45319.0, 14720.0, True)
    assert reading.created_s is not None
    assert not reading.odd
    assert reading.started_s is not None
