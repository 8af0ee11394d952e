"""Learned lengths of answers: right for those that ended, and not fooled by those that were cut off."""

from __future__ import annotations

import random

import pytest

from gateway.config import PlacingSettings
from gateway.routing.lengths import OutputLengths
from gateway.routing.need import need_for
from gateway.types import Offer


def test_nothing_is_said_before_there_is_enough_to_go_by() -> None:
    lengths = OutputLengths()
    for _ in range(25):
        lengths.note("m", "", 100, True)
    assert lengths.expected("m", "", 0.9) is None
    for _ in range(10):
        lengths.note("m", "", 100, True)
    assert lengths.expected("m", "", 0.9) == pytest.approx(100, rel=0.2)
    assert lengths.expected("other", "", 0.9) is None


def test_the_quantile_is_close_and_never_far_below() -> None:
    chance = random.Random(1)
    lengths = OutputLengths()
    drawn = [int(chance.lognormvariate(6, 1)) + 1 for _ in range(2000)]
    for tokens in drawn:
        lengths.note("m", "", tokens, True)
    true = sorted(drawn[-500:])[450]
    assert 0.85 * true <= lengths.expected("m", "", 0.9) <= 1.4 * true


def test_answers_cut_off_early_do_not_make_answers_look_short() -> None:
    """All would get 1,000 tokens long; two thirds have a budget of 10."""
    lengths = OutputLengths()
    for number in range(300):
        lengths.note("m", "", 1000 if number % 3 == 0 else 10, number % 3 == 0)
    assert lengths.expected("m", "", 0.9) == pytest.approx(1000, rel=0.2)


def test_if_all_are_cut_off_nothing_is_known() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.note("m", "", 50, False)
    assert lengths.expected("m", "", 0.9) is None


def test_old_answers_fade() -> None:
    lengths = OutputLengths()
    for tokens, times in ((5000, 1000), (50, 3000)):
        for _ in range(times):
            lengths.note("m", "", tokens, True)
    assert lengths.expected("m", "", 0.9) == pytest.approx(50, rel=0.2)


def test_a_flow_with_answers_of_its_own_is_known_by_them() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.note("m", "chatty", 4000, True)
        lengths.note("m", "terse", 20, True)
    assert lengths.expected("m", "terse", 0.9) == pytest.approx(20, rel=0.2)
    assert lengths.expected("m", "new", 0.9) == pytest.approx(4000, rel=0.2)
    assert lengths.learned(0.9) == {"m": lengths.expected("m", "", 0.9)}


def test_what_is_learned_is_bounded_by_budget_and_window() -> None:
    settings = PlacingSettings()
    assert need_for(Offer("a", 10_000, 500, False), 100, 1, settings, 2000).output_tokens == 500
    assert need_for(Offer("a", 10_000, 32_000, False), 100, 1, settings, 2000).output_tokens == 2000
    assert need_for(Offer("a", 1000, None, False), 900, 1, settings, 2000).output_tokens == 100


def test_strictly_all_of_the_budget_is_reserved() -> None:
    settings = PlacingSettings(reserve="budget")
    assert need_for(Offer("a", 40_000, 32_000, False), 100, 1, settings, 2000).output_tokens == 32_000
    assert need_for(Offer("a", 40_000, None, False), 100, 1, settings, 2000).output_tokens == 39_900
