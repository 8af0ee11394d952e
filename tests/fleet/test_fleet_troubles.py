"""What is wrong with a backend's word: named, told once when it begins and ends, and never told in a flood."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.metrics_text import Oddity, Reading, parse
from gateway.fleet.troubles import FORGIVEN_AFTER, QUIET_S, SAID, Trouble, Troubles, Turn, troubles_of

PAGE = (
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    'vllm:num_requests_running{engine="0"} 1\n'
    'vllm:cache_config_info{engine="0",num_gpu_blocks="10",block_size="16"} 1\n'
)


@pytest.mark.parametrize(
    ("page", "kinds"),
    [
        (PAGE, set()),
        ("", {Trouble.NO_METRICS}),
        ("process_start_time_seconds 7\n", {Trouble.NO_METRICS}),
        (PAGE.replace("kv_cache_usage_perc", "kv_usage"), {Trouble.NO_USAGE}),
        (PAGE.replace("cache_config_info", "cache_config"), {Trouble.NO_CAPACITY}),
        (PAGE.replace('num_gpu_blocks="10"', 'num_gpu_blocks="None"'), {Trouble.NO_CAPACITY}),
        (PAGE.replace("0.5", "NaN"), {Trouble.BAD_VALUE}),
        (PAGE.replace("0.5", "1.5"), {Trouble.BAD_VALUE}),
        (PAGE.replace(" 1\n", " -1\n", 1), {Trouble.BAD_VALUE}),
        (PAGE + PAGE.replace("0.5", "0.6"), {Trouble.DUPLICATE_ENGINE}),
        (PAGE + PAGE.replace('engine="0"', 'engine="1"').replace("kv_cache", "x"), {Trouble.PARTIAL_ENGINES}),
    ],
)
def test_each_kind_of_odd_page_has_its_name(page: str, kinds: set[Trouble]) -> None:
    assert troubles_of(parse(page.encode())).keys() == kinds


def test_a_page_of_something_else_is_that_and_nothing_more() -> None:
    assert troubles_of(Reading(odd=frozenset({Oddity.NOT_METRICS}))).keys() == {Trouble.NOT_METRICS}


def test_every_kind_can_be_told() -> None:
    assert SAID.keys() == set(Trouble)


def test_it_is_told_once_when_it_begins_and_once_when_it_is_surely_over() -> None:
    troubles = Troubles()
    bad = {Trouble.BAD_VALUE: "x"}
    assert troubles.looked(bad, 0.0) == [Turn(Trouble.BAD_VALUE, "x", True)]
    assert troubles.looked(bad, 1.0) == []
    for _ in range(FORGIVEN_AFTER - 1):
        assert troubles.looked({}, 2.0) == []
    assert Trouble.BAD_VALUE in troubles
    assert troubles.looked({}, 3.0) == [Turn(Trouble.BAD_VALUE, "x", False)]
    assert Trouble.BAD_VALUE not in troubles
    assert troubles.ever == {Trouble.BAD_VALUE}


def test_one_that_comes_and_goes_is_told_but_once_in_a_while() -> None:
    troubles = Troubles()
    told = 0
    for second in range(int(QUIET_S) - 1):
        told += len(troubles.looked({Trouble.BAD_VALUE: ""} if second // 5 % 2 else {}, float(second)))
    assert told == 2  # began, ended
    assert troubles.looked({Trouble.BAD_VALUE: ""}, 3 * QUIET_S) != []


def test_a_cache_is_unknown_where_its_numbers_are_of_several_or_of_none() -> None:
    troubles = Troubles()
    troubles.begin(Trouble.BAD_VALUE, "", 0.0)
    assert not troubles.blinding
    troubles.begin(Trouble.SEVERAL_SERVERS, "", 0.0)
    assert troubles.blinding
    troubles.end(Trouble.SEVERAL_SERVERS, 1.0)
    assert not troubles.blinding


@given(
    st.lists(st.tuples(st.dictionaries(st.sampled_from(list(Trouble)), st.just("")), st.floats(0, 100)), max_size=60)
)
def test_every_end_that_is_told_had_its_beginning_told(looks: list[tuple[dict[Trouble, str], float]]) -> None:
    troubles = Troubles()
    now_s, open_kinds = 0.0, set()
    for found, gap_s in looks:
        now_s += gap_s
        for turn in troubles.looked(found, now_s):
            assert (turn.kind in open_kinds) is not turn.began
            open_kinds ^= {turn.kind}
        assert found.keys() <= {record.kind for record in troubles.records(now_s)}
