"""Errors of backends of every version, as clients get to see them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_clients import CHAT_CLIENTS, those_who_see_an_overflow
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.upstream_errors import client_error, error_event, event_error, is_full, read_error, read_overflow
from gateway.exceptions import BackendFailed, ContextOverflow
from gateway.simulator.errors import ApiError, Lengths, check_lengths, envelope
from gateway.simulator.options import Version
from gateway.types import Dialect, Overflow

NESTED = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
FLAT = {"object": "error", "message": "no", "type": "BadRequestError", "param": None, "code": 400}
ANTHROPIC = {"type": "error", "error": {"type": "BadRequestError", "message": "no"}}


def answer(
    status: int, body: bytes | dict[str, Any], dialect: Dialect = Dialect.CHAT, window_tokens: int | None = None
) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    got, headers, sent = client_error(status, raw, dialect, "req-1", window_tokens)
    assert ("content-type", "application/json") in headers
    assert ("x-request-id", "req-1") in headers
    return got, json.loads(sent)


def refused(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {**NESTED["error"], "message": message, **fields}}


# --- shapes


def test_what_the_client_understands_passes_untouched() -> None:
    body = b'{"error": {"message": "no",  "type": "BadRequestError", "param": null, "code": 400, "extra": 1}}'
    assert client_error(400, body, Dialect.CHAT, "r")[2] is body
    body = json.dumps(ANTHROPIC).encode()
    assert client_error(400, body, Dialect.MESSAGES, "r")[2] is body


def test_the_flat_shape_of_old_versions_is_nested_with_the_same_text_type_and_code() -> None:
    assert answer(400, FLAT) == (400, NESTED)


def test_each_dialect_gets_its_own_shape() -> None:
    assert answer(400, NESTED, Dialect.MESSAGES) == (400, ANTHROPIC)
    assert answer(400, ANTHROPIC, Dialect.CHAT) == (400, NESTED)


def test_a_text_for_an_error_becomes_its_message() -> None:
    text = "The model is currently scaling. Please try again later."
    status, body = answer(503, {"error": text})
    assert status == 503
    assert body["error"] == {"message": text, "type": "InternalServerError", "param": None, "code": 503}


def test_an_unknown_route_of_the_backend_stays_a_404() -> None:
    status, body = answer(404, {"detail": "Not Found"})
    assert (status, body["error"]["message"], body["error"]["code"]) == (404, "Not Found", 404)


@pytest.mark.parametrize("body", [b"", b"  "])
def test_an_empty_body_is_given_words(body: bytes) -> None:
    status, sent = answer(500, body)
    assert status == 500
    assert sent["error"]["message"] == "The backend answered with status 500 without an explanation"


def test_a_proxys_page_is_quoted_briefly() -> None:
    status, sent = answer(500, b"<html>\n<h1>Bad\xff things</h1>" + b"x" * 10_000)
    assert status == 500
    assert sent["error"]["message"].startswith("The backend answered with status 500: <html> <h1>Bad\ufffd things</h1>")
    assert len(sent["error"]["message"]) < 400


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("body", [b'{"error":"Unauthorized"}', b"", b"<html>"])
def test_credentials_of_ours_that_are_refused_are_not_the_clients_fault(status: int, body: bytes) -> None:
    got, sent = answer(status, body)
    assert got == 502
    assert sent["error"]["code"] == "backend_error"
    assert "api_key" in sent["error"]["message"]


def test_an_endpoint_that_is_switched_off_stays_forbidden() -> None:
    body = refused("Scale-out endpoints are disabled.", type="PermissionDeniedError", code=403)
    assert answer(403, body, Dialect.OTHER) == (403, body)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["error", "message", "type", "code", "detail", "param"]), inner)
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
    st.integers(400, 599),
    st.sampled_from(list(Dialect)),
)
def test_no_body_of_a_backend_is_too_strange(body: bytes, status: int, dialect: Dialect) -> None:
    got, sent = answer(status, body, dialect)
    assert got in (status, 502)
    assert isinstance(sent["error"]["message"], str)


# --- overflows that slipped through

M = 32768
LEAST = "This model's maximum context length is 32768 tokens. However, "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{LEAST}your prompt contains at least 32769 input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=32769)",
            Overflow(32769, 0, M, M),
        ),
        (
            f"{LEAST}your prompt contains 40000 input tokens, which exceeds this limit even without any output tokens.",
            Overflow(40000, 0, M, M),
        ),
        (
            f"{LEAST}your prompt contains 9000000 characters (more than 4194304 characters, which is the upper bound "
            "for 32768 input tokens). Please reduce the length of the input prompt.",
            Overflow(32769, 0, M, M),
        ),
        (
            f"{LEAST}you requested 4096 output tokens and your prompt contains at least 28673 input tokens, for a "
            "total of at least 32769 tokens. Please reduce the length of the input prompt or the number of requested "
            "output tokens. (parameter=input_tokens, value=28673)",
            Overflow(28673, 4096, M, 28672),
        ),
        (
            f"{LEAST}you requested 4096 output tokens and your prompt contains 9000000 characters (more than 3670016 "
            "characters, which is the upper bound for 28672 input tokens).",
            Overflow(28673, 4096, M, 28672),
        ),
        (
            "You passed 28673 input tokens and requested 4096 output tokens. However, the model's context length is "
            "only 32768 tokens, resulting in a maximum input length of 28672 tokens. Please reduce the length of the "
            "input prompt.",
            Overflow(28673, 4096, M, 28672),
        ),
        (
            f"{LEAST}your request has 40000 input tokens. Please reduce the length of the input messages.",
            Overflow(40000, 0, M, M),
        ),
        (
            f"{LEAST}you requested 40960 tokens (36864 in the messages, 4096 in the completion). Please reduce the "
            "length of the messages or completion.",
            Overflow(36864, 4096, M, 28672),
        ),
        (
            f"{LEAST}you requested 40000 tokens in the messages, Please reduce the length of the messages.",
            Overflow(40000, 0, M, M),
        ),
        (
            f"{LEAST}you requested 40000 tokens in the input for embedding generation. Please reduce the length of the "
            "input.",
            Overflow(40000, 0, M, M),
        ),
        (
            "This model's maximum embedding input length is 32768 tokens. However, you requested 40000 tokens in the "
            "input for embedding generation. Please reduce the length of the input.",
            Overflow(40000, 0, M, M),
        ),
        (
            "This model's maximum position embeddings length is 32768 tokens. However, you requested 40000 tokens in "
            "the input for embedding generation. Please reduce the length of the input or enable chunked processing.",
            Overflow(40000, 0, M, M),
        ),
        ("Input length (40000) exceeds model's maximum context length (32768).", Overflow(40000, 0, M, M)),
        (
            "The engine prompt length 40000 exceeds the max_model_len 32768. Please reduce prompt.",
            Overflow(40000, 0, M, M),
        ),
        (
            "The decoder prompt (length 40000) is longer than the maximum model length of 32768. Make sure that "
            "`max_model_len` is no smaller than the number of text tokens.",
            Overflow(40000, 0, M, M),
        ),
        (
            "The decoder prompt (length 32768) plus the number of requested output tokens (at least 1) is longer than "
            "the maximum model length of 32768.",
            Overflow(32768, 1, M, 32767),
        ),
    ],
)
def test_the_numbers_in_vllms_texts(text: str, expected: Overflow) -> None:
    assert read_overflow(text, Dialect.CHAT) == expected
    status, body = answer(400, refused(text))
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["n_ctx"] == M
    assert body["error"]["n_prompt_tokens"] == expected.prompt_tokens


@pytest.mark.parametrize(("got", "prompt_tokens"), [("0", M), ("-736", M + 736)])
def test_no_token_left_to_generate_is_an_overflow_of_the_window_we_know(got: str, prompt_tokens: int) -> None:
    text = f"max_tokens must be at least 1, got {got}. (parameter=max_tokens, value={got})"
    assert read_overflow(text, Dialect.CHAT, M) == Overflow(prompt_tokens, 1, M, M - 1)
    assert answer(400, refused(text), window_tokens=M)[1]["error"]["code"] == "context_length_exceeded"
    assert answer(400, refused(text))[1] == refused(text)


def test_a_budget_of_nothing_that_we_passed_on_unread_is_the_clients_own() -> None:
    text = "max_tokens must be at least 1, got 0."
    assert read_overflow(text, Dialect.RESPONSES, M) is None


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=64000 cannot be greater than max_model_len=32768. Please request fewer output tokens.",
        "max_completion_tokens=64000cannot be greater than max_model_len=max_total_tokens=32768.",
        "truncate_prompt_tokens=64000 cannot be greater than max_model_len = 32768.",
    ],
)
def test_a_budget_too_large_by_itself_is_no_overflow(text: str) -> None:
    status, body = answer(400, refused(text), window_tokens=M)
    assert (status, body) == (400, refused(text))
    assert those_who_see_an_overflow(400, json.dumps(body).encode()) == set()


def test_a_budget_too_large_beside_a_prompt_that_fits_is_not_told_as_an_overflow() -> None:
    text = (
        "'max_tokens' or 'max_completion_tokens' is too large: 64000. This model's maximum context length is 32768 "
        "tokens and your request has 24235 input tokens (64000 > 32768 - 24235)."
    )
    status, body = answer(400, refused(text))
    assert status == 400
    assert "Ask for at most 8533." in body["error"]["message"]
    assert those_who_see_an_overflow(400, json.dumps(body).encode()) == set()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "'max_tokens' (64000) cannot be greater than the model's maximum context length (32768).",
            "Ask for at most 32768.",
        ),
        (
            "The decoder prompt contains a(n) image item with 5000 embedding tokens, which exceeds the pre-allocated "
            "encoder cache size 4096. Please reduce the input size or increase the encoder cache size by setting "
            "--limit-mm-per-prompt at startup.",
            "Send a smaller one.",
        ),
    ],
)
def test_what_leaving_history_out_would_not_help_is_not_told_as_an_overflow(text: str, says: str) -> None:
    assert those_who_see_an_overflow(400, json.dumps(refused(text)).encode()) != set()
    status, body = answer(400, refused(text))
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    assert says in body["error"]["message"]
    assert those_who_see_an_overflow(400, json.dumps(body).encode()) == set()


# --- errors within a stream

NET = "Input length (40000) exceeds model's maximum context length (32768)."


@pytest.mark.parametrize("envelope_", [refused(NET), {"type": "error", "error": {"type": "x", "message": NET}}])
def test_an_overflow_within_a_stream_is_told_in_our_words(envelope_: dict[str, Any]) -> None:
    error = event_error(json.dumps(envelope_).encode(), Dialect.CHAT)
    assert isinstance(error, ContextOverflow)
    assert error.overflow == Overflow(40000, 0, M, M)
    event = error_event(error, Dialect.CHAT)
    document = json.loads(event.removeprefix(b"data: "))
    assert event.endswith(b"}\n\n")
    assert those_who_see_an_overflow(400, json.dumps(document).encode()) == CHAT_CLIENTS.keys()


def test_the_engines_own_failure_lets_another_backend_take_over() -> None:
    died = refused("EngineCore encountered an issue.", type="InternalServerError", code=500)
    assert isinstance(event_error(json.dumps(died).encode(), Dialect.CHAT), BackendFailed)
    unnumbered = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError"}}
    assert isinstance(event_error(json.dumps(unnumbered).encode(), Dialect.CHAT), BackendFailed)


@pytest.mark.parametrize(
    "data",
    [
        b"[DONE]",
        b"{}",
        b'{"error": null}',
        b'{"error": "x"}',
        b'{"choices": [{"delta": {"content": "error"}}], "error": {"message": "x", "code": 500}}',
        json.dumps(refused("The tool call cannot be parsed.")).encode(),
    ],
)
def test_other_events_are_the_backends_own(data: bytes) -> None:
    assert event_error(data, Dialect.CHAT, M) is None


def test_an_overflow_is_only_read_in_a_400() -> None:
    body = refused("Input length (40000) exceeds model's maximum context length (32768).", code=500)
    assert answer(500, body) == (500, body)


VERSIONS = ["0.8.5", "0.10.0", "0.10.2", "0.12.0", "0.14.1", "0.16.0", "0.17.1", "0.18.1", "0.24.0", "0.31.0", "0.32.0"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(M, None), (M + 1, None), (M + 900, 64), (M + 1, 1)])
def test_whatever_the_version_every_client_recognises_that_the_prompt_is_too_long(
    version: str, api: Any, prompt_tokens: int, output_tokens: int | None
) -> None:
    release = Version.parse(version)
    with pytest.raises(ApiError) as caught:
        check_lengths(release, Lengths(api, M, prompt_tokens, output_tokens))
    dialect = Dialect.CHAT if api == "chat" else Dialect.COMPLETIONS
    raw = json.dumps(envelope(release, caught.value)).encode()
    status, _, body = client_error(caught.value.status, raw, dialect, "r", M)
    assert those_who_see_an_overflow(status, body) == CHAT_CLIENTS.keys()


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        (
            {
                "message": "The engine is currently busy and cannot accept new requests. Please try again later or on "
                "a different instance.",
                "type": "Service Unavailable",
            },
            True,
        ),
        ({"message": "The engine has reached its prefill token backlog limit. Please try again later."}, True),
        ({"message": "Request failed; please retry", "type": "ServiceUnavailableError"}, False),
        ({"message": "no healthy upstream"}, False),
    ],
)
def test_a_full_queue_is_told_from_other_503s(fields: dict[str, str], full: bool) -> None:
    assert is_full(read_error(503, json.dumps({"error": {**fields, "code": 503}}).encode())) is full


def test_a_server_that_scales_is_not_full() -> None:
    said = b'{"error":"The model is currently scaling. Please try again later."}'
    assert not is_full(read_error(503, said))
    assert not is_full(read_error(503, b"<html>503 Service Temporarily Unavailable</html>"))
