"""Who rests for being far slower or failing far more often than its peers: the sick, and never too many."""

from __future__ import annotations

from math import floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.outliers import LEAST_SAMPLES, LONGEST_RESTS, WINDOW_S, Outliers, Recent, Rules, size_class

RULES = Rules()


def begun(recent: Recent, tokens: int, took_s: float, now_s: float, times: int = 1) -> None:
    for number in range(times):
        recent.placed(("at", now_s, number), tokens, now_s - took_s)
        recent.began(("at", now_s, number), now_s)


def group(*took_s: float, tokens: int = 1000, times: int = 20, now_s: float = 100.0) -> dict[str, Recent]:
    """Backends a, b, c … whose first bytes take so long."""
    peers = {chr(ord("a") + place): Recent() for place in range(len(took_s))}
    for recent, each_s in zip(peers.values(), took_s, strict=True):
        begun(recent, tokens, each_s, now_s, times)
    return peers


def ejected(outliers: Outliers, peers: dict[str, Recent], now_s: float = 101.0) -> list[str]:
    return [item.name for item in outliers.judge([peers], now_s)[0]]


def test_one_that_is_far_slower_than_its_peers_rests() -> None:
    found, _ = Outliers(RULES).judge([group(0.2, 0.25, 2.5)], 101.0)
    assert [(item.name, item.rest_s) for item in found] == [("c", 30.0)]
    assert found[0].reason == "first bytes take 11.2 times as long as at its peers"


@pytest.mark.parametrize("took_s", [(0.2, 2.5), (0.2, 0.3, 0.9), (0.01, 0.012, 0.2)])
def test_two_of_a_kind_half_a_difference_or_milliseconds_are_no_reason(took_s: tuple[float, ...]) -> None:
    assert ejected(Outliers(RULES), group(*took_s)) == []


def test_long_prompts_are_no_sign_of_slowness() -> None:
    peers = group(0.2, 0.2, 0.2)
    begun(peers["c"], 100_000, 15.0, 100.0, 40)  # nobody else had such
    assert ejected(Outliers(RULES), peers) == []
    for name in "ab":
        begun(peers[name], 100_000, 1.0, 100.0, 20)  # now others had, and were much faster
    assert ejected(Outliers(RULES), peers) == ["c"]


def test_a_fleet_whose_backends_differ_much_has_no_outliers() -> None:
    assert ejected(Outliers(RULES), group(0.1, 0.4, 1.2, 2.6, 4.0)) == []


def test_two_healthy_peers_that_differ_do_not_hide_a_sick_one() -> None:
    assert ejected(Outliers(RULES), group(0.15, 0.28, 2.6)) == ["c"]


def test_too_few_requests_say_nothing() -> None:
    assert ejected(Outliers(RULES), group(0.2, 0.2, 9.0, times=LEAST_SAMPLES - 1)) == []


def test_what_was_long_ago_says_nothing() -> None:
    assert ejected(Outliers(RULES), group(0.2, 0.2, 9.0), 101.0 + WINDOW_S) == []


def test_a_backend_that_falls_silent_is_found_before_any_time_limit_is_over() -> None:
    peers = group(0.2, 0.2, 0.2)
    outliers = Outliers(RULES)
    for key in range(3):
        peers["c"].placed(key, 1000, 100.5)
    assert ejected(outliers, peers, 101.0) == []
    assert ejected(outliers, peers, 103.0) == ["c"]


def test_a_first_byte_waited_for_in_vain_counts_with_the_time_it_took() -> None:
    peers = group(0.2, 0.2, 0.2, times=LEAST_SAMPLES)
    for key in range(2 * LEAST_SAMPLES):
        peers["c"].placed(key, 1000, 40.0)
        peers["c"].timed_out(key, 100.0)
    assert ejected(Outliers(RULES), peers) == ["c"]


def test_requests_that_leave_before_their_first_byte_say_nothing() -> None:
    peers = group(0.2, 0.2, 0.2)
    for key in range(30):
        peers["c"].placed(key, 1000, 10.0)
        peers["c"].gone(key)
    assert ejected(Outliers(RULES), peers) == []


def failing(*ratios: float, requests: int = 20) -> dict[str, Recent]:
    peers = {chr(ord("a") + place): Recent() for place in range(len(ratios))}
    for recent, ratio in zip(peers.values(), ratios, strict=True):
        for number in range(requests):
            recent.ended(number < ratio * requests, 100.0)
    return peers


def test_one_that_fails_far_more_often_than_its_peers_rests() -> None:
    assert ejected(Outliers(RULES), failing(0.0, 0.05, 0.5)) == ["c"]
    assert ejected(Outliers(RULES), failing(0.0, 0.0, 0.2)) == []  # not so many
    assert ejected(Outliers(RULES), failing(0.5, 0.45, 0.6)) == []  # all fail: it is not the backend
    assert ejected(Outliers(RULES), failing(0.0, 0.0, 1.0, requests=9)) == []  # a few


def test_each_further_rest_is_longer_and_calm_makes_the_next_one_shorter() -> None:
    outliers = Outliers(RULES)
    now_s, rests = 0.0, []
    for _ in range(LONGEST_RESTS + 2):
        found, _ = outliers.judge([failing_at(now_s)], now_s)
        rests.append(found[0].rest_s)
        now_s += rests[-1]
    assert rests == [30.0 * times for times in [*range(1, LONGEST_RESTS + 1), LONGEST_RESTS, LONGEST_RESTS]]
    outliers.judge([], now_s)
    for calm in range(1, 5):
        outliers.judge([group(0.2, 0.2, 0.2, now_s=now_s)], now_s + 30.0 * calm)
    found, _ = outliers.judge([failing_at(now_s + 130.0)], now_s + 130.0)
    assert found[0].rest_s == 30.0 * (LONGEST_RESTS - 3)


def failing_at(now_s: float) -> dict[str, Recent]:
    peers = {name: Recent() for name in "abc"}
    for name, recent in peers.items():
        for _ in range(20):
            recent.ended(name == "c", now_s)
    return peers


def test_what_is_always_slow_is_taken_for_slow_in_the_end_and_left_to_its_price() -> None:
    outliers = Outliers(RULES)
    now_s, ejections = 0.0, 0
    for _ in range(60):
        now_s += 60.0
        peers = group(0.2, 0.2, 2.0, now_s=now_s)
        if outliers.until_s("c") is not None:
            del peers["c"]
            peers["c"] = Recent()
        ejections += len(ejected(outliers, peers, now_s))
    assert 1 <= ejections <= 4
    now_s += 60.0
    assert ejected(outliers, group(0.2, 0.2, 40.0, now_s=now_s), now_s) == ["c"]  # but sick on top of it is sick


def test_who_rests_is_called_back_when_others_go_away() -> None:
    outliers = Outliers(RULES)
    peers = group(0.2, 0.25, 2.5)
    assert ejected(outliers, peers) == ["c"]
    del peers["a"]
    assert outliers.judge([peers], 102.0) == ([], ["c"])
    assert outliers.until_s("c") is None


def test_a_rest_ends_by_itself() -> None:
    outliers = Outliers(RULES)
    assert ejected(outliers, group(0.2, 0.25, 2.5)) == ["c"]
    assert outliers.judge([], 130.0) == ([], [])
    assert outliers.judge([], 131.0) == ([], ["c"])
    assert outliers.ejections == {"c": 1}


def test_size_classes_hold_prompts_that_are_alike() -> None:
    assert size_class(0) == size_class(511)
    assert size_class(512) != size_class(511)
    assert size_class(1024) == size_class(2047) != size_class(2048)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(0, 60), max_size=12), min_size=1, max_size=7),
    st.floats(0, 1),
    st.lists(st.floats(0, 100), max_size=8),
)
def test_never_more_rest_than_may_whatever_happens(
    took_s: list[list[float]], most_ratio: float, pauses_s: list[float]
) -> None:
    outliers = Outliers(Rules(most_ratio=most_ratio))
    now_s = 100.0
    for pause_s in [0.0, *pauses_s]:
        now_s += pause_s
        peers = {str(place): Recent() for place in range(len(took_s))}
        for recent, times in zip(peers.values(), took_s, strict=True):
            for number, each_s in enumerate(times):
                begun(recent, 100 << number % 3, each_s, now_s, 3)
                recent.ended(each_s > 30, now_s)
        outliers.judge([peers], now_s)
        resting = [name for name in peers if outliers.until_s(name) is not None]
        assert len(resting) <= (floor(most_ratio * len(peers)) if len(peers) >= 3 else 0)


@given(st.floats(0.01, 30), st.lists(st.floats(0.75, 1.3), min_size=3, max_size=8))
def test_backends_that_are_alike_never_rest(usual_s: float, factors: list[float]) -> None:
    assert ejected(Outliers(RULES), group(*(usual_s * factor for factor in factors))) == []


@given(st.integers(3, 12), st.floats(0.2, 5), st.floats(8, 100))
def test_one_sick_backend_is_found_among_any_number(count: int, usual_s: float, factor: float) -> None:
    times = [usual_s] * (count - 1) + [usual_s * factor]
    assert ejected(Outliers(RULES), group(*times)) == [chr(ord("a") + count - 1)]
