"""Random access to the bytes of a base64 text, decoding only what is read, and the data URLs that carry one."""

from __future__ import annotations

import binascii
from typing import Protocol

from gateway.tokens.media.errors import UnknownMedia


class Bytes(Protocol):
    """Bytes of known length that can be read anywhere."""

    size: int

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``; fewer at the end. May raise ``UnknownMedia``."""


class PlainBytes:
    """Bytes in memory. ``size`` may be more than is there: what lies beyond is not to be had."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self._data = data
        self.size = len(data) if size is None else size

    def read(self, offset: int, count: int) -> bytes:
        wanted = min(count, max(0, self.size - offset))
        found = self._data[offset : offset + wanted]
        if len(found) < wanted:
            raise UnknownMedia("its header is longer than what was fetched")
        return found


class Base64Bytes:
    """The bytes that ``text[start:]`` encodes. Raises ``UnknownMedia`` where it is no base64 as vLLM takes it.

    vLLM 0.32 decodes with ``validate=True``: no line breaks, no URL alphabet, full quartets (multimodal/media).
    """

    def __init__(self, text: str, start: int = 0) -> None:
        length = len(text) - start
        if length % 4:
            raise UnknownMedia("its base64 is cut off", refused=True)
        padding = 0 if not length else 2 if text.endswith("==") else 1 if text.endswith("=") else 0
        self.size = length // 4 * 3 - padding
        self._text = text
        self._start = start

    def read(self, offset: int, count: int) -> bytes:
        end = min(offset + count, self.size)
        if end <= offset:
            return b""
        first = offset // 3
        quartets = self._text[self._start + first * 4 : self._start + -(-end // 3) * 4]
        try:
            decoded = binascii.a2b_base64(quartets, strict_mode=True)
        except ValueError as error:  # binascii.Error, or characters that are not ASCII
            raise UnknownMedia(f"its base64 cannot be decoded: {error}", refused=True) from None
        return decoded[offset - first * 3 : end - first * 3]


def data_url_bytes(url: str) -> Base64Bytes | None:
    """The bytes of a data URL; ``None`` if ``url`` is none. Raises ``UnknownMedia`` for what vLLM cannot read."""
    if url[:5].lower() != "data:":
        return None
    comma = url.find(",", 5)
    if comma < 0:
        raise UnknownMedia("its data URL has no comma", refused=True)
    if not url[5:comma].endswith(";base64"):
        raise UnknownMedia("its data URL is not base64", refused=True)
    return Base64Bytes(url, comma + 1)
