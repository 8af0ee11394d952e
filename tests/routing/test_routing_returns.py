"""What conversations leave in a cache, how likely they return, and what is known of prompts that are gone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import prefixes
from gateway.routing.prefixes import PrefixIndex
from gateway.routing.returns import HALF_S, Returns

FIRST, SECOND = ((1, 1000), (2, 2000)), ((3, 1000), (4, 2000))


def asked(seen_tokens: int) -> Returns:
    returns = Returns()
    returns.asked(1000, seen_tokens)
    return returns


def test_before_anything_is_known_nobody_is_expected() -> None:
    returns = Returns()
    returns.left(5000, 0.0)
    assert (returns.likelihood, returns.expected_tokens(0.0)) == (0.0, 0.0)


def test_what_is_left_is_expected_back_as_often_as_others_came_back() -> None:
    returns = asked(250)
    returns.left(4000, 100.0)
    assert returns.expected_tokens(100.0) == 1000


def test_who_stays_away_is_expected_less_and_less() -> None:
    returns = asked(1000)
    returns.left(4000, 100.0)
    assert returns.expected_tokens(100.0 + HALF_S) == pytest.approx(2000)
    returns.left(4000, 100.0 + HALF_S)
    assert returns.expected_tokens(100.0 + 2 * HALF_S) == pytest.approx(3000)


def test_who_is_back_is_expected_no_more() -> None:
    returns = asked(1000)
    returns.left(4000, 100.0)
    returns.taken_up(3000, 100.0)
    assert returns.expected_tokens(100.0) == 1000
    returns.taken_up(3000, 100.0)
    assert returns.expected_tokens(100.0) == 0


def test_an_empty_cache_has_nothing_to_come_back_to_but_they_are_as_likely_to_come() -> None:
    returns = asked(500)
    returns.left(4000, 100.0)
    returns.clear()
    assert (returns.expected_tokens(100.0), returns.likelihood) == (0.0, 0.5)


def test_the_likelihood_follows_what_comes_of_late() -> None:
    returns = asked(0)
    for _ in range(300):
        returns.asked(1000, 1000)
    assert returns.likelihood > 0.98
    for _ in range(300):
        returns.asked(1000, 0)
    assert returns.likelihood < 0.02


TOKENS = st.integers(0, 1 << 40)
TIMES = st.floats(-1e9, 1e9)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("asked"), TOKENS, TOKENS),
            st.tuples(st.just("left"), TOKENS, TIMES),
            st.tuples(st.just("taken_up"), TOKENS, TIMES),
            st.tuples(st.just("clear")),
        ),
        max_size=30,
    ),
    TIMES,
)
def test_however_clocks_jump_it_stays_a_number_of_what_was_left(steps: list[tuple[object, ...]], now_s: float) -> None:
    returns = Returns()
    for name, *arguments in steps:
        getattr(returns, str(name))(*arguments)
        assert 0.0 <= returns.likelihood <= 1.0
        expected = returns.expected_tokens(now_s)
        assert math.isfinite(expected)
        assert 0.0 <= expected <= sum(int(str(each[1])) for each in steps if each[0] == "left")


def test_a_prompt_that_no_cache_has_any_more_was_seen_all_the_same() -> None:
    index = PrefixIndex()
    index.clear(1, 2000)
    index.add(1, FIRST)
    index.add(1, SECOND)
    assert index.match(FIRST, 1) == {}
    assert (index.seen(FIRST), index.seen(SECOND)) == (2000, 2000)
    assert index.seen(((1, 1000), (9, 3000))) == 1000
    index.clear(1, 2000)
    assert (index.seen(FIRST), index.seen(SECOND)) == (2000, 2000)


def test_a_prompt_that_was_never_answered_was_not_seen() -> None:
    index = PrefixIndex()
    index.add(1, FIRST)
    index.forget(1, FIRST, 1000)
    assert index.seen(FIRST) == 1000
    index.forget(1, FIRST, 0)
    assert index.seen(FIRST) == 0


def test_what_is_remembered_of_them_is_bounded_and_shrinks_with_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_GONE_LINKS", 50)
    index = PrefixIndex()
    index.clear(1, 100 * 1000)  # a hundred links

    def come(count: int) -> None:
        for _ in range(count):
            come.number += 1  # type: ignore[attr-defined]
            index.add(1, ((come.number, 1000),))  # type: ignore[attr-defined]

    come.number = 0  # type: ignore[attr-defined]
    come(2000)
    assert len(index._gone) == prefixes.GONE_LINKS * 100
    assert index.seen(((1600, 1000),)) == 1000
    assert index.seen(((1400, 1000),)) == 0
    index.clear(1, 10 * 1000)
    come(1000)
    assert len(index._gone) == 50


def test_answers_are_not_remembered_when_they_are_gone() -> None:
    index = PrefixIndex()
    index.clear(1, 1000)
    for _ in range(100):
        index.occupy(1, 500)
    assert len(index._gone) == 0


def test_tiny_prompts_do_not_tell_what_most_tokens_are() -> None:
    returns = Returns()
    for _ in range(20):
        returns.asked(8000, 7500)
    for _ in range(400):
        returns.asked(80, 0)
    assert returns.likelihood > 0.6


def test_no_more_is_left_than_the_cache_can_hold() -> None:
    returns = Returns()
    returns.asked(100, 100)
    for _ in range(10):
        returns.left(9000, 0.0, 16000)
    assert returns.expected_tokens(0.0) == 16000
