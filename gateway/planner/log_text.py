"""A log as text: bounded in size, cut lines, and in whatever encoding the shell wrote it (PowerShell writes UTF-16)."""

from __future__ import annotations

import codecs
import stat
from collections import deque
from pathlib import Path
from typing import BinaryIO

from gateway.planner.errors import PlannerError

# A start stands at the head of a log, a restart loop's last failure at its end; what is between is traffic.
KEPT_BYTES_EACH_END = 4 << 20
_LINE_CHARACTERS, _CHUNK = 20_000, 1 << 20


def log_of_file(path: Path) -> tuple[str, int]:
    """The text of ``path`` and the bytes left out of its middle. Raises OSError, PlannerError for no log at all."""
    kind = path.stat().st_mode
    if stat.S_ISCHR(kind) or stat.S_ISBLK(kind) or stat.S_ISSOCK(kind):
        raise PlannerError(f"{path} is a device, not a log.")
    with path.open("rb") as stream:
        return log_of_stream(stream)


def log_of_stream(stream: BinaryIO) -> tuple[str, int]:
    """The text of ``stream`` and the bytes left out of its middle, in bounded memory. Raises PlannerError."""
    head = stream.read(KEPT_BYTES_EACH_END)
    tail: deque[bytes] = deque()
    held = left_out = 0
    while piece := stream.read(_CHUNK):
        tail.append(piece)
        held += len(piece)
        while held - len(tail[0]) >= KEPT_BYTES_EACH_END:
            gone = len(tail.popleft())
            held, left_out = held - gone, left_out + gone
    if not left_out:
        return log_text(head + b"".join(tail)), 0
    encoding = _encoding(head)
    parts = (_decoded(head, encoding), _decoded(b"".join(tail), encoding))
    return _cut("\n".join(parts)), left_out


def log_text(raw: bytes) -> str:
    """``raw`` decoded, its lines cut to what any log line needs. Raises PlannerError for a compressed file."""
    return _cut(_decoded(raw, _encoding(raw)))


def _encoding(raw: bytes) -> str:
    if raw.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
        raise PlannerError("the log is compressed: unpack it first, as in zcat FILE | kvgate doctor -")
    for mark, name in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if raw.startswith(mark):
            return name
    start = raw[:4096]
    if start[1::2].count(0) > len(start) // 4 and start[::2].count(0) < len(start) // 8:
        return "utf-16-le"
    return "utf-8"


def _decoded(raw: bytes, encoding: str) -> str:
    if encoding == "utf-16" and not raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16-le"  # the end of a file that began with a mark
    return raw.decode(encoding, "replace")


def _cut(text: str) -> str:
    if len(text) <= _LINE_CHARACTERS:
        return text
    return "\n".join(line[:_LINE_CHARACTERS] for line in text.splitlines())
