"""Server-sent events as bytes: whole events, how many, and the token usage in them.

Runs for every chunk of every stream, so bytes are searched, not parsed; JSON is decoded only where there is usage.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

# An event longer than this is passed on as it comes.
LONGEST_EVENT_BYTES = 8 << 20

# A larger answer is not decoded for its usage, which is looked for in so many bytes.
MOST_DECODED_BYTES = 1 << 20
MOST_USAGE_BYTES = 1 << 16

# In the JSON of a stream this cannot stand within a string: there, quotes are escaped.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_DATA_LINE = re.compile(rb"^data:[ ]?(.*?)\r?$", re.MULTILINE)


class EventSplitter:
    """Cuts a stream, whose chunks may break anywhere, after the last whole event so far.

    Events end at an empty line; lines end with ``\\n`` or ``\\r\\n``. At most one event is held back.
    """

    __slots__ = ("_held", "_held_bytes", "_last", "_limit_bytes", "_long")

    def __init__(self, limit_bytes: int = LONGEST_EVENT_BYTES) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._last = b""
        self._limit_bytes = limit_bytes
        self._long = False

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that ``chunk`` completes, or nothing; the rest is held.

        An event beyond the limit is returned in pieces as they come.
        """
        if not self._held and not self._long and chunk.endswith(b"\n\n"):
            return chunk
        return self._feed(chunk)

    def flush(self) -> bytes:
        """What is held when the stream ends: an event without its empty line, or nothing."""
        rest = b"".join(self._held)
        self._keep(b"")
        self._long = False
        return rest

    def _feed(self, chunk: bytes) -> bytes:
        seam = self._last + chunk  # an end may straddle two chunks: it is 4 bytes at most
        bare, returned = seam.rfind(b"\n\n"), seam.rfind(b"\n\r\n")
        end = max(bare + 2 if bare >= 0 else 0, returned + 3 if returned >= 0 else 0)
        cut = end - len(self._last)
        if cut <= 0:
            return self._hold(chunk, seam)
        whole = b"".join(self._held) + chunk[:cut]
        self._long = False
        self._keep(chunk[cut:])
        return whole

    def _hold(self, chunk: bytes, seam: bytes) -> bytes:
        self._last = seam[-3:]
        if self._long:
            return chunk
        self._held.append(chunk)
        self._held_bytes += len(chunk)
        if self._held_bytes <= self._limit_bytes:
            return b""
        piece = b"".join(self._held)
        self._held, self._held_bytes, self._long = [], 0, True
        return piece

    def _keep(self, rest: bytes) -> None:
        self._held = [rest] if rest else []
        self._held_bytes = len(rest)
        self._last = rest[-3:]


def count_events(data: bytes) -> int:
    """Events with data in ``data``, whole events; comments and ``[DONE]`` are none. Of vLLM each is a token or more."""
    count = data.count(b"\ndata:") + data.startswith(b"data:")
    return count - 1 if has_done(data) else count


def has_done(data: bytes) -> bool:
    """Whether the stream's last event, ``[DONE]``, is in ``data``, whole events."""
    if b"[DONE]" not in data:
        return False
    found = data.rfind(b"data: [DONE]")
    if found < 0:
        found = data.rfind(b"data:[DONE]")
    return found == 0 or (found > 0 and data[found - 1] == 0x0A)


def has_usage(data: bytes) -> bool:
    """Whether any event in ``data`` tells usage (a null does not)."""
    return b'"usage"' in data and _USAGE.search(data) is not None


def find_usage(event: bytes) -> dict[str, Any] | None:
    """The usage object that an event tells, wherever its dialect puts it, or ``None``."""
    if not has_usage(event):
        return None
    document = document_of(event)
    return None if document is None else _usage_in(document)


def strip_usage(data: bytes, *, at_end: bool, in_every_chunk: bool) -> tuple[bytes, dict[str, Any] | None]:
    """Whole events of a chat or completions stream without the usage that the client did not ask for.

    ``at_end``: the last chunk, of usage alone, is wanted; ``in_every_chunk``: the others' usage is. Usage in every
    chunk is cumulative, and clients that did not ask for it add it up (Cline). Returns the bytes, identical where
    nothing is taken away, and the last usage seen.
    """
    if not has_usage(data):
        return data, None
    kept: list[bytes] = []
    last: dict[str, Any] | None = None
    for event in split_events(data):
        document = document_of(event) if has_usage(event) else None
        usage = None if document is None else _usage_in(document)
        last = {**(last or {}), **usage} if usage else last
        if document is None or usage is None or "usage" not in document:
            kept.append(event)
            continue
        alone = document.get("choices") == []
        if at_end if alone else in_every_chunk:
            kept.append(event)
        elif not alone:
            del document["usage"]
            kept.append(with_data(event, orjson.dumps(document)))
    return b"".join(kept), last


def split_events(data: bytes) -> list[bytes]:
    """The events in ``data``, each with its empty line; the last may lack it."""
    events: list[bytes] = []
    start = 0
    for end in _EVENT_END.finditer(data):
        events.append(data[start : end.end()])
        start = end.end()
    if start < len(data):
        events.append(data[start:])
    return events


def json_usage(body: bytes) -> tuple[int | None, int | None]:
    """Prompt and output tokens that an answer which is not streamed tells, each ``None`` if it does not.

    Raises ``ValueError`` if ``body`` is no JSON object.
    """
    usage = usage_of(body)
    return prompt_tokens_of(usage), output_tokens_of(usage)


def usage_of(body: bytes) -> dict[str, Any]:
    """The usage object of an answer that is not streamed; empty if it tells none.

    Raises ``ValueError`` if ``body`` is no JSON object. Of a huge one (embeddings: a million numbers take 10 ms) only
    the braces at its ends and the last usage in it are looked at.
    """
    if len(body) > MOST_DECODED_BYTES:
        return _last_usage(body) or {}
    document = orjson.loads(body)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return _usage_in(document) or {}


def _last_usage(body: bytes) -> dict[str, Any] | None:
    blanks = b" \t\r\n"
    if not body.lstrip(blanks).startswith(b"{") or not body.rstrip(blanks).endswith(b"}"):
        raise ValueError("not a JSON object")
    place = body.rfind(b'"usage"')
    found = _USAGE.match(body, place) if place >= 0 else None
    if found is None:
        return None
    text = body[found.end() - 1 :][:MOST_USAGE_BYTES].decode("utf-8", "replace")
    try:
        usage = json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        return None
    return usage if isinstance(usage, dict) else None


def prompt_tokens_of(usage: dict[str, Any]) -> int | None:
    """The prompt tokens a usage object tells, in the meaning of our counts.

    Anthropic's ``input_tokens`` leave out what came from or went into the cache. Responses whose tools the backend runs
    itself add up the prompts of all turns; the first of them is the client's.
    """
    details = usage.get("input_tokens_details")
    turns = details.get("input_tokens_per_turn") if isinstance(details, dict) else None
    if isinstance(turns, list) and len(turns) > 1 and isinstance(turns[0], int):
        return turns[0]
    tokens = _number(usage, "prompt_tokens", "input_tokens")
    if tokens is None or "prompt_tokens" in usage:
        return tokens
    cached = (_number(usage, name) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    return tokens + sum(cached)


def output_tokens_of(usage: dict[str, Any]) -> int | None:
    """The generated tokens a usage object tells."""
    return _number(usage, "completion_tokens", "output_tokens")


def cached_tokens_of(usage: dict[str, Any]) -> int | None:
    """The prompt tokens that were in the prefix cache, if a usage object tells (--enable-prompt-tokens-details)."""
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict) and (cached := _number(details, "cached_tokens")) is not None:
            return cached
    return _number(usage, "cache_read_input_tokens")


def _number(usage: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _usage_in(document: dict[str, Any]) -> dict[str, Any] | None:
    for holder in (document, document.get("response"), document.get("message")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            usage: dict[str, Any] = holder["usage"]
            return usage
    return None


def document_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object that an event's data are, or ``None``."""
    lines = _DATA_LINE.findall(event)
    try:
        document = orjson.loads(lines[0] if len(lines) == 1 else b"\n".join(lines))
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def with_data(event: bytes, data: bytes) -> bytes:
    """``event`` with its data lines replaced by one."""
    first, *others = _DATA_LINE.finditer(event)
    tail = event[others[-1].end(1) :] if others else event[first.end(1) :]
    return event[: first.start()] + b"data: " + data + tail
