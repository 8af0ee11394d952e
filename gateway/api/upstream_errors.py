"""A backend's own error, of any vLLM version, in a shape the client understands; its meaning and status stay."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.api.errors import ANYONE, JSON, Caller, Headers, StreamPlace, encode, error_response, sse_error
from gateway.exceptions import BackendFailed, ContextOverflow, GatewayError
from gateway.types import Dialect, Overflow

# What a body that is not vLLM's is quoted with at most.
_LONGEST_QUOTE = 300


@dataclass(frozen=True, slots=True)
class UpstreamError:
    """What a backend says is wrong. ``shape``: ``nested`` as OpenAI words it, ``anthropic``, or ``other``."""

    message: str
    type: str
    param: str | None
    code: Any
    shape: str


def client_error(
    status: int,
    body: bytes,
    dialect: Dialect,
    request_id: str,
    window_tokens: int | None = None,
    caller: Caller = ANYONE,
) -> tuple[int, Headers, bytes]:
    """Status, headers (as ``error_response``'s) and body for the client, when a backend answered ``status`` ≥ 400.

    A body the client understands passes untouched. Others are worded anew with the same text, type and code. An
    overflow becomes our overflow, with the numbers in the text; ``window_tokens`` is the backend's window, for texts
    that lack it. A 401 or 403 is about our credentials, not the client's, and becomes a 502.
    """
    error = read_error(status, body)
    # 403 is also how vLLM ≥ 0.30 says that an endpoint is switched off.
    if status == 401 or (status == 403 and error.type != "PermissionDeniedError"):
        refused = BackendFailed(
            f"The backend refused the gateway's own credentials (status {status}). "
            "Set the api_key of this backend in the gateway's settings."
        )
        return error_response(refused, dialect, request_id, caller)
    headers = [JSON, ("x-request-id", request_id)]
    if dialect is Dialect.MESSAGES:
        headers.append(("request-id", request_id))
    if status == 400:
        overflow = read_overflow(error.message, dialect, window_tokens)
        if overflow is not None:
            return error_response(ContextOverflow(overflow), dialect, request_id, caller)
        reworded = _plain_message(error.message)
        if reworded is not None:
            error = UpstreamError(reworded, error.type, error.param or "max_tokens", error.code, "other")
    if error.shape == ("anthropic" if dialect is Dialect.MESSAGES else "nested"):
        return status, headers, body
    return status, headers, encode(_enveloped(error, dialect))


def event_error(data: bytes, dialect: Dialect, window_tokens: int | None = None) -> GatewayError | None:
    """What the data of a stream's event says if it is an error that must be told in another way, else ``None``.

    An overflow that only the engine noticed becomes ours (vLLM sends it in a 200 stream: images, gpt-oss); a failure of
    the engine is a ``BackendFailed``, so that before anything was sent another backend can take over.
    """
    document = _document(data)
    inner = document.get("error") if isinstance(document, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("message"), str) or "choices" in document:
        return None
    overflow = read_overflow(inner["message"], dialect, window_tokens)
    if overflow is not None:
        return ContextOverflow(overflow)
    code = inner.get("code")
    failed = code >= 500 if isinstance(code, int) else inner.get("type") in _ENGINE_FAILURES
    return BackendFailed("The backend failed. Try again.") if failed else None


def is_full(error: UpstreamError) -> bool:
    """Whether a 503 is vLLM's limit of its own queue (0.29+): nothing is wrong with it, and in a moment it takes more.

    The types of 0.32 are told apart by a blank: ``ServiceUnavailableError`` is a failure that may pass.
    """
    return error.type == "Service Unavailable" or any(words in error.message for words in _FULL)


# --max-num-queued-reqs and --max-num-queued-tokens
_FULL = ("currently busy and cannot accept new requests", "prefill token backlog limit")


def error_event(error: GatewayError, dialect: Dialect, place: StreamPlace | None = None) -> bytes:
    """The event that takes the place of a backend's in a stream that goes on to its own ``[DONE]``."""
    return sse_error(error, dialect, place).removesuffix(b"data: [DONE]\n\n")


def read_error(status: int, body: bytes) -> UpstreamError:
    """Read the error body of any vLLM version, of FastAPI, or of a proxy in between. Never raises."""
    document = _document(body)
    kind, code = ("BadRequestError" if status < 500 else "InternalServerError"), status
    if isinstance(document, dict):
        inner = document.get("error")
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            shape = "anthropic" if document.get("type") == "error" else "nested"
            return _from_fields(inner, kind, code, shape)
        if isinstance(document.get("message"), str):  # vLLM up to 0.10.0
            return _from_fields(document, kind, code, "other")
        for text in (inner, document.get("detail")):  # vLLM's 401 and scaling 503; FastAPI's own 404 and 405
            if isinstance(text, str) and text:
                return UpstreamError(text, kind, None, code, "other")
    quote = " ".join(body[: 4 * _LONGEST_QUOTE].decode("utf-8", "replace").split())[:_LONGEST_QUOTE]
    said = f": {quote}" if quote else " without an explanation"
    return UpstreamError(f"The backend answered with status {status}{said}", kind, None, code, "other")


def read_overflow(message: str, dialect: Dialect, window_tokens: int | None = None) -> Overflow | None:
    """The overflow that a vLLM text of any version tells of; ``None`` if it tells of none that we can name.

    Texts that say "at least N", or give characters, know no more than a lower bound of the prompt; then that is the
    number. A budget that is too large by itself is no overflow: clients would throw history away for it.
    """
    for pattern, generative in _OVERFLOWS:
        found = pattern.search(message)
        if found is None:
            continue
        if generative and dialect not in (Dialect.CHAT, Dialect.COMPLETIONS):
            continue
        numbers = {key: int(value[:18]) for key, value in found.groupdict().items() if value is not None}
        window = numbers.get("window", window_tokens)
        if window is None:
            return None
        if generative:
            return Overflow(window + numbers.get("beyond", 0), 1, window, window - 1)
        output = numbers.get("output", 0)
        # Without a number of tokens we know only that the prompt does not fit beside the output.
        prompt = numbers.get("prompt", max(0, window - output) + 1)
        return Overflow(prompt, output, window, max(0, window - output))
    return None


_M = r"maximum context length is (?P<window>\d+) tokens"
# vLLM's texts, newest first; the flag says that the text means "no token left to generate", which is an overflow only
# where we never let a budget below 1 through.
_OVERFLOWS: tuple[tuple[re.Pattern[str], bool], ...] = tuple(
    (re.compile(pattern, re.DOTALL), generative)
    for pattern, generative in (
        # 0.32, tokens and characters
        (rf"{_M}\. However, your prompt contains (?:at least )?(?P<prompt>\d+) input tokens", False),
        (rf"{_M}\. However, your prompt contains \d+ characters", False),
        # 0.18 to 0.31
        (
            rf"{_M}\. However, you requested (?P<output>\d+) output tokens and your prompt contains "
            r"(?:at least )?(?P<prompt>\d+) input tokens",
            False,
        ),
        (rf"{_M}\. However, you requested (?P<output>\d+) output tokens and your prompt contains \d+ chara", False),
        # 0.16 and 0.17
        (
            r"You passed (?P<prompt>\d+) input tokens and requested (?P<output>\d+) output tokens\. However, the "
            r"model's context length is only (?P<window>\d+) tokens",
            False,
        ),
        (
            r"You passed \d+ input characters and requested (?P<output>\d+) output tokens\. However, the model's "
            r"context length is only (?P<window>\d+) tokens",
            False,
        ),
        # 0.10.1 to 0.15; 0.10.2 misspelt the beginning
        (rf"{_M}\. However, your request has (?P<prompt>\d+) input tokens", False),
        # 0.6 to 0.10.0, and pooling up to 0.17
        (
            rf"{_M}\. However, you requested \d+ tokens "
            r"\((?P<prompt>\d+) in the (?:messages|prompt), (?P<output>\d+) in the completion\)",
            False,
        ),
        (
            r"maximum (?:context|embedding input|position embeddings) length is (?P<window>\d+) tokens\. However, you "
            r"requested (?P<prompt>\d+) tokens in the ",
            False,
        ),
        # images and gpt-oss; responses; the engine's own net
        (r"Input length \((?P<prompt>\d+)\) exceeds model's maximum context length \((?P<window>\d+)\)", False),
        (r"engine prompt length (?P<prompt>\d+) exceeds the max_model_len (?P<window>\d+)", False),
        (r"prompt \(length (?P<prompt>\d+)\) is longer than the maximum model length of (?P<window>\d+)", False),
        (
            r"prompt \(length (?P<prompt>\d+)\) plus the number of requested output tokens \(at least "
            r"(?P<output>\d+)\) is longer than the maximum model length of (?P<window>\d+)",
            False,
        ),
        # The prompt fills the window, or more of it than there is (images before 0.18).
        (r"max_tokens must be at least 1, got (?:0|-(?P<beyond>\d+))", True),
    )
)

_ENGINE_FAILURES = frozenset({"InternalServerError", "ServiceUnavailableError", "Service Unavailable"})

# Texts that clients read as an overflow though leaving history out would not help: 0.10.1 to 0.15, where the prompt
# itself fits; completions of 0.14 and 0.15; and an image too large for the encoder, which Qwen Code compresses for.
_BUDGET = re.compile(
    r"is too large: (?P<output>\d+)\. This model's maximum context length is (?P<window>\d+) tokens and your request "
    r"has (?P<prompt>\d+) input tokens"
)
_BUDGET_ALONE = re.compile(
    r"'max_tokens' \((?P<output>\d+)\) cannot be greater than the model's maximum context length \((?P<window>\d+)\)"
)
_ITEM = re.compile(
    r"contains a\(n\) (?P<kind>\w+) item with (?P<tokens>\d+) embedding tokens, which exceeds the pre-allocated "
    r"encoder cache size (?P<cache>\d+)"
)


def _plain_message(message: str) -> str | None:
    found = _BUDGET.search(message) or _BUDGET_ALONE.search(message)
    if found is not None:
        left = max(0, int(found["window"][:18]) - int(found.groupdict().get("prompt", "0")[:18]))
        return f"The output budget of {found['output']} is too large: {left} are left for it. Ask for at most {left}."
    found = _ITEM.search(message)
    if found is not None:
        return (
            f"The {found['kind']} is too large: the backend's encoder cache holds {found['cache']} embeddings, and it "
            f"takes {found['tokens']}. Send a smaller one."
        )
    return None


def _enveloped(error: UpstreamError, dialect: Dialect) -> dict[str, Any]:
    if dialect is Dialect.MESSAGES:
        return {"type": "error", "error": {"type": error.type, "message": error.message}}
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def _from_fields(fields: dict[str, Any], kind: str, code: int, shape: str) -> UpstreamError:
    given, param = fields.get("type"), fields.get("param")
    return UpstreamError(
        message=fields["message"],
        type=given if isinstance(given, str) and given else kind,
        param=param if isinstance(param, str) else None,
        code=fields.get("code", code),
        shape=shape,
    )


def _document(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(body)  # NaN and lone surrogates of older servers
    except (ValueError, RecursionError):
        return None
