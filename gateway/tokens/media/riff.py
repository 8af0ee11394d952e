"""Chunks of a RIFF file, the container of WAV and WebP."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from gateway.tokens.media.data_urls import Bytes


def chunks(data: Bytes, most: int) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start of the content and its length in bytes, of each chunk; the first ``most`` of them."""
    at = 12
    for _ in range(most):
        head = data.read(at, 8)
        if len(head) < 8:
            return
        kind, length = struct.unpack("<4sL", head)
        yield kind, at + 8, length
        at += 8 + length + length % 2
