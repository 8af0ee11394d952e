"""An error in the words and the shape that a dialect's clients understand."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Any

from gateway.exceptions import (
    BackendBusy,
    BackendTimeout,
    BadRequest,
    Busy,
    ContextOverflow,
    GatewayError,
    NoBackend,
    ShuttingDown,
    Unauthorized,
    UnknownModel,
)
from gateway.types import Dialect, Overflow

Headers = list[tuple[str, str]]

# Errors that pass, and say when.
Later = Busy | ShuttingDown | NoBackend | BackendBusy

JSON = ("content-type", "application/json")

# The OpenAI SDKs obey this header before any status; the same prompt cannot fit on a second try.
NO_RETRY = ("x-should-retry", "false")

# Node's SDK, the AI SDK and Crush ignore a Retry-After of a minute or more.
LONGEST_RETRY_AFTER_S = 59

_PROMPT_FIELDS = {Dialect.CHAT: "messages", Dialect.MESSAGES: "messages", Dialect.COMPLETIONS: "prompt"}

_EVENT_STREAM = [("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("x-accel-buffering", "no")]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is answered, as far as that changes an error's form. ``stream``: a stream was asked for."""

    stream: bool = False
    codex: bool = False
    model: str = ""


ANYONE = Caller()


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """Where in a Responses stream an error stands: the response's id, and the number that its first event takes."""

    response_id: str
    sequence_number: int = 0
    model: str = ""


def is_codex(*headers: str | None) -> bool:
    """Whether a ``user-agent`` or ``originator`` is Codex's: ``codex_cli_rs``, ``codex_exec``, ``codex_vscode`` …"""
    return any("codex" in value.lower() for value in headers if value)


def error_response(
    error: GatewayError, dialect: Dialect, request_id: str, caller: Caller = ANYONE
) -> tuple[int, Headers, bytes]:
    """Status, headers (with ``x-request-id``, without a length) and body of the answer to a failed request.

    Codex takes a 400 for final whatever it says, and gives up after five answers of 429, while it waits as told through
    any number of 503 seen (0.171.0). So its streams are told of an overflow within a stream, where it looks for one,
    and of a full queue with the 503 whose code it knows.
    """
    headers = [("x-request-id", request_id)]
    if dialect is Dialect.MESSAGES:
        headers.append(("request-id", request_id))
    if isinstance(error, ContextOverflow):
        headers.append(NO_RETRY)
    elif isinstance(error, Unauthorized):
        headers.append(("www-authenticate", "Bearer"))
    elif isinstance(error, Later):
        headers += [("retry-after", str(_seconds(error))), ("retry-after-ms", str(_seconds(error) * 1000))]
    codex = caller.codex and dialect is Dialect.RESPONSES
    if codex and caller.stream and isinstance(error, ContextOverflow):
        return 200, [*_EVENT_STREAM, *headers], _refusing_stream(error, request_id, caller.model)
    status, body = error.status, openai_body(error, dialect)
    if dialect is Dialect.MESSAGES:
        status = 529 if isinstance(error, BackendBusy) else status  # Anthropic's own status of an overload
        body = anthropic_body(error, request_id)
    elif codex and isinstance(error, Busy):
        status = 503
        body["error"] |= {"type": "server_error", "code": "server_is_overloaded"}
    return status, [JSON, *headers], encode(body)


def sse_error(error: GatewayError, dialect: Dialect, place: StreamPlace | None = None) -> bytes:
    """The events that end a stream whose status is already sent. ``place`` is for the Responses dialect."""
    if dialect is Dialect.MESSAGES:
        return b"event: error\ndata: " + encode(anthropic_body(error, None)) + b"\n\n"
    fields = openai_body(error, dialect)["error"]
    if dialect is Dialect.RESPONSES:
        return failing_events(fields, place or StreamPlace("resp_failed"))
    return b"data: " + encode({"error": fields}) + b"\n\ndata: [DONE]\n\n"


def _refusing_stream(error: GatewayError, request_id: str, model: str) -> bytes:
    """A whole Responses stream that says no more than why there is none."""
    place = StreamPlace(f"resp_{request_id}", 0, model)
    created = {"type": "response.created", "sequence_number": 0, "response": _response(place, "in_progress")}
    fields = openai_body(error, Dialect.RESPONSES)["error"]
    return _event(created) + failing_events(fields, StreamPlace(place.response_id, 1, model))


def failing_events(fields: dict[str, Any], place: StreamPlace) -> bytes:
    """``error``, which OpenCode and the OpenAI SDKs look for, then ``response.failed``, which Codex and LangChain do;
    Codex drops events it does not know."""
    told = {key: fields[key] for key in ("type", "code", "message", "param")}
    said = {key: fields[key] for key in ("code", "message", "param")}
    error = {"type": "error", "sequence_number": place.sequence_number, **said, "error": told}
    response = _response(place, "failed") | {"error": {"code": fields["code"], "message": fields["message"]}}
    failed = {"type": "response.failed", "sequence_number": place.sequence_number + 1, "response": response}
    return _event(error) + _event(failed)


def _response(place: StreamPlace, status: str) -> dict[str, Any]:
    return {
        "id": place.response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": place.model,
        "output": [],
        "error": None,
    }


def _event(document: dict[str, Any]) -> bytes:
    return b"event: " + str(document["type"]).encode("ascii") + b"\ndata: " + encode(document) + b"\n\n"


def openai_body(error: GatewayError, dialect: Dialect) -> dict[str, Any]:
    """The body as OpenAI's API words it. An overflow also carries llama.cpp's two numbers, which Goose compares."""
    fields: dict[str, Any] = {
        "message": message_of(error),
        "type": _openai_type(error.status),
        "param": _param(error, dialect),
        "code": error.code,
    }
    if isinstance(error, ContextOverflow):
        fields |= {"n_prompt_tokens": error.overflow.prompt_tokens, "n_ctx": error.overflow.window_tokens}
    return {"error": fields}


def anthropic_body(error: GatewayError, request_id: str | None) -> dict[str, Any]:
    """The body as Anthropic's API words it; an overflow must begin with its phrase (Zed, Claude Code)."""
    message = message_of(error)
    if isinstance(error, ContextOverflow):
        message = " ".join(filter(None, (_too_long(error.overflow), error.detail)))
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    if request_id is not None:
        body["request_id"] = request_id
    return body


def message_of(error: GatewayError) -> str:
    """The text for the client, on one line."""
    if isinstance(error, ContextOverflow):
        return " ".join(filter(None, (overflow_message(error.overflow), error.detail)))
    text = " ".join(error.message.split())
    if isinstance(error, Busy):
        text = f"{text.rstrip('.')}. Please try again in {_seconds(error)}s."  # Codex waits for as long as this says
    return text


def overflow_message(overflow: Overflow) -> str:
    """The one text that all of 14 clients studied take for an overflow.

    Numbers first for Cline, Roo, LiteLLM, Continue, Crush and Qwen; then the sentence of Zed, LangChain and OpenHands,
    the phrase of LangChain and Anthropic's clients, and the advice of OpenCode and OpenHands. One line, digits without
    separators, and none of the words that veto (rate limits, timeouts).
    """
    prompt, output = overflow.prompt_tokens, overflow.output_tokens
    return (
        f"This model's maximum context length is {overflow.window_tokens} tokens. However, you requested "
        f"{prompt + output} tokens ({prompt} in the messages, {output} in the completion). Your input exceeds the "
        f"context window of this model ({_too_long(overflow)}). Please reduce the length of the messages or completion."
    )


def encode(body: dict[str, Any]) -> bytes:
    """JSON of any text, lone surrogates and all."""
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def _too_long(overflow: Overflow) -> str:
    """Anthropic's phrase. A prompt that fits but leaves too little is measured against what it must leave."""
    window = overflow.window_tokens
    limit = window if overflow.prompt_tokens > window else overflow.limit_tokens
    return f"prompt is too long: {overflow.prompt_tokens} tokens > {limit} maximum"


def _param(error: GatewayError, dialect: Dialect) -> str | None:
    if isinstance(error, ContextOverflow):
        return _PROMPT_FIELDS.get(dialect, "input")
    if isinstance(error, UnknownModel):
        return "model"
    return error.param if isinstance(error, BadRequest) else None


def _openai_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    BackendTimeout.status: "timeout_error",
}


def _seconds(error: Later) -> int:
    return max(1, min(LONGEST_RETRY_AFTER_S, math.ceil(error.retry_after_s)))
