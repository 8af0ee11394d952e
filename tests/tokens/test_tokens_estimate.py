"""An estimate follows the size of the text, and learns from what backends report."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens.estimate import Estimator, Size, size_of
from gateway.types import ChatPrompt, TextPrompts


def test_text_is_measured_in_utf8_and_media_apart() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "é" * 10}, image]},
        {"role": "assistant", "content": "abc", "reasoning": "de", "tool_calls": [{"function": {"arguments": "f"}}]},
    ]
    size = size_of(ChatPrompt(messages))
    assert 26 <= size.prompts_bytes[0] <= 40
    assert size.media == 1
    assert size_of(TextPrompts(("abc", "é\ud83d"))).prompts_bytes == (3, 5)


def test_tools_and_documents_count() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 500}}
    assert size_of(ChatPrompt([], tools=[tool])).prompts_bytes[0] > 500
    assert size_of(ChatPrompt([], documents=[{"text": "d" * 500}])).prompts_bytes[0] > 500


def test_an_estimate_is_never_zero_and_each_text_has_its_own() -> None:
    assert Estimator().estimate(Size((0,))) == (1,)
    small, large = Estimator().estimate(Size((100, 1000)))
    assert small < large


@given(st.floats(0.05, 1.0), st.lists(st.integers(1000, 100_000), min_size=40, max_size=60))
def test_it_comes_near_any_true_ratio(ratio: float, sizes: list[int]) -> None:
    estimator = Estimator()
    for text_bytes in sizes:
        estimator.learn(Size((text_bytes,), messages=3), round(text_bytes * ratio) + 15)
    (tokens,) = estimator.estimate(Size((10_000,), messages=3))
    assert abs(tokens - (10_000 * ratio + 15)) <= 0.02 * tokens + 1


def test_many_observations_of_one_old_ratio_do_not_run_away() -> None:
    estimator = Estimator()
    for _ in range(1000):  # all counted before the first was reported
        estimator.learn(Size((1000,)), 500)
    assert estimator.tokens_per_byte == 0.5


def test_media_short_texts_and_absurd_reports_teach_nothing() -> None:
    estimator = Estimator()
    before = estimator.tokens_per_byte
    for size, tokens in ((Size((5000,), media=1), 9000), (Size((50,)), 90), (Size((5000,)), 1), (Size((500,)), 90_000)):
        estimator.learn(size, tokens)
    assert (estimator.tokens_per_byte, estimator.observations) == (before, 0)
