"""Errors in the words that clients act upon rightly."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from api_clients import ANTHROPIC_CLIENTS, CHAT_CLIENTS, those_who_see_an_overflow
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.errors import Caller, StreamPlace, error_response, is_codex, overflow_message, sse_error
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
    NoRoute,
    Unauthorized,
    UnknownModel,
)
from gateway.types import Dialect, Overflow

OVERFLOW = ContextOverflow(Overflow(36864, 4096, 32768, 31744))

# Texts as the gateway raises them.
OTHERS: list[GatewayError] = [
    BadRequest("`messages` is missing: it must be an array of message objects.", "messages"),
    BadRequest("The request body is nested deeper than 254 levels."),
    BodyTooLarge("The request body is larger than 67108864 bytes. Send less, or raise max_body_bytes of the gateway."),
    Unauthorized("No API key was given."),
    UnknownModel("gpt-4", ["Qwen/Qwen3-0.6B", "m"]),
    Busy("The KV cache is full and 1024 requests are waiting.", 2.2),
    NoBackend("No backend that serves `m` is up."),
    BackendFailed("The backend broke the connection."),
    BackendTimeout("The backend sent nothing for 300 s."),
    GatewayError("The gateway failed; its log says why. Try again."),
]


def answer(error: GatewayError, dialect: Dialect = Dialect.CHAT) -> tuple[int, dict[str, str], dict[str, Any]]:
    status, headers, body = error_response(error, dialect, "req-1")
    assert len(dict(headers)) == len(headers)
    return status, dict(headers), json.loads(body)


def test_the_overflow_body_to_the_letter() -> None:
    status, headers, body = answer(OVERFLOW)
    assert status == 400
    assert headers == {"content-type": "application/json", "x-request-id": "req-1", "x-should-retry": "false"}
    assert body == {
        "error": {
            "message": "This model's maximum context length is 32768 tokens. However, you requested 40960 tokens "
            "(36864 in the messages, 4096 in the completion). Your input exceeds the context window of this model "
            "(prompt is too long: 36864 tokens > 32768 maximum). "
            "Please reduce the length of the messages or completion.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "n_prompt_tokens": 36864,
            "n_ctx": 32768,
        }
    }


@pytest.mark.parametrize(
    ("dialect", "param"),
    [(Dialect.COMPLETIONS, "prompt"), (Dialect.RESPONSES, "input"), (Dialect.OTHER, "input")],
)
def test_the_overflow_names_the_field_of_its_dialect(dialect: Dialect, param: str) -> None:
    assert answer(OVERFLOW, dialect)[2]["error"]["param"] == param


def test_a_prompt_that_fits_but_leaves_too_little_is_measured_against_what_it_must_leave() -> None:
    error = ContextOverflow(Overflow(32000, 4096, 32768, 31744))
    fields = answer(error)[2]["error"]
    assert "prompt is too long: 32000 tokens > 31744 maximum" in fields["message"]
    assert "maximum context length is 32768 tokens. However, you requested 36096 tokens" in fields["message"]
    assert fields["n_ctx"] == 32768


def test_the_overflow_in_anthropics_words_begins_with_the_phrase() -> None:
    status, headers, body = answer(OVERFLOW, Dialect.MESSAGES)
    assert (status, headers["request-id"], headers["x-should-retry"]) == (400, "req-1", "false")
    assert body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 36864 tokens > 32768 maximum"},
        "request_id": "req-1",
    }


OVERFLOWS = st.builds(
    lambda window, floor, beyond, output: Overflow(
        window - min(floor, window // 2) + beyond, output, window, window - min(floor, window // 2)
    ),
    st.integers(16, 1_000_000),
    st.integers(1, 4096),
    st.integers(1, 300_000),
    st.integers(1, 64_000),
)


@given(OVERFLOWS)
def test_every_client_recognises_every_overflow(overflow: Overflow) -> None:
    error = ContextOverflow(overflow)
    status, _, body = error_response(error, Dialect.CHAT, "r")
    assert those_who_see_an_overflow(status, body) == CHAT_CLIENTS.keys()
    status, _, body = error_response(error, Dialect.COMPLETIONS, "r")
    assert those_who_see_an_overflow(status, body) == CHAT_CLIENTS.keys()
    status, _, body = error_response(error, Dialect.MESSAGES, "r")
    assert those_who_see_an_overflow(status, body, ANTHROPIC_CLIENTS) == ANTHROPIC_CLIENTS.keys()


@given(OVERFLOWS)
def test_a_proxy_that_loses_the_code_does_not_hide_the_overflow(overflow: Overflow) -> None:
    body = json.loads(error_response(ContextOverflow(overflow), Dialect.CHAT, "r")[2])
    body["error"]["code"] = 400
    assert those_who_see_an_overflow(400, json.dumps(body).encode()) == CHAT_CLIENTS.keys()


@given(OVERFLOWS)
def test_every_sentence_of_an_overflow_is_true_and_plain(overflow: Overflow) -> None:
    message = overflow_message(overflow)
    assert "\n" not in message
    assert not re.search(r"\d,\d", message)
    assert not re.search(r"rate.?limit|per.?minute|too many requests|time.?out|timed out", message, re.IGNORECASE)
    total, prompt, output = map(int, re.findall(r"requested (\d+) tokens \((\d+) in .*?, (\d+) in", message)[0])
    assert total == prompt + output
    assert prompt == overflow.prompt_tokens
    longer, limit = map(int, re.findall(r"too long: (\d+) tokens > (\d+) maximum", message)[0])
    assert longer == prompt
    assert limit < prompt
    assert limit <= overflow.window_tokens


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("dialect", list(Dialect))
def test_no_other_error_is_taken_for_an_overflow(error: GatewayError, dialect: Dialect) -> None:
    status, _, body = error_response(error, dialect, "req-1")
    # Two clients take any 400 of Anthropic's dialect for one; nothing can be said to them.
    clients = {**ANTHROPIC_CLIENTS} if dialect is Dialect.MESSAGES else CHAT_CLIENTS
    if dialect is Dialect.MESSAGES:
        del clients["Cline (legacy extension)"]
    assert those_who_see_an_overflow(status, body, clients) == set()


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "anthropic"),
    [
        (BadRequest("x", "p"), 400, "invalid_request_error", "invalid_request", "invalid_request_error"),
        (BodyTooLarge("x"), 400, "invalid_request_error", "body_too_large", "invalid_request_error"),
        (Unauthorized("x"), 401, "invalid_request_error", "invalid_api_key", "authentication_error"),
        (UnknownModel("x", ["y"]), 404, "invalid_request_error", "model_not_found", "not_found_error"),
        (NoRoute("x", 405), 405, "invalid_request_error", "not_found", "invalid_request_error"),
        (Busy("x", 1), 429, "rate_limit_error", "server_busy", "rate_limit_error"),
        (NoBackend("x"), 503, "server_error", "no_backend", "overloaded_error"),
        (BackendFailed("x"), 502, "server_error", "backend_error", "api_error"),
        (BackendTimeout("x"), 504, "server_error", "backend_timeout", "timeout_error"),
        (GatewayError("x"), 500, "server_error", "internal_error", "api_error"),
    ],
)
def test_status_and_type_of_each_error(error: GatewayError, status: int, kind: str, code: str, anthropic: str) -> None:
    got, headers, body = answer(error)
    assert (got, body["error"]["type"], body["error"]["code"]) == (status, kind, code)
    assert headers["content-type"] == "application/json"
    assert isinstance(body["error"]["message"], str)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    got, headers, body = answer(error, Dialect.MESSAGES)
    assert (got, body["type"], body["error"]["type"]) == (status, "error", anthropic)
    assert headers["request-id"] == body["request_id"] == "req-1"


def test_a_bad_request_names_its_field() -> None:
    assert answer(BadRequest("x", "messages[1]"))[2]["error"]["param"] == "messages[1]"
    assert answer(BadRequest("x"))[2]["error"]["param"] is None


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    fields = answer(UnknownModel("gpt-4", ["a", "b"]))[2]["error"]
    assert fields["message"] == "The model `gpt-4` does not exist. Available models: a, b."
    assert fields["param"] == "model"


def test_a_refused_key_says_how_to_present_one() -> None:
    assert answer(Unauthorized("x"))[1]["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("retry_after_s", "seconds"), [(0.0, 1), (0.2, 1), (2.0, 2), (2.2, 3), (59.0, 59), (60.0, 59), (1e9, 59)]
)
def test_busy_says_when_to_come_back_within_a_minute(retry_after_s: float, seconds: int) -> None:
    _, headers, body = answer(Busy("All places are taken.", retry_after_s))
    assert headers["retry-after"] == str(seconds)
    assert headers["retry-after-ms"] == str(seconds * 1000)
    assert body["error"]["message"] == f"All places are taken. Please try again in {seconds}s."
    assert "x-should-retry" not in headers


def test_a_text_of_several_lines_becomes_one() -> None:
    assert answer(BadRequest("a\n  b"))[2]["error"]["message"] == "a b"


def test_text_that_is_not_unicode_can_be_said() -> None:
    assert "\\ud800" in error_response(UnknownModel("\ud800", ["é"]), Dialect.CHAT, "r")[2].decode()


def test_a_stream_ends_with_an_error_and_done() -> None:
    for dialect in (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.OTHER):
        data = sse_error(BackendFailed("The backend broke off."), dialect)
        first, done, rest = data.split(b"\n\n")
        assert json.loads(first.removeprefix(b"data: ")) == {
            "error": {
                "message": "The backend broke off.",
                "type": "server_error",
                "param": None,
                "code": "backend_error",
            }
        }
        assert (done, rest) == (b"data: [DONE]", b"")


def test_a_messages_stream_ends_with_an_event_named_error() -> None:
    event, data, *rest = sse_error(NoBackend("None is up."), Dialect.MESSAGES).split(b"\n")
    assert event == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "None is up."},
    }
    assert rest == [b"", b""]


def events(data: bytes) -> list[dict[str, Any]]:
    """The documents of a stream, each under the event name it says itself."""
    documents = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        event, line = block.split("\n")
        documents.append(json.loads(line.removeprefix("data: ")))
        assert event == f"event: {documents[-1]['type']}"
    return documents


def test_a_responses_stream_ends_with_response_failed() -> None:
    error, failed = events(sse_error(OVERFLOW, Dialect.RESPONSES, StreamPlace("resp_7", 41, "m")))
    assert (error["type"], error["sequence_number"]) == ("error", 41)
    assert error["error"]["code"] == error["code"] == "context_length_exceeded"
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 42)
    assert (failed["response"]["id"], failed["response"]["status"]) == ("resp_7", "failed")
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    assert "exceeds the context window" in failed["response"]["error"]["message"]


# --- Codex


@pytest.mark.parametrize("header", ["codex_cli_rs/0.171.0 (Debian 13.0.0; x86_64)", "codex_exec", "Codex_VSCode/1"])
def test_codex_is_known_by_its_user_agent_or_originator(header: str) -> None:
    assert is_codex(None, header)
    assert is_codex(header, None)


def test_others_are_not_codex() -> None:
    assert not is_codex(None, None)
    assert not is_codex("OpenAI/Python 3.57.0", "opencode")


def test_codex_is_told_of_an_overflow_within_a_stream() -> None:
    status, headers, body = error_response(OVERFLOW, Dialect.RESPONSES, "req-1", Caller(True, True, "m"))
    assert status == 200
    assert dict(headers)["content-type"] == "text/event-stream"
    assert dict(headers)["x-request-id"] == "req-1"
    created, error, failed = events(body)
    assert [event["type"] for event in (created, error, failed)] == ["response.created", "error", "response.failed"]
    assert [event["sequence_number"] for event in (created, error, failed)] == [0, 1, 2]
    assert created["response"]["id"] == failed["response"]["id"] == "resp_req-1"
    assert created["response"]["model"] == "m"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("caller", [Caller(True, False), Caller(False, True), Caller()])
def test_all_others_are_told_by_status_400(caller: Caller) -> None:
    status, headers, body = error_response(OVERFLOW, Dialect.RESPONSES, "r", caller)
    assert (status, dict(headers)["content-type"]) == (400, "application/json")
    assert json.loads(body)["error"]["param"] == "input"


def test_codex_gets_other_errors_by_their_status() -> None:
    status, headers, _ = error_response(BadRequest("no"), Dialect.RESPONSES, "r", Caller(True, True))
    assert (status, dict(headers)["content-type"]) == (400, "application/json")


def test_codex_never_gets_the_429_that_it_takes_for_final() -> None:
    busy = Busy("All places are taken.", 3)
    status, headers, body = error_response(busy, Dialect.RESPONSES, "r", Caller(True, True))
    assert (status, json.loads(body)["error"]["code"]) == (503, "server_is_overloaded")
    assert dict(headers)["retry-after"] == "3"
    assert error_response(busy, Dialect.RESPONSES, "r", Caller(True, False))[0] == 429


@pytest.mark.parametrize("error", [NoBackend("All are asleep.", 15.0), BackendBusy("All are full.", True, 15.0)])
@pytest.mark.parametrize("dialect", list(Dialect))
def test_backends_that_will_be_back_say_when_to_try_again(error: GatewayError, dialect: Dialect) -> None:
    headers = dict(error_response(error, dialect, "r")[1])
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("15", "15000")


def test_a_backend_too_busy_has_anthropics_own_status() -> None:
    status, _, body = answer(BackendBusy("Every backend is busy."), Dialect.MESSAGES)
    assert (status, body["error"]["type"]) == (529, "overloaded_error")
    assert answer(BackendBusy("Every backend is busy."))[0] == 503


@pytest.mark.parametrize("dialect", list(Dialect))
def test_what_could_not_be_left_out_is_said_and_hides_the_overflow_from_nobody(dialect: Dialect) -> None:
    detail = "The newest message alone has 33000 tokens,\n and is never cut."
    overflow = ContextOverflow(OVERFLOW.overflow, detail)
    status, _, body = error_response(overflow, dialect, "r")
    assert json.loads(body)["error"]["message"].endswith(" ".join(detail.split()))
    clients = ANTHROPIC_CLIENTS if dialect is Dialect.MESSAGES else CHAT_CLIENTS
    assert those_who_see_an_overflow(status, body, clients) == clients.keys()
