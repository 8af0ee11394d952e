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


def test_what_every_request_takes_is_told_from_what_its_tokens_take() -> None:
    """A slow proxy before a fast server: the delay is the base, not the rate."""
    rates, chance = Rates(), random.Random(1)
    for _ in range(60):
        tokens = chance.randint(100, 20_000)
        rates.prefilled(tokens, 2.0 + tokens / 10_000 + chance.uniform(0, 0.01))
    assert rates.first_s == pytest.approx(2.0, rel=0.05)
    assert (rates.first_tokens, rates.base_s) == (0, rates.first_s)


def test_prompts_of_one_size_tell_how_long_that_size_takes() -> None:
    rates = Rates()
    for _ in range(20):
        rates.prefilled(800, 2.1)
    assert (rates.prefill_s, rates.first_s, rates.first_tokens) == (None, 2.1, 800)
    assert rates.base_s == pytest.approx(2.0)


def test_what_takes_no_longer_than_its_tokens_has_no_base_and_none_is_negative() -> None:
    rates = Rates()
    for _ in range(20):
        rates.prefilled(8000, 0.5)
    assert (rates.first_s, rates.base_s) == (0.5, 0.0)
    rates = Rates()
    for tokens in (1000, 2000, 3000, 4000, 5000) * 6:
        rates.prefilled(tokens, max(0.01, tokens / 1000 - 0.9))
    assert rates.prefill_s is not None
    assert (rates.first_s, rates.base_s) == (0.0, 0.0)


def test_three_requests_tell_nothing_of_the_base_and_outliers_no_more() -> None:
    rates = Rates()
    for _ in range(3):
        rates.prefilled(100, 0.1)
    assert rates.first_s is None
    for took_s in (0.1, 60.0, 0.1, 0.1, 90.0, 0.1, 0.1, 30.0):
        rates.prefilled(100, took_s)
    assert rates.first_s == 0.1


def test_waiting_in_the_servers_queue_is_not_taken_for_a_delay() -> None:
    """Where the queue is seen, such requests do not count; where it is not, they may be three of four."""
    rates = Rates()
    for _ in range(8):
        rates.prefilled(100, 0.1)
    for _ in range(40):
        rates.prefilled(100, 5.0, queued=True)
    assert rates.first_s == 0.1
    for number in range(40):
        rates.prefilled(100, 5.0 if number % 4 else 0.1)
    assert rates.first_s == 0.1


def test_a_delay_is_seen_within_a_dozen_requests_and_so_is_its_end() -> None:
    rates = Rates()
    for took_s in (0.1, 3.0, 0.1):
        for _ in range(12):
            rates.prefilled(100, took_s)
        assert rates.first_s == took_s


def test_what_is_known_is_believed_less_while_others_are_preferred_but_not_while_nobody_asks() -> None:
    rates = Rates()
    assert rates.trust(1000.0, 1000.0) == 1.0
    assert not rates.sent(100.0, 50.0)
    assert rates.trust(109.0, 500.0) == 1.0
    assert rates.trust(10_000.0, 57.0) == 1.0
    assert rates.trust(121.0, 500.0) == 0.25
    assert rates.trust(10_000.0, 58.0) == 0.5
    assert rates.sent(121.0, 500.0)
    assert rates.trust(121.0, 500.0) == 1.0
    assert not rates.sent(122.0, 501.0)


def slow() -> Rates:
    rates, chance = Rates(), random.Random(1)
    for _ in range(40):
        tokens = chance.randint(100, 4000)
        rates.prefilled(tokens, 2.0 + tokens / 1000)
        rates.generated(100, 10.0)
    return rates


def test_a_trial_that_is_far_quicker_has_the_backend_learned_anew() -> None:
    rates = slow()
    rates.prefilled(1000, 0.3, trial=True)
    rates.generated(100, 1.0, trial=True)
    assert (rates.prefill_s, rates.first_s, rates.output_s) == (None, None, 0.01)
    for _ in range(3):
        rates.prefilled(1000, 0.3)
    assert rates.first_s == 0.3


def test_a_trial_that_is_quicker_by_the_delay_alone_leaves_the_rate() -> None:
    rates = slow()
    before_s = rates.prefill_s
    rates.prefilled(1000, 1.1, trial=True)
    assert (rates.prefill_s, rates.first_s) == (before_s, None)
    for tokens in (1000, 1010, 1005, 1000):
        rates.prefilled(tokens, 1.1)
    assert (rates.prefill_s, rates.first_s) == (before_s, pytest.approx(0.1, abs=0.02))


def test_a_whole_answer_in_less_time_than_a_first_byte_should_take_says_so_too() -> None:
    rates = slow()
    rates.tried(1000, 2.0)
    assert rates.first_s is not None
    rates.tried(1000, 1.0)
    assert rates.first_s is None


def test_a_trial_that_is_as_slow_as_ever_changes_nothing() -> None:
    rates = slow()
    before = (rates.prefill_s, rates.first_s)
    rates.prefilled(1000, 3.0, trial=True)
    rates.generated(100, 9.0, trial=True)
    assert (rates.prefill_s, rates.first_s) == pytest.approx(before)
    assert rates.output_s == pytest.approx(0.1, rel=0.02)
