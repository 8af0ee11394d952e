"""The length of a sound from its header: WAV and FLAC. Decoders of compressed formats add or drop samples."""

from __future__ import annotations

import struct

from gateway.tokens.media.data_urls import Bytes
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.riff import chunks
from gateway.tokens.media.sizes import AudioSize

_MOST_CHUNKS = 1000
_PLAIN_WAV = frozenset({1, 3, 0xFFFE})  # whole numbers, floats, and either of them announced by a longer header


def audio_size(data: Bytes) -> AudioSize:
    """Samples of one channel and their rate. Raises ``UnknownMedia``."""
    start = data.read(0, 26)
    try:
        if start[:4] == b"RIFF" and start[8:12] == b"WAVE":
            size = _wav(data)
        elif start[:4] == b"fLaC":
            size = _flac(start)
        else:
            raise UnknownMedia("a sound of a format not known here")
    except (struct.error, IndexError):
        raise UnknownMedia("its header is cut off", refused=True) from None
    if size.samples <= 0 or size.rate_hz <= 0:
        raise UnknownMedia("a sound without samples", refused=True)
    return size


def resampled(size: AudioSize, rate_hz: int) -> int:
    """Samples at another rate, as torchaudio makes them (vLLM 0.32's default): rounded up, in 32-bit floats."""
    if size.rate_hz == rate_hz:
        return size.samples
    exact: float = struct.unpack("f", struct.pack("f", rate_hz * size.samples / size.rate_hz))[0]
    return -int(-exact // 1)


def _wav(data: Bytes) -> AudioSize:
    rate_hz, frame_bytes = 0, 0
    for kind, start, length in chunks(data, _MOST_CHUNKS):
        if kind == b"fmt ":
            form, _, rate_hz, _, frame_bytes = struct.unpack("<HHLLH", data.read(start, 14))
            if form not in _PLAIN_WAV:
                raise UnknownMedia("a compressed WAV")
        elif kind == b"data":
            if not frame_bytes:
                break
            return AudioSize(min(length, data.size - start) // frame_bytes, rate_hz)
    raise UnknownMedia("a WAV without sound", refused=True)


def _flac(start: bytes) -> AudioSize:
    if start[4] & 0x7F:
        raise UnknownMedia("a FLAC without its description", refused=True)
    (bits,) = struct.unpack(">Q", start[18:26])
    samples = bits & 0xF_FFFF_FFFF
    if not samples:
        raise UnknownMedia("a FLAC that does not say how long it is")
    return AudioSize(samples, bits >> 44)
