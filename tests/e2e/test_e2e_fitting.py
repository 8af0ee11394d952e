"""Prompts at the edges of the windows, output budgets that do not fit, and the refusal that clients recognise."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from e2e_backends import Backends
from e2e_gateway import Gateway, serving

FLOOR_TOKENS = 1024  # the default of fitting.output_floor_tokens
OVERFLOW = (
    "This model's maximum context length is {window} tokens. However, you requested {total} tokens ({prompt} in the "
    "messages, {output} in the completion). Your input exceeds the context window of this model (prompt is too long: "
    "{prompt} tokens > {limit} maximum). Please reduce the length of the messages or completion."
)


def assert_overflow(
    answer: httpx2.Response, *, prompt: int, window: int, output: int, floor: int, param: str = "messages"
) -> None:
    """Every field of the body, as the clients studied read it.

    A prompt that fits but leaves less than ``floor`` is told the limit that it really broke.
    """
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == "false"
    total = prompt + output
    limit = window if prompt > window else window - floor
    assert answer.json() == {
        "error": {
            "message": OVERFLOW.format(window=window, total=total, prompt=prompt, output=output, limit=limit),
            "type": "invalid_request_error",
            "param": param,
            "code": "context_length_exceeded",
            "n_prompt_tokens": prompt,
            "n_ctx": window,
        }
    }


def served_by(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvgate-backend"]


def test_a_prompt_that_leaves_one_token_is_served(gateway: Gateway, backends: Backends) -> None:
    window = backends.large.window_tokens
    answer = gateway.chat(messages=backends.chat_of(window - 1), max_tokens=1)
    assert served_by(answer) == backends.large.label
    assert answer.json()["usage"]["total_tokens"] == window
    assert int(answer.headers["x-kvgate-prompt-tokens"]) == window - 1
    assert int(answer.headers["x-kvgate-window"]) == window


@pytest.mark.parametrize("beyond", [0, 1, 5000])
def test_a_prompt_as_long_as_the_largest_window_or_longer_is_refused(
    gateway: Gateway, backends: Backends, beyond: int
) -> None:
    window = backends.large.window_tokens
    answer = gateway.chat(messages=backends.chat_of(window + beyond), max_tokens=1)
    assert_overflow(answer, prompt=window + beyond, window=window, output=1, floor=1)


def test_a_completion_prompt_of_ids_is_refused_alike(gateway: Gateway, backends: Backends) -> None:
    window = backends.large.window_tokens
    assert gateway.complete([100] * (window - 1), max_tokens=1).status_code == 200
    answer = gateway.complete([100] * window, max_tokens=1)
    assert_overflow(answer, prompt=window, window=window, output=1, floor=1, param="prompt")


def test_an_overflowing_stream_is_refused_before_it_begins(gateway: Gateway, backends: Backends) -> None:
    messages = backends.chat_of(backends.large.window_tokens + 1)
    with gateway.stream("/v1/chat/completions", messages=messages) as answer:
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        answer.read()
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_without_a_budget_the_output_floor_must_be_left(gateway: Gateway, backends: Backends) -> None:
    window = backends.large.window_tokens
    most = window - FLOOR_TOKENS
    refused = gateway.chat(messages=backends.chat_of(most + 1))
    assert_overflow(refused, prompt=most + 1, window=window, output=FLOOR_TOKENS, floor=FLOOR_TOKENS)
    served = gateway.chat(messages=backends.chat_of(most), stop=["a", "e", " "])
    assert served_by(served) == backends.large.label


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_budget_beyond_the_window_is_clamped_to_what_is_left(
    gateway: Gateway, backends: Backends, field: str
) -> None:
    """Never a context error: clients answer one by throwing history away. vLLM itself refuses O > window."""
    window = backends.large.window_tokens
    prompt = window - FLOOR_TOKENS
    answer = gateway.chat(messages=backends.chat_of(prompt), ignore_eos=True, **{field: 1_000_000})
    assert served_by(answer) == backends.large.label
    assert answer.headers["x-kvgate-clamped-from"] == "1000000"
    assert int(answer.headers["x-kvgate-output-tokens"]) == FLOOR_TOKENS
    assert answer.json()["usage"]["completion_tokens"] == FLOOR_TOKENS
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_a_budget_that_fits_is_left_alone(gateway: Gateway, backends: Backends) -> None:
    answer = gateway.chat(messages=backends.chat_of(100), max_tokens=7, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 7
    assert "x-kvgate-clamped-from" not in answer.headers


@pytest.mark.parametrize("budget", [0, -1, None])
def test_a_budget_of_nothing_is_no_budget(gateway: Gateway, backends: Backends, budget: int | None) -> None:
    """Some clients send -1 or 0 for "no limit"; vLLM refuses both."""
    answer = gateway.chat(messages=backends.chat_of(50), max_tokens=budget, stop=["a", "e", " "])
    assert answer.status_code == 200, answer.text


def test_a_prompt_goes_to_the_smallest_window_that_holds_it(gateway: Gateway, backends: Backends) -> None:
    small = backends.small.window_tokens
    assert served_by(gateway.chat(messages=backends.chat_of(small - 8), max_tokens=8)) == backends.small.label
    assert served_by(gateway.chat(messages=backends.chat_of(small - 7), max_tokens=8)) == backends.large.label
    assert served_by(gateway.chat(messages=backends.chat_of(small + 1), max_tokens=8)) == backends.large.label


def test_each_prompt_of_a_list_must_fit_by_itself(gateway: Gateway, backends: Backends) -> None:
    window = backends.small.window_tokens
    half = [100] * (window // 2)
    answer = gateway.complete([half, [101, *half], [102, *half]], max_tokens=4)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 3 * (window // 2) + 2


@pytest.fixture(scope="module")
def small_only(backends: Backends) -> Iterator[Gateway]:
    with serving([backends.small.url], backends.model) as alone:
        yield alone


def test_with_the_small_server_alone_its_window_is_the_limit(small_only: Gateway, backends: Backends) -> None:
    window = backends.small.window_tokens
    answer = small_only.chat(messages=backends.chat_of(window), max_tokens=2048)
    assert_overflow(answer, prompt=window, window=window, output=2048, floor=FLOOR_TOKENS)
