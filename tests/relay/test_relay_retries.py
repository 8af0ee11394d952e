"""Retries are a share of the requests."""

from __future__ import annotations

from gateway.relay.retries import AT_ONCE, RetryBudget


def test_beyond_the_first_few_a_share_of_the_requests_may_be_repeated() -> None:
    budget = RetryBudget(0.2)
    assert sum(budget.spend() for _ in range(200)) == AT_ONCE
    repeated = 0
    for _ in range(1000):
        budget.earn()
        repeated += budget.spend()
    assert 190 <= repeated <= 200
    assert budget.denied == 200 - AT_ONCE + 1000 - repeated


def test_nothing_is_saved_up_beyond_the_first_few() -> None:
    budget = RetryBudget(0.2)
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.spend() for _ in range(200)) == AT_ONCE


def test_a_share_of_zero_repeats_nothing() -> None:
    budget = RetryBudget(0.0)
    budget.earn()
    assert not budget.spend()
