"""Guesses about prefix caches, corrected by the counters where nobody else's requests blur them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.hits import LEAST_ANSWERS, LONGEST_S, Hits, Verdict


def test_what_was_found_is_held_against_what_was_expected() -> None:
    hits = Hits()
    assert hits.read(1000.0, 500.0, 0.0) is None
    for _ in range(4):
        hits.answered(2000, 1500)
    assert hits.read(9000.0, 3500.0, 1.0) == Verdict(6000, 3000, 4)
    assert hits.read(9000.0, 3500.0, 2.0) is None  # and but once


def test_requests_of_others_leave_it_open() -> None:
    hits = Hits()
    hits.read(0.0, 0.0, 0.0)
    for _ in range(4):
        hits.answered(2000, 1500)
    assert hits.read(16000.0, 3000.0, 1.0) is None


def test_a_prompt_at_the_edge_of_two_readings_is_waited_for() -> None:
    hits = Hits()
    hits.read(0.0, 0.0, 0.0)
    for _ in range(4):
        hits.answered(1500, 1000)
    assert hits.read(7500.0, 5000.0, 1.0) is None  # one more was looked up, and is not answered yet
    hits.answered(1500, 1000)
    assert hits.read(7500.0, 5000.0, 2.0) == Verdict(5000, 5000, 5)


def test_after_a_while_it_begins_anew() -> None:
    hits = Hits()
    hits.read(0.0, 0.0, 0.0)
    hits.read(50000.0, 0.0, 1.0)  # not ours
    hits.read(50000.0, 0.0, LONGEST_S + 1.0)
    for _ in range(4):
        hits.answered(2000, 1500)
    assert hits.read(58000.0, 6000.0, LONGEST_S + 2.0) == Verdict(6000, 6000, 4)


def test_a_few_requests_or_unclear_ones_say_nothing() -> None:
    hits = Hits()
    hits.read(0.0, 0.0, 0.0)
    for _ in range(LEAST_ANSWERS - 1):
        hits.answered(2000, 1500)
    assert hits.read(6000.0, 0.0, 1.0) is None
    hits.answered(2000, 1500, clear=False)
    assert hits.read(8000.0, 0.0, 2.0) is None


def test_another_process_or_missing_counters_start_over() -> None:
    hits = Hits()
    hits.read(9000.0, 0.0, 0.0)
    for _ in range(4):
        hits.answered(2000, 1500)
    assert hits.read(None, None, 1.0) is None
    assert hits.read(8000.0, 0.0, 2.0) is None  # it went back
    hits.forget()
    assert hits.ratio is None


def test_the_ratio_is_of_everybody_and_forgets_slowly() -> None:
    hits = Hits()
    assert hits.ratio is None
    hits.read(0.0, 0.0, 0.0)
    hits.read(1000.0, 900.0, 1.0)
    assert hits.ratio == 0.9
    hits.read(2000.0, 900.0, 121.0)
    assert 0.1 < (hits.ratio or 0) < 0.3


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5000), max_size=6), st.floats(0, 1), st.floats(0.1, 30)), max_size=30),
    st.floats(0, 1),
)
def test_where_all_requests_are_ours_the_share_that_came_true_is_found(
    looks: list[tuple[list[int], float, float]], share: float
) -> None:
    hits = Hits()
    queried = hit = now_s = 0.0
    hits.read(queried, hit, now_s)
    for prompts, expected_share, gap_s in looks:
        for tokens in prompts:
            expected = int(expected_share * tokens)
            hits.answered(tokens, expected)
            queried += tokens
            hit += share * expected
        now_s += gap_s
        verdict = hits.read(queried, hit, now_s)
        if verdict is not None:
            assert abs(verdict.cached_tokens - share * verdict.expected_tokens) <= 1 + 1e-6 * hit
