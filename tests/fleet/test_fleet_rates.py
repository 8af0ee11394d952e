"""Learned rates of a backend."""

from __future__ import annotations

import random

import pytest

from gateway.fleet.rates import Rates


def test_the_rate_is_parted_from_what_every_request_takes() -> None:
    rates, chance = Rates(), random.Random(1)
    for _ in range(60):
        tokens = chance.randint(100, 20_000)
        rates.prefilled(tokens, 0.05 + tokens / 10_000 + chance.uniform(0, 0.01))
    assert rates.prefill_s == pytest.approx(1 / 10_000, rel=0.05)


def test_nothing_is_told_too_early_or_from_prompts_of_one_length() -> None:
    rates = Rates()
    for _ in range(4):
        rates.prefilled(1000, 0.1)
    assert rates.prefill_s is None
    for _ in range(20):
        rates.prefilled(1000, 0.1)
    assert rates.prefill_s is None


def test_it_follows_a_backend_that_gets_slower() -> None:
    rates, chance = Rates(), random.Random(1)
    for rate in (10_000, 1000):
        for _ in range(150):
            tokens = chance.randint(100, 8000)
            rates.prefilled(tokens, tokens / rate)
    assert rates.prefill_s == pytest.approx(1 / 1000, rel=0.1)


def test_longer_prompts_that_took_less_say_nothing() -> None:
    rates = Rates()
    for tokens in range(100, 3000, 100):
        rates.prefilled(tokens, 10 - tokens / 1000)
    assert rates.prefill_s is None


def test_a_client_that_reads_slowly_is_not_a_slow_backend() -> None:
    rates = Rates()
    for _ in range(50):
        rates.generated(100, 1.0)
    rates.generated(100, 600.0)
    assert rates.output_s == pytest.approx(0.01, rel=0.4)
    for _ in range(60):
        rates.generated(100, 2.0)
    assert rates.output_s == pytest.approx(0.02, rel=0.1)


def test_nonsense_is_left_out() -> None:
    rates = Rates()
    rates.prefilled(0, 1.0)
    rates.prefilled(10, -1.0)
    rates.generated(2, 1.0)
    rates.generated(100, 0.0)
    assert (rates.prefill_s, rates.output_s) == (None, None)


def test_another_process_is_learned_anew() -> None:
    rates = Rates()
    rates.generated(100, 1.0)
    rates.forget()
    assert rates.output_s is None
