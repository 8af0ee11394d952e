"""An error in the words and the shape that a dialect's clients understand."""

from __future__ import annotations

import json
import math
from typing import Any

from gateway.exceptions import (
    BackendTimeout,
    BadRequest,
    Busy,
    ContextOverflow,
    GatewayError,
    Unauthorized,
    UnknownModel,
)
from gateway.types import Dialect, Overflow

Headers = list[tuple[str, str]]

JSON = ("content-type", "application/json")

# The OpenAI SDKs obey this header before any status; the same prompt cannot fit on a second try.
NO_RETRY = ("x-should-retry", "false")

# Node's SDK, the AI SDK and Crush ignore a Retry-After of a minute or more.
LONGEST_RETRY_AFTER_S = 59

_PROMPT_FIELDS = {Dialect.CHAT: "messages", Dialect.MESSAGES: "messages", Dialect.COMPLETIONS: "prompt"}


def error_response(error: GatewayError, dialect: Dialect, request_id: str) -> tuple[int, Headers, bytes]:
    """Status, headers (with ``x-request-id``, without a length) and body of the answer to a failed request."""
    headers = [JSON, ("x-request-id", request_id)]
    if dialect is Dialect.MESSAGES:
        headers.append(("request-id", request_id))
    if isinstance(error, ContextOverflow):
        headers.append(NO_RETRY)
    elif isinstance(error, Unauthorized):
        headers.append(("www-authenticate", "Bearer"))
    elif isinstance(error, Busy):
        headers += [("retry-after", str(_seconds(error))), ("retry-after-ms", str(_seconds(error) * 1000))]
    body = anthropic_body(error, request_id) if dialect is Dialect.MESSAGES else openai_body(error, dialect)
    return error.status, headers, encode(body)


def sse_error(error: GatewayError, dialect: Dialect) -> bytes:
    """The events that end a stream whose status is already sent."""
    if dialect is Dialect.MESSAGES:
        return b"event: error\ndata: " + encode(anthropic_body(error, None)) + b"\n\n"
    fields = openai_body(error, dialect)["error"]
    if dialect is Dialect.RESPONSES:
        # Codex and LangChain look at response.failed; Codex ignores an event named error.
        failed = {
            "type": "response.failed",
            "sequence_number": 0,
            "response": {
                "id": "resp_failed",
                "object": "response",
                "status": "failed",
                "error": {"code": fields["code"], "message": fields["message"]},
                "output": [],
            },
        }
        return b"event: response.failed\ndata: " + encode(failed) + b"\n\n"
    return b"data: " + encode({"error": fields}) + b"\n\ndata: [DONE]\n\n"


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
    message = _too_long(error.overflow) if isinstance(error, ContextOverflow) else message_of(error)
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    if request_id is not None:
        body["request_id"] = request_id
    return body


def message_of(error: GatewayError) -> str:
    """The text for the client, on one line."""
    if isinstance(error, ContextOverflow):
        return overflow_message(error.overflow)
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


def _seconds(error: Busy) -> int:
    return max(1, min(LONGEST_RETRY_AFTER_S, math.ceil(error.retry_after_s)))
