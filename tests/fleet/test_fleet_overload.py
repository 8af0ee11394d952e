"""A backend that says it is full rests for a moment, and longer only if it says so again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.overload import FIRST_REST_S, LONGEST_REST_S, Overload


def test_each_refusal_after_a_rest_makes_a_longer_one_up_to_a_bound() -> None:
    overload, now_s, rests = Overload(), 0.0, []
    for _ in range(7):
        rests.append(overload.refused(now_s, now_s + 0.01) or 0.0)
        assert overload.rests(now_s + 0.02)
        now_s += 0.01 + rests[-1]
        assert not overload.rests(now_s)
    assert rests == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_many_that_are_refused_together_make_one_rest() -> None:
    overload = Overload()
    assert overload.refused(0.0, 1.0) == FIRST_REST_S
    for _ in range(20):
        assert overload.refused(0.5, 1.1) is None
    assert overload.until_s == 1.0 + FIRST_REST_S


def test_an_answer_ends_it_but_none_of_before_cuts_a_rest_short() -> None:
    overload = Overload()
    overload.refused(0.0, 1.0)
    assert not overload.answered(1.1)
    assert overload.rests(1.2)
    assert overload.answered(1.3)
    assert not overload.answered(1.4)
    assert overload.refused(1.5, 1.6) == FIRST_REST_S


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5), st.floats(0, 20)), max_size=50))
def test_it_never_rests_longer_than_the_bound(events: list[tuple[bool, float, float]]) -> None:
    overload, now_s = Overload(), 0.0
    for refused, gap_s, age_s in events:
        now_s += gap_s
        if refused:
            overload.refused(now_s - age_s, now_s)
        else:
            overload.answered(now_s)
        assert overload.until_s is None or overload.until_s - now_s <= LONGEST_REST_S
        assert not overload.rests(now_s + LONGEST_REST_S)
