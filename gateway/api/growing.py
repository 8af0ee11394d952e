"""Bodies of conversations that grow are parsed from where they grew: what stood there before is not read again.

An agent sends its whole conversation with every request; the bytes up to the last message of the one before come again.
A body ``HEAD m1,m2,m3 TAIL`` whose ``HEAD`` and ``TAIL`` are valid around any one value in place of the messages, and
whose ``[m1,m2,m3]`` is valid by itself, is valid, and means what its parts mean. So only what is new is given to the
parser, and messages that were seen before are the same objects as before, which counting makes use of: what a body is
parsed into must not be changed by anyone.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.api.numbers import has_large_integer

# Smaller bodies are parsed whole in 20 µs, and larger ones would take all the room.
LEAST_BYTES = 8_000
MOST_BYTES = 8_000_000
# What is remembered: its bytes, and the objects parsed from it, messages and all other fields.
_BYTES_PER_BYTE = 3
_MOST_BODIES = 256
_PROBE_BYTES = 32

# Fields that may follow the messages. Within a JSON string quotes are escaped, so this is found in no text.
_TAIL = re.compile(
    rb'\](?:,\s?"(?:model|stream|stream_options|tools|tool_choice|parallel_tool_calls|functions|temperature|top_p|top_k|min_p'
    rb"|n|max_tokens|max_completion_tokens|max_output_tokens|stop|stop_sequences|seed|user|system|instructions|thinking"
    rb"|reasoning|reasoning_effort|response_format|presence_penalty|frequency_penalty|logprobs|top_logprobs|store|include"
    rb'|prompt_cache_key|service_tier|chat_template_kwargs|add_generation_prompt|text)"|\s*\}\s*\Z)'
)
_HEADS = {name: re.compile(rb'"%s":\s?\[' % name.encode()) for name in ("messages", "input")}
# Stands for the messages. Nobody can send it, so that a second field of the same name cannot be taken for the first.
_STAND_IN = secrets.token_hex(16)
_STAND_IN_JSON = orjson.dumps(_STAND_IN)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A body up to its last message, and what it was parsed into.

    ``start`` are its bytes up to there, in pieces, and ``end`` their number: each turn adds a piece, so that the long
    beginning is never copied.
    """

    field: str
    start: tuple[bytes, ...]
    end: int
    probe: bytes
    head: bytes
    tail: bytes
    around: dict[str, Any]
    messages: list[Any]


class GrowingBodies:
    """Parses bodies, remembering the last ones within ``limit_bytes`` (about)."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.kept_bytes = 0
        self._seen: OrderedDict[int, _Seen] = OrderedDict()
        self._number = 0
        self._lock = threading.Lock()

    def parse(self, body: bytes) -> dict[str, Any] | None:
        """What ``orjson.loads(body)`` would give, unless ``None``: then it is for others to parse, or to find wrong.

        Nesting is not looked at beyond what was new. Objects in it may be those of an earlier call.
        """
        if not LEAST_BYTES <= len(body) <= MOST_BYTES:
            return None
        number, before = self._find(body)
        try:
            seen = _first(body) if before is None else _next(body, before)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            return None
        if seen is None:
            return None
        self._keep(number, seen)
        return seen.around | {seen.field: list(seen.messages)}

    def _find(self, body: bytes) -> tuple[int | None, _Seen | None]:
        """The body remembered last of those that this one begins with."""
        length = len(body)
        with self._lock:
            for number, seen in reversed(self._seen.items()):
                end = seen.end
                if end < length and body[end - _PROBE_BYTES : end] == seen.probe and _begins(body, seen.start):
                    return number, seen
        return None, None

    def _keep(self, number: int | None, seen: _Seen) -> None:
        with self._lock:
            if number is not None:
                self._forget(number)
            self._number += 1
            self._seen[self._number] = seen
            self.kept_bytes += _weight(seen)
            while self._seen and (self.kept_bytes > self.limit_bytes or len(self._seen) > _MOST_BODIES):
                self._forget(next(iter(self._seen)))

    def _forget(self, number: int) -> None:
        seen = self._seen.pop(number, None)
        if seen is not None:
            self.kept_bytes -= _weight(seen)


def _weight(seen: _Seen) -> int:
    return _BYTES_PER_BYTE * (seen.end + len(seen.tail))


def _first(body: bytes) -> _Seen | None:
    """Parse a body of which nothing is known. ``None`` or an error: not laid out as expected, or not valid."""
    for field, pattern in _HEADS.items():
        opening = pattern.search(body)
        if opening is not None:
            closing = _TAIL.search(body, opening.end())
            if closing is None:
                return None
            head, tail = body[: opening.end()], body[closing.start() :]
            around = _around(head, tail, field)
            messages = _values(memoryview(body)[opening.end() : closing.start()])
            end = closing.start()
            return _Seen(field, (body[:end],), end, _probe(body, end), head, tail, around, messages)
    return None


def _next(body: bytes, seen: _Seen) -> _Seen | None:
    """Parse a body that begins like one seen before."""
    begin = seen.end
    if body.endswith(seen.tail) and len(body) - len(seen.tail) >= begin:
        end, tail, around = len(body) - len(seen.tail), seen.tail, seen.around
    else:
        closing = _TAIL.search(body, begin)
        if closing is None:
            return None
        end, tail = closing.start(), body[closing.start() :]
        around = _around(seen.head, tail, seen.field)
    more = body[begin:end].strip(b" \t\r\n")
    messages = seen.messages
    if more:
        if more[:1] != b",":
            return None
        messages = [*messages, *_values(memoryview(more)[1:])]
    start = (*seen.start, body[begin:end]) if end > begin else seen.start
    return _Seen(seen.field, start, end, _probe(body, end), seen.head, tail, around, messages)


def _probe(body: bytes, end: int) -> bytes:
    return body[end - _PROBE_BYTES : end]


def _begins(body: bytes, pieces: tuple[bytes, ...]) -> bool:
    place = 0
    for piece in pieces:
        if not body.startswith(piece, place):
            return False
        place += len(piece)
    return True


def _around(head: bytes, tail: bytes, field: str) -> dict[str, Any]:
    """The body with one value in place of the messages. Raises if that is not where they stand."""
    raw = head + _STAND_IN_JSON + tail
    document = orjson.loads(raw)
    if document[field] != [_STAND_IN] or has_large_integer(raw):
        raise ValueError(field)
    orjson.dumps(document)  # raises TypeError for nesting too deep
    if not isinstance(document, dict):
        raise TypeError(document)
    return document


def _values(text: memoryview) -> list[Any]:
    """The values of an array's inside, at least one."""
    array = b"".join((b"[", text, b"]"))
    values: list[Any] = orjson.loads(array)
    if not values or has_large_integer(array):
        raise ValueError("a value is missing, or one is not read truly")
    orjson.dumps([values])  # as deep as they stand in the body; raises TypeError where that is too deep
    return values
