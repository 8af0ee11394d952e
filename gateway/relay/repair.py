"""Repairs of answers: what clients stumble over in a backend's stream, put right on the way through.

Whole events go through here. Bytes are searched, and an event is decoded only where something is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import orjson

from gateway.exceptions import GatewayError
from gateway.relay.sse import document_of, has_done, has_usage, split_events, with_data
from gateway.relay.told import TRUE, UsageTold
from gateway.types import Dialect

_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
_NULL_CALLS = re.compile(rb'"(?:tool_calls|function_call)"\s*:\s*null')
_CALLS = re.compile(rb'"tool_calls"\s*:\s*\[\s*\{')
_ERROR = re.compile(rb'"error"\s*:\s*\{')
_DONE = b"data: [DONE]\n\n"

_MARKED = frozenset({Dialect.CHAT, Dialect.COMPLETIONS})


class StreamRepair:
    """Puts one stream right. ``names`` are the repairs it needed.

    ``budget_tokens``: the output budget that was sent, to tell ``length`` from ``stop``. ``read_error`` says what an
    event's data tell that is an error to be worded anew, ``word_error`` words it as an event.
    """

    def __init__(
        self,
        dialect: Dialect,
        budget_tokens: int | None = None,
        told: UsageTold = TRUE,
        disabled: Collection[str] = (),
        read_error: Callable[[bytes], GatewayError | None] = lambda _: None,
        word_error: Callable[[GatewayError], bytes] = lambda _: b"",
    ) -> None:
        self._dialect = dialect
        self._budget_tokens = budget_tokens
        self._told = told
        self._disabled = frozenset(disabled)
        self._read_error = read_error
        self._word_error = word_error
        self._finished = dialect not in _MARKED
        self._failed = False
        self._called = False
        self._first = b""
        self._last = b""
        self.names: set[str] = set()

    @property
    def finished(self) -> bool:
        """Whether a reason was told why the answer ended, so that nothing but the stream's own mark can be missing."""
        return self._finished and self._dialect in _MARKED and "stream_end" not in self._disabled

    def early_error(self, data: bytes) -> GatewayError | None:
        """The error that a stream begins with, if it is one that is better told by a status."""
        if not _ERROR.search(data):
            return None
        return self._error_in(split_events(data)[0])

    def passed(self, data: bytes, output_tokens: int | None) -> bytes:
        """``data``, whole events, as the client should get them. ``output_tokens``: as far as told."""
        if not self._first:
            self._first = data
        self._last = data
        if not self._finished:
            self._called = self._called or _CALLS.search(data) is not None
            self._finished = _FINISHED.search(data) is not None
        if _ERROR.search(data):
            data = self._with_errors_worded(data)
        if self._dialect is Dialect.CHAT and _NULL_CALLS.search(data) and "null_tool_calls" not in self._disabled:
            data = self._without_null_calls(data)
        if not self._told.is_true and has_usage(data):
            data = self._with_told_usage(data)
        if not self._finished and has_done(data) and not self._failed and "finish_reason" not in self._disabled:
            return self._with_finish_reason(data, output_tokens)
        return data

    def end(self) -> bytes:
        """The mark that a whole answer ends with, where the backend forgot it."""
        self.names.add("stream_end")
        return _DONE

    def place(self) -> tuple[str, int]:
        """Of a Responses stream: its response's id and the number of its next event."""
        first, last = _documents(self._first), _documents(self._last)
        responses = (document.get("response") for document in first)
        response: dict[str, Any] = next((one for one in responses if isinstance(one, dict)), {})
        number = next((d["sequence_number"] for d in reversed(last) if isinstance(d.get("sequence_number"), int)), -1)
        return str(response.get("id") or "resp_failed"), number + 1

    def _error_in(self, event: bytes) -> GatewayError | None:
        document = document_of(event)
        return None if document is None else self._read_error(orjson.dumps(document))

    def _with_errors_worded(self, data: bytes) -> bytes:
        events = []
        for event in split_events(data):
            error = self._error_in(event) if _ERROR.search(event) else None
            self._failed = self._failed or b'"choices"' not in event
            events.append(event if error is None else self._word_error(error))
        return b"".join(events)

    def _without_null_calls(self, data: bytes) -> bytes:
        self.names.add("null_tool_calls")
        return _each(data, _drop_null_calls)

    def _with_told_usage(self, data: bytes) -> bytes:
        return _each(data, self._told.tell)

    def _with_finish_reason(self, data: bytes, output_tokens: int | None) -> bytes:
        """A last chunk that says why the answer ended, before the one of usage alone and the end."""
        self.names.add("finish_reason")
        self._finished = True
        events = split_events(data)
        place = next(at for at, event in enumerate(events) if has_done(event))
        if place and b'"choices":[]' in events[place - 1].replace(b" ", b""):
            place -= 1
        return b"".join([*events[:place], self._last_chunk(output_tokens), *events[place:]])

    def _last_chunk(self, output_tokens: int | None) -> bytes:
        cut = self._budget_tokens is not None and output_tokens is not None and output_tokens >= self._budget_tokens
        reason = "length" if cut else "tool_calls" if self._called else "stop"
        sample = next(iter(_documents(self._first)), {})
        chunk: dict[str, Any] = {key: sample[key] for key in ("id", "object", "created", "model") if key in sample}
        said: dict[str, Any] = {"delta": {}} if self._dialect is Dialect.CHAT else {"text": ""}
        chunk["choices"] = [{"index": 0, **said, "logprobs": None, "finish_reason": reason}]
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _drop_null_calls(document: dict[str, Any]) -> bool:
    choices = document.get("choices")
    changed = False
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        for name in ("tool_calls", "function_call"):
            if isinstance(delta, dict) and name in delta and delta[name] is None:
                del delta[name]
                changed = True
    return changed


def _each(data: bytes, change: Callable[[dict[str, Any]], bool]) -> bytes:
    """``data`` with every event encoded anew whose document ``change`` changes."""
    events = []
    for event in split_events(data):
        document = document_of(event)
        changed = document is not None and change(document)
        events.append(with_data(event, orjson.dumps(document)) if changed else event)
    return b"".join(events)


def _documents(data: bytes) -> list[dict[str, Any]]:
    return [document for event in split_events(data) if (document := document_of(event)) is not None]
