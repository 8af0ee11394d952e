"""A stream that is opened before there is an answer: what keeps it alive, and how an answer that is none ends it."""

from __future__ import annotations

import time
from typing import Any

import orjson

from gateway.api.errors import StreamPlace, encode, failing_events
from gateway.types import Dialect

# Dialects whose streams may be opened while the request waits.
OPENED_EARLY = (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.MESSAGES, Dialect.RESPONSES)


def idle_event(dialect: Dialect, model: str) -> bytes:
    """An event that clients parse and that says nothing: some count the time between parsed events, not bytes
    (LangChain, Codex). Empty for Responses, whose SDKs take no event before ``response.created``."""
    if dialect is Dialect.MESSAGES:
        return b'event: ping\ndata: {"type": "ping"}\n\n'
    if dialect is Dialect.CHAT:
        choice: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": None}
        return _chunk("chatcmpl-waiting", "chat.completion.chunk", model, choice)
    if dialect is Dialect.COMPLETIONS:
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return _chunk("cmpl-waiting", "text_completion", model, choice)
    return b""


def ending_events(dialect: Dialect, body: bytes, request_id: str, model: str) -> bytes:
    """The JSON ``body`` of an answer, an error in its dialect, as the end of a stream that was opened before."""
    if dialect is Dialect.MESSAGES:
        return b"event: error\ndata: " + body + b"\n\n"
    if dialect is Dialect.RESPONSES:
        return failing_events(_fields(body), StreamPlace(f"resp_{request_id}", 0, model))
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"


def _chunk(name: str, kind: str, model: str, choice: dict[str, Any]) -> bytes:
    chunk = {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": [choice]}
    return b"data: " + encode(chunk) + b"\n\n"


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of the error in ``body``."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    error = document.get("error") if isinstance(document, dict) else None
    unknown = {"type": "server_error", "code": None, "message": "The request failed. Try again.", "param": None}
    return unknown | error if isinstance(error, dict) else unknown
