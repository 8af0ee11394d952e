"""How much output is reserved for a request."""

from __future__ import annotations

import pytest

from gateway.config import PlacingSettings
from gateway.routing.need import budget_tokens, need_for
from gateway.types import Need, Offer

SETTINGS = PlacingSettings(expected_output_tokens=1000)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(None, 1000), (1, 1), (0, 0), (1000, 1000), (4000, 4000), (4001, 1000), (100_000, 1000)],
)
def test_moderate_budgets_are_reserved_in_full_and_others_as_expected(budget: int | None, expected: int) -> None:
    assert need_for(Offer("a", 100_000, budget, False), 500, 2, SETTINGS) == Need(500, expected, 2)


def test_no_more_is_reserved_than_the_window_leaves() -> None:
    offer = Offer("a", 4096, None, False)
    assert need_for(offer, 4000, 1, SETTINGS).output_tokens == 96
    assert need_for(offer, 5000, 0, SETTINGS) == Need(5000, 0, 1)


def test_the_budget_is_bounded_by_the_window() -> None:
    assert budget_tokens(Offer("a", 4096, None, False), 4000) == 96
    assert budget_tokens(Offer("a", 4096, 10, False), 4000) == 10
    assert budget_tokens(Offer("a", 4096, 200, False), 4000) == 96
    assert budget_tokens(Offer("a", 4096, 10, False), 5000) == 0


def test_blocks_of_several_sequences_share_the_prompt() -> None:
    assert Need(32, 16).blocks(16) == 3
    assert Need(40, 8, 3).blocks(16) == 2 + 3
    assert Need(0, 0).blocks(16) == 0
