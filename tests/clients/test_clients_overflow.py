"""Every overflow is seen by every client that can see one, and nothing else is taken for one, whatever the numbers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from client_rules import ClientRule, rules
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.errors import Caller, StreamPlace, error_response, sse_error
from gateway.api.upstream_errors import client_error
from gateway.exceptions import (
    BackendBusy,
    BackendFailed,
    BackendTimeout,
    BadRequest,
    BodyTooLarge,
    Busy,
    ContextOverflow,
    GatewayError,
    NoBackend,
    ShuttingDown,
    Unauthorized,
    UnknownModel,
)
from gateway.types import Dialect, Overflow

SPOKEN = {
    Dialect.CHAT: "chat",
    Dialect.COMPLETIONS: "chat",
    Dialect.RESPONSES: "chat",  # clients test a refused Responses request as they do one of the chat path
    Dialect.MESSAGES: "messages",
}

# Digits that older LiteLLM takes for a rate limit, and that OpenCode takes for a reason to try again.
TRAPS = (429, 500, 502, 503, 504, 524, 42912, 50012, 142900, 65000, 252400)

NUMBERS = st.one_of(st.sampled_from(TRAPS), st.integers(1, 2_000_000))
OVERFLOWS = st.builds(
    lambda window, floor, beyond, output: Overflow(
        window - min(floor, window // 2) + beyond, output, window, window - min(floor, window // 2)
    ),
    NUMBERS.filter(lambda window: window >= 16),
    st.one_of(st.sampled_from((429, 500)), st.integers(1, 4096)),
    NUMBERS,
    st.one_of(st.sampled_from((0, 429, 500, 4096)), st.integers(0, 128_000)),
)


def blind(found: tuple[ClientRule, ...], status: int, body: bytes) -> list[str]:
    """The clients that would not see an overflow."""
    return [str(rule) for rule in found if not rule.sees(status, body)]


def seeing(found: tuple[ClientRule, ...], status: int, body: bytes) -> list[str]:
    """The clients that would."""
    return [str(rule) for rule in found if rule.sees(status, body)]


def test_all_the_clients_studied_are_here() -> None:
    chat = {rule.client.split(" (")[0] for rule in rules("chat")}
    assert {"Cline", "Roo Code", "OpenCode", "Goose", "Zed", "LangChain", "Qwen Code", "Crush"} <= chat
    assert len(rules("chat")) == 14
    assert len(rules("messages")) == 8
    assert {rule.client for rule in rules("responses", "stream")} >= {"Codex CLI", "OpenCode"}


@pytest.mark.parametrize("dialect", list(SPOKEN))
@given(overflow=OVERFLOWS, detail=st.sampled_from(["", "The newest message alone has 42900 tokens and is never cut."]))
def test_every_client_sees_every_overflow(dialect: Dialect, overflow: Overflow, detail: str) -> None:
    status, _, body = error_response(ContextOverflow(overflow, detail), dialect, "req-429500")
    assert blind(rules(SPOKEN[dialect]), status, body) == []


@given(OVERFLOWS)
def test_clients_see_an_overflow_in_the_stream_that_codex_gets(overflow: Overflow) -> None:
    status, _, stream = error_response(
        ContextOverflow(overflow), Dialect.RESPONSES, "r", Caller(stream=True, codex=True, model="m")
    )
    assert status == 200
    assert [str(rule) for rule in rules("responses", "stream") if not rule.sees_in_stream(stream)] == []


@given(OVERFLOWS)
def test_clients_that_look_for_it_see_an_overflow_in_the_middle_of_a_stream(overflow: Overflow) -> None:
    error = ContextOverflow(overflow)
    assert all(rule.sees_in_stream(sse_error(error, Dialect.CHAT)) for rule in rules("chat", "stream"))
    place = StreamPlace("resp_1", 7)
    assert all(rule.sees_in_stream(sse_error(error, Dialect.RESPONSES, place)) for rule in rules("responses", "stream"))


# As the gateway words them, and what an operator or a backend may add.
OTHERS: list[GatewayError] = [
    Busy("The KV cache is full and 1024 requests are waiting.", 2.2),
    Busy("No place for 300 s: the KV cache is full.", 59),
    Unauthorized("No API key was given."),
    Unauthorized("The API key is not known here."),
    UnknownModel("gpt-4", ["Qwen/Qwen3-0.6B", "m"]),
    NoBackend("No backend that serves `m` is up."),
    BackendBusy(
        "The engine is currently busy and cannot accept new requests. Please try again later or on a different"
    ),
    BackendBusy(
        "The engine has reached its prefill token backlog limit. Please try again later or on a different one."
    ),
    BackendFailed("The backend broke the connection."),
    BackendFailed("The backend answered 502. Try again."),
    BackendTimeout("The backend sent nothing for 300 s."),
    ShuttingDown("The gateway is shutting down. Try again."),
    BadRequest("`messages` is missing: it must be an array of message objects.", "messages"),
    BadRequest("The request body is nested deeper than 254 levels."),
    BodyTooLarge("The request body is larger than 67108864 bytes. Send less, or raise max_body_bytes of the gateway."),
    GatewayError("The gateway failed; its log says why. Try again."),
]


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: f"{type(error).__name__}-{error.message[:20]}")
@pytest.mark.parametrize("dialect", list(SPOKEN))
def test_no_other_error_is_seen_as_an_overflow(dialect: Dialect, error: GatewayError) -> None:
    for caller in (Caller(), Caller(stream=True, codex=True)):
        status, _, body = error_response(error, dialect, "req-1", caller)
        # Legacy Cline takes any invalid request of Anthropic's dialect for one; nothing can be said to it.
        found = [rule for rule in rules(SPOKEN[dialect]) if str(rule) != "Cline (legacy extension) (messages, status)"]
        assert seeing(tuple(found), status, body) == []


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: f"{type(error).__name__}-{error.message[:20]}")
def test_no_other_error_in_a_stream_is_seen_as_an_overflow(error: GatewayError) -> None:
    assert not any(rule.sees_in_stream(sse_error(error, Dialect.CHAT)) for rule in rules("chat", "stream"))
    stream = sse_error(error, Dialect.RESPONSES, StreamPlace("resp_1", 7))
    assert not any(rule.sees_in_stream(stream) for rule in rules("responses", "stream"))


BUDGETS = (
    "max_tokens={o} cannot be greater than max_model_len={m}. Please request fewer output tokens.",
    "max_completion_tokens={o}cannot be greater than max_model_len=max_total_tokens={m}. Please request fewer.",
    "'max_tokens' or 'max_completion_tokens' is too large: {o}. This model's maximum context length is {m} tokens and "
    "your request has {p} input tokens ({o} > {m} - {p}).",
    "'max_tokens' ({o}) cannot be greater than the model's maximum context length ({m}).",
    "truncate_prompt_tokens={o} cannot be greater than max_model_len = {m}. Please request a smaller truncation size.",
    "The decoder prompt contains a(n) image item with {o} embedding tokens, which exceeds the pre-allocated encoder "
    "cache size {m}. Please reduce the input size or increase the encoder cache size by setting --limit-mm-per-prompt "
    "at startup.",
)


@pytest.mark.parametrize("text", BUDGETS)
@given(o=NUMBERS, m=NUMBERS, p=NUMBERS)
def test_a_budget_or_an_image_too_large_is_no_overflow_whatever_the_version(text: str, o: int, m: int, p: int) -> None:
    upstream: dict[str, Any] = {"message": text.format(o=o, m=m, p=p), "type": "BadRequestError", "param": None}
    body = json.dumps({"error": {**upstream, "code": 400}}).encode()
    status, _, told = client_error(400, body, Dialect.CHAT, "r", m)
    assert seeing(rules("chat"), status, told) == []


@given(OVERFLOWS)
def test_only_the_numbers_of_an_overflow_can_hold_digits_that_look_like_a_status(overflow: Overflow) -> None:
    """OpenCode tries other errors again for such digits, but tests for an overflow first; LiteLLM's older releases take
    429 for a rate limit. The text cannot avoid them and tell the truth, so it must not add any of its own."""
    message = json.loads(error_response(ContextOverflow(overflow), Dialect.CHAT, "r")[2])["error"]["message"]
    numbers = {overflow.prompt_tokens, overflow.output_tokens, overflow.window_tokens, overflow.limit_tokens}
    numbers.add(overflow.prompt_tokens + overflow.output_tokens)
    assert {int(number) for number in re.findall(r"\d+", message)} <= numbers


@pytest.mark.parametrize("error", [error for error in OTHERS if error.status in (400, 401, 404)])
def test_final_errors_hold_no_digits_that_opencode_takes_for_a_reason_to_try_again(error: GatewayError) -> None:
    message = json.loads(error_response(error, Dialect.CHAT, "r")[2])["error"]["message"]
    assert not re.search(r"429|500|502|503|504|524", message)
