"""Integers beyond 64 bits (the largest uint256 in a tool's schema): vLLM keeps every digit, orjson makes floats."""

from __future__ import annotations

import re

_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * 19  # 64 bits hold every shorter one
_RUN = re.compile(b"0+")
_BEFORE, _AFTER = b"[:, \t\r\n", b"]}, \t\r\n"
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def has_large_integer(raw: bytes) -> bool:
    """Whether ``raw``, which is valid JSON, holds an integer that orjson reads as a float. About 2 ms a MB at most,
    unless it is full of long numbers."""
    zeros = raw.translate(_DIGITS)
    place = zeros.find(_LONG)
    seen, in_text = 0, False
    while place >= 0:
        run = _RUN.match(zeros, place)
        assert run is not None
        end = run.end()
        start = place - 1 if raw[place - 1 : place] == b"-" else place
        if raw[start - 1 : start] in _BEFORE and raw[end : end + 1] in _AFTER and _is_large(raw[start:end]):
            in_text ^= _switches(raw[seen:start])
            if not in_text:
                return True
            seen = start
        place = zeros.find(_LONG, end)
    return False


def _is_large(number: bytes) -> bool:
    return len(number) > 20 or not _LEAST <= int(number) <= _MOST


def _switches(raw: bytes) -> bool:
    """Whether a string begins or ends in ``raw`` an odd number of times. ``raw`` must not begin within an escape."""
    raw = raw.replace(rb"\\", b"")
    return (raw.count(b'"') - raw.count(rb"\"")) % 2 == 1
