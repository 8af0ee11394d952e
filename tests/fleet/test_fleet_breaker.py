"""The breaker: what opens it, who may try, what closes it."""

from __future__ import annotations

from gateway.fleet.breaker import Breaker, BreakerState


def opened() -> Breaker:
    breaker = Breaker(failures_to_open=3, reopen_after_s=5.0)
    for _ in range(3):
        breaker.failed(100.0)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_starts_the_count_anew() -> None:
    breaker = Breaker(3, 5.0)
    assert [breaker.failed(0.0), breaker.failed(0.0)] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(0.0), breaker.failed(0.0), breaker.failed(0.0)] == [False, False, True]
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.accepts(4.9)


def test_after_its_rest_one_request_may_try() -> None:
    breaker = opened()
    assert breaker.state(105.0) is BreakerState.HALF_OPEN
    assert breaker.accepts(105.0)
    breaker.placed("trial", 105.0)
    assert not breaker.accepts(105.0)
    assert breaker.succeeded()
    assert breaker.state(105.0) is BreakerState.CLOSED
    assert breaker.accepts(105.0)


def test_a_failed_trial_means_another_rest() -> None:
    breaker = opened()
    breaker.placed("trial", 106.0)
    assert breaker.failed(107.0)
    assert breaker.state(111.9) is BreakerState.OPEN
    assert breaker.accepts(112.0)


def test_a_trial_whose_client_left_makes_way_for_another() -> None:
    breaker = opened()
    breaker.placed("trial", 106.0)
    breaker.released("other")
    assert not breaker.accepts(106.0)
    breaker.released("trial")
    assert breaker.accepts(106.0)


def test_many_requests_that_fail_at_once_do_not_prolong_the_rest() -> None:
    breaker = opened()
    for _ in range(20):
        assert not breaker.failed(104.0)
    assert breaker.accepts(105.0)


def test_a_request_of_before_that_succeeds_closes_it() -> None:
    breaker = opened()
    assert breaker.succeeded()
    assert breaker.accepts(100.0)


def test_stragglers_of_before_neither_end_a_trial_nor_count_once_it_is_closed() -> None:
    """Requests that were placed before it opened fail one by one, minutes later: each at its own timeout."""
    breaker = opened()
    breaker.placed("trial", 106.0)
    assert not breaker.failed(107.0, placed_s=90.0)
    assert not breaker.accepts(107.0)  # the trial goes on, and is the only one
    assert breaker.succeeded()
    for late_s in (110.0, 120.0, 130.0, 140.0):
        assert not breaker.failed(late_s, placed_s=99.0)
    assert breaker.state(140.0) is BreakerState.CLOSED


def test_failures_of_requests_placed_since_open_it_as_ever() -> None:
    breaker = opened()
    breaker.placed("trial", 106.0)
    assert breaker.failed(107.0, placed_s=106.0)  # the trial itself
    breaker.placed("next", 112.0)
    breaker.succeeded()
    assert [breaker.failed(120.0, placed_s=119.0) for _ in range(3)] == [False, False, True]
