"""What fits where: the arithmetic of windows, budgets and floors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import FittingSettings
from gateway.guard.fit import fit
from gateway.types import Ask, Count, CountKind, Dialect, Fits, Offer, Overflow, TextPrompts, Verdict

SETTINGS = FittingSettings(output_floor_tokens=1024, comfortable_output_tokens=4096)


def ask(dialect: Dialect = Dialect.CHAT, **fields: Any) -> Ask:
    return Ask(dialect, "/v1/x", "m", TextPrompts(("x",)), b"{}", {}, **fields)


def exact(tokens: int) -> Count:
    return Count(tokens, tokens, CountKind.EXACT, "local")


def estimate(tokens: int) -> Count:
    return Count(tokens, tokens, CountKind.ESTIMATE, "estimate")


def upper_bound(tokens: int) -> Count:
    return Count(tokens, tokens, CountKind.UPPER_BOUND, "estimate")


def offers(verdict: Verdict) -> tuple[Offer, ...]:
    assert isinstance(verdict, Fits), verdict
    return verdict.offers


def names(verdict: Verdict) -> list[str]:
    return [offer.backend for offer in offers(verdict)]


# --- budgets


def test_a_chat_without_a_budget_keeps_none() -> None:
    assert offers(fit(ask(), exact(100), {"a": 8192}, SETTINGS)) == (Offer("a", 8192, None, clamped=False),)


def test_a_budget_that_fits_exactly_is_not_clamped() -> None:
    (offer,) = offers(fit(ask(output_tokens=2000), exact(6192), {"a": 8192}, SETTINGS))
    assert offer == Offer("a", 8192, 2000, clamped=False)


def test_a_budget_one_too_large_is_clamped_to_what_is_left() -> None:
    (offer,) = offers(fit(ask(output_tokens=2001), exact(6192), {"a": 8192}, SETTINGS))
    assert offer == Offer("a", 8192, 2000, clamped=True)


def test_a_budget_is_not_clamped_below_the_floor_but_overflows() -> None:
    windows = {"a": 8192}
    (offer,) = offers(fit(ask(output_tokens=4000), exact(8192 - 1024), windows, SETTINGS))
    assert offer.output_tokens == 1024
    verdict = fit(ask(output_tokens=4000), exact(8192 - 1023), windows, SETTINGS)
    assert verdict == Overflow(8192 - 1023, 4000, 8192, 8192 - 1024)


def test_a_budget_below_the_floor_is_its_own_floor() -> None:
    windows = {"a": 8192}
    assert names(fit(ask(output_tokens=10), exact(8182), windows, SETTINGS)) == ["a"]
    assert fit(ask(output_tokens=10), exact(8183), windows, SETTINGS) == Overflow(8183, 10, 8192, 8182)


def test_a_floor_for_the_model_overrides_the_settings() -> None:
    assert names(fit(ask(), exact(8192 - 8), {"a": 8192}, SETTINGS, floor_tokens=8)) == ["a"]
    assert isinstance(fit(ask(), exact(8192 - 7), {"a": 8192}, SETTINGS, floor_tokens=8), Overflow)


def test_a_floor_of_nothing_still_leaves_one_token_to_generate() -> None:
    assert names(fit(ask(), exact(8191), {"a": 8192}, SETTINGS, floor_tokens=0)) == ["a"]
    assert fit(ask(), exact(8192), {"a": 8192}, SETTINGS, floor_tokens=0) == Overflow(8192, 1, 8192, 8191)


def test_a_window_smaller_than_the_floor_is_usable_by_half() -> None:
    assert names(fit(ask(), exact(256), {"a": 512}, SETTINGS)) == ["a"]
    assert fit(ask(), exact(257), {"a": 512}, SETTINGS) == Overflow(257, 256, 512, 256)


def test_min_tokens_raise_the_floor() -> None:
    request = ask(output_tokens=6000, min_output_tokens=3000)
    assert offers(fit(request, exact(5192), {"a": 8192}, SETTINGS))[0].output_tokens == 3000
    assert isinstance(fit(request, exact(5193), {"a": 8192}, SETTINGS), Overflow)


def test_min_tokens_beyond_the_window_are_left_to_the_backend_to_refuse() -> None:
    assert names(fit(ask(min_output_tokens=9000), exact(10), {"a": 8192}, SETTINGS)) == ["a"]


def test_embeddings_have_no_output_and_no_floor() -> None:
    request = ask(Dialect.POOLING)
    assert offers(fit(request, exact(2048), {"a": 2048}, SETTINGS)) == (Offer("a", 2048, 0, clamped=False),)


def test_embeddings_beyond_every_window_are_the_largest_backends_to_judge() -> None:
    windows = {"a": 2048, "b": 4096}  # vLLM with chunked processing takes more than its window, and does not say so
    assert offers(fit(ask(Dialect.POOLING), exact(9000), windows, SETTINGS)) == (Offer("b", 4096, 0, clamped=False),)


def test_a_completion_without_a_budget_wants_sixteen_tokens() -> None:
    request = ask(Dialect.COMPLETIONS)
    assert offers(fit(request, exact(2032), {"a": 2048}, SETTINGS)) == (Offer("a", 2048, 16, clamped=False),)
    assert fit(request, exact(2033), {"a": 2048}, SETTINGS) == Overflow(2033, 16, 2048, 2032)


def test_several_choices_need_no_larger_window() -> None:
    windows = {"a": 8192}
    one = fit(ask(output_tokens=2000), exact(6192), windows, SETTINGS)
    assert fit(ask(output_tokens=2000, n=8), exact(6192), windows, SETTINGS) == one


def test_truncation_by_the_backend_bounds_the_prompt() -> None:
    windows = {"a": 8192}
    assert names(fit(ask(truncate_prompt_tokens=4000), exact(100_000), windows, SETTINGS)) == ["a"]
    to_the_brim = ask(truncate_prompt_tokens=-1, output_tokens=1)
    assert offers(fit(to_the_brim, exact(100_000), windows, SETTINGS))[0].output_tokens == 1
    assert names(fit(ask(Dialect.OTHER, truncate_prompt_tokens=-1), exact(100_000), windows, SETTINGS)) == ["a"]


def test_truncation_that_leaves_less_than_the_floor_overflows() -> None:
    verdict = fit(ask(truncate_prompt_tokens=-1), exact(100_000), {"a": 8192}, SETTINGS)
    assert verdict == Overflow(8191, 1024, 8192, 8192 - 1024)


def test_there_must_be_a_window() -> None:
    with pytest.raises(ValueError, match="no windows"):
        fit(ask(), exact(1), {}, SETTINGS)


# --- order


def test_the_smallest_roomy_window_comes_first() -> None:
    windows = {"huge": 131072, "small": 8192, "middle": 32768}
    assert names(fit(ask(), exact(100), windows, SETTINGS)) == ["small", "middle", "huge"]


def test_a_tight_window_comes_after_roomy_ones() -> None:
    windows = {"small": 8192, "large": 32768}
    assert names(fit(ask(), exact(4096), windows, SETTINGS)) == ["small", "large"]
    assert names(fit(ask(), exact(4097), windows, SETTINGS)) == ["large", "small"]


def test_a_small_budget_needs_no_more_room_than_itself() -> None:
    assert names(fit(ask(output_tokens=8), exact(8184), {"small": 8192, "large": 32768}, SETTINGS))[0] == "small"


def test_among_tight_windows_the_one_with_most_room_comes_first() -> None:
    assert names(fit(ask(), exact(5000), {"a": 8000, "b": 8200, "c": 8100}, SETTINGS)) == ["b", "c", "a"]


def test_a_window_that_is_too_small_is_not_offered() -> None:
    assert names(fit(ask(), exact(20_000), {"small": 8192, "large": 32768}, SETTINGS)) == ["large"]


def test_an_overflow_tells_of_the_largest_window() -> None:
    verdict = fit(ask(output_tokens=4096), exact(36864), {"small": 8192, "large": 32768}, SETTINGS)
    assert verdict == Overflow(36864, 4096, 32768, 31744)


# --- counts that are not exact


@pytest.mark.parametrize("count", [estimate(40_000), upper_bound(40_000)])
def test_an_uncertain_count_never_rejects(count: Count) -> None:
    windows = {"small": 8192, "b": 32768, "a": 32768}
    verdict = fit(ask(output_tokens=500), count, windows, SETTINGS)
    assert offers(verdict) == (Offer("a", 32768, 500, clamped=False), Offer("b", 32768, 500, clamped=False))


@pytest.mark.parametrize("count", [estimate(40_000), upper_bound(40_000)])
def test_a_budget_beyond_the_window_is_clamped_even_when_the_prompt_is_unsure(count: Count) -> None:
    (offer,) = offers(fit(ask(output_tokens=40_000), count, {"a": 32768}, SETTINGS))
    assert offer == Offer("a", 32768, 16384, clamped=True)


def test_an_upper_bound_that_fits_accepts_and_clamps_to_what_is_surely_left() -> None:
    (offer,) = offers(fit(ask(output_tokens=8000), upper_bound(4192), {"a": 8192}, SETTINGS))
    assert offer == Offer("a", 8192, 4000, clamped=True)


def test_a_clamp_by_an_estimate_leaves_a_margin_for_its_error() -> None:
    (offer,) = offers(fit(ask(output_tokens=8000), estimate(4000), {"a": 8192}, SETTINGS))
    assert offer == Offer("a", 8192, 8192 - 4000 - 500, clamped=True)


def test_the_margin_does_not_cut_below_the_floor() -> None:
    (offer,) = offers(fit(ask(output_tokens=8000), estimate(7000), {"a": 8192}, SETTINGS))
    assert offer.output_tokens == 1024


def test_an_estimate_near_the_edge_prefers_the_larger_window() -> None:
    windows = {"small": 8192, "large": 32768}
    assert names(fit(ask(), exact(4000), windows, SETTINGS)) == ["small", "large"]
    assert names(fit(ask(), estimate(4000), windows, SETTINGS)) == ["large", "small"]


# --- properties

WINDOWS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 200_000), min_size=1)
ASKS = st.builds(
    ask,
    st.sampled_from([Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.MESSAGES, Dialect.OTHER]),
    output_tokens=st.none() | st.integers(1, 300_000),
    n=st.integers(1, 4),
    truncate_prompt_tokens=st.none() | st.integers(-1, 200_000),
    min_output_tokens=st.integers(0, 3000),
)
FLOORS = st.integers(0, 5000)
PROMPTS = st.integers(0, 250_000)


def prompt_upstream(request: Ask, tokens: int, window: int) -> int:
    if request.truncate_prompt_tokens is None:
        return tokens
    if request.truncate_prompt_tokens >= 0:
        return min(tokens, request.truncate_prompt_tokens)
    return min(tokens, window - (request.dialect is not Dialect.OTHER))


@given(ASKS, PROMPTS, WINDOWS, FLOORS)
def test_prompt_and_output_of_every_offer_fit_its_window(
    request: Ask, tokens: int, windows: dict[str, int], floor: int
) -> None:
    verdict = fit(request, exact(tokens), windows, SETTINGS, floor)
    for offer in verdict.offers if isinstance(verdict, Fits) else ():
        assert offer.window_tokens == windows[offer.backend]
        least = 0 if request.dialect is Dialect.OTHER else 1
        output = least if offer.output_tokens is None else offer.output_tokens
        assert output >= least
        assert prompt_upstream(request, tokens, offer.window_tokens) + output <= offer.window_tokens


@given(ASKS, PROMPTS, WINDOWS, FLOORS)
def test_a_budget_is_clamped_only_when_it_does_not_fit_and_never_below_the_floor(
    request: Ask, tokens: int, windows: dict[str, int], floor: int
) -> None:
    verdict = fit(request, exact(tokens), windows, SETTINGS, floor)
    for offer in verdict.offers if isinstance(verdict, Fits) else ():
        left = offer.window_tokens - prompt_upstream(request, tokens, offer.window_tokens)
        asked = 16 if request.dialect is Dialect.COMPLETIONS else None
        asked = request.output_tokens or asked
        if request.dialect is Dialect.OTHER or asked is None:
            assert (offer.output_tokens, offer.clamped) == (None, False)
            continue
        assert offer.clamped == (asked > left)
        assert offer.output_tokens == min(asked, left)
        assert offer.output_tokens >= min(floor, asked, max(1, offer.window_tokens // 2))


@given(ASKS, PROMPTS, WINDOWS, FLOORS)
def test_a_refusal_means_that_no_window_would_do(
    request: Ask, tokens: int, windows: dict[str, int], floor: int
) -> None:
    verdict = fit(request, exact(tokens), windows, SETTINGS, floor)
    if isinstance(verdict, Fits):
        return
    largest = max(windows.values())
    assert verdict.window_tokens == largest
    assert verdict.prompt_tokens == prompt_upstream(request, tokens, largest)
    assert verdict.prompt_tokens > verdict.limit_tokens
    assert all(
        isinstance(fit(request, exact(tokens), {"x": window}, SETTINGS, floor), Overflow) for window in windows.values()
    )


@given(ASKS, PROMPTS, WINDOWS, FLOORS)
def test_every_window_that_holds_the_request_is_offered_once(
    request: Ask, tokens: int, windows: dict[str, int], floor: int
) -> None:
    alone = {
        name
        for name, window in windows.items()
        if isinstance(fit(request, exact(tokens), {name: window}, SETTINGS, floor), Fits)
    }
    verdict = fit(request, exact(tokens), windows, SETTINGS, floor)
    offered = names(verdict) if isinstance(verdict, Fits) else []
    assert sorted(offered) == sorted(alone)


@given(ASKS, PROMPTS, WINDOWS, st.sampled_from(CountKind), st.randoms())
def test_the_order_of_offers_does_not_depend_on_the_order_of_backends(
    request: Ask, tokens: int, windows: dict[str, int], kind: CountKind, random: Any
) -> None:
    count = Count(tokens, tokens, kind, "x")
    shuffled = list(windows.items())
    random.shuffle(shuffled)
    assert fit(request, count, windows, SETTINGS) == fit(request, count, dict(shuffled), SETTINGS)


@given(ASKS, PROMPTS, WINDOWS, st.sampled_from([CountKind.ESTIMATE, CountKind.UPPER_BOUND]))
def test_an_uncertain_count_always_gets_an_offer_within_the_window(
    request: Ask, tokens: int, windows: dict[str, int], kind: CountKind
) -> None:
    verdict = fit(request, Count(tokens, tokens, kind, "x"), windows, SETTINGS)
    for offer in offers(verdict):
        if offer.output_tokens is not None:
            assert 1 <= offer.output_tokens <= max(offer.window_tokens, 16)
