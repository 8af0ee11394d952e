"""The size of an image from its header: PNG, JPEG, WebP, GIF and BMP, turned as their EXIF orientation says.

Reads what Pillow 13 reads (vLLM 0.32 opens images with it, then applies ``ImageOps.exif_transpose``), but never the
pixels. Other formats that vLLM takes (TIFF, AVIF, JPEG 2000 …) are not known here.
"""

from __future__ import annotations

import struct
import zlib

from gateway.tokens.media.data_urls import Bytes
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.exif import is_turned
from gateway.tokens.media.riff import chunks
from gateway.tokens.media.sizes import ImageSize

# vLLM's VLLM_MAX_IMAGE_PIXELS, and Pillow's own limit against decompression bombs.
MAX_PIXELS = 178_956_970
# Files hold thousands of chunks at most; more is a trap for a loop.
_MOST_CHUNKS = 100_000
_MOST_METADATA_BYTES = 1_000_000
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset({0x00, 0x01, 0xFF, *range(0xD0, 0xD9)})


def image_size(data: Bytes) -> ImageSize:
    """Width and height in pixels as the model gets the image. Raises ``UnknownMedia``."""
    start = data.read(0, 30)
    try:
        if start.startswith(b"\x89PNG\r\n\x1a\n"):
            size = _png(data)
        elif start.startswith(b"\xff\xd8\xff"):
            size = _jpeg(data)
        elif start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            size = _webp(data, start)
        elif start[:6] in (b"GIF87a", b"GIF89a"):
            size = _gif(data)
        elif start[:2] == b"BM":
            size = _bmp(start)
        else:
            raise UnknownMedia("an image of a format not known here")
    except (struct.error, IndexError):
        raise UnknownMedia("its header is cut off", refused=True) from None
    if size.width <= 0 or size.height <= 0:
        raise UnknownMedia(f"an image of {size.width} x {size.height} pixels", refused=True)
    if size.width * size.height > MAX_PIXELS:
        raise UnknownMedia(f"an image of {size.width} x {size.height} pixels is larger than vLLM takes", refused=True)
    return size


def _turned(width: int, height: int, exif: bytes | None, xmp: bytes | None) -> ImageSize:
    return ImageSize(height, width) if is_turned(exif, xmp) else ImageSize(width, height)


def _png(data: Bytes) -> ImageSize:
    width, height, exif, xmp, raw = 0, 0, None, None, None
    at = 8
    for _ in range(_MOST_CHUNKS):
        head = data.read(at, 8)
        if len(head) < 8:
            break
        length, kind = struct.unpack(">L4s", head)
        if kind == b"IHDR":
            width, height = struct.unpack(">LL", data.read(at + 8, 8))
        elif kind == b"eXIf":
            exif = data.read(at + 8, min(length, _MOST_METADATA_BYTES))
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            key, _, text = data.read(at + 8, min(length, _MOST_METADATA_BYTES)).partition(b"\0")
            if key == b"XML:com.adobe.xmp":
                xmp = _png_text(kind, text)
            elif key == b"Raw profile type exif":
                raw = _png_text(kind, text)
        elif kind == b"IEND":
            break
        at += 12 + length
    return _turned(width, height, exif or _raw_profile(raw), xmp)


def _png_text(kind: bytes, text: bytes) -> bytes | None:
    """The text of a chunk after its key; ``None`` if it cannot be unpacked."""
    packed = kind == b"zTXt"
    if kind == b"iTXt":
        packed = text[:1] == b"\1"
        parts = text[2:].split(b"\0", 2)
        text = b"\0" + parts[2] if len(parts) == 3 else b""
    if not packed:
        return text
    try:
        return zlib.decompressobj().decompress(text[1:], _MOST_METADATA_BYTES)
    except zlib.error:
        return None


def _raw_profile(text: bytes | None) -> bytes | None:
    """EXIF as ImageMagick wrote it before PNG had a chunk for it: hexadecimal lines after three others."""
    if text is None:
        return None
    try:
        return bytes.fromhex(b"".join(text.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return None


def _jpeg(data: Bytes) -> ImageSize:
    size, exif, xmp = None, None, None
    at = 2
    for _ in range(_MOST_CHUNKS):
        marker = data.read(at, 4)
        if len(marker) < 4:
            break
        if marker[0] != 0xFF or marker[1] in _JPEG_BARE:  # padding, or bytes that decoders pass over
            at += 2 if marker[0] == 0xFF and marker[1] != 0xFF else 1
            continue
        kind, length = marker[1], struct.unpack(">H", marker[2:])[0]
        if kind == 0xDA:
            break
        if kind in _JPEG_FRAMES:
            height, width = struct.unpack(">HH", data.read(at + 5, 4))
            size = (width, height)
        elif kind == 0xE1:
            part = data.read(at + 4, length - 2)
            if part.startswith(b"Exif\0\0"):
                exif = part if exif is None else exif + part[6:]
            elif part.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
                xmp = part
        at += 2 + length
    if size is None:
        raise UnknownMedia("its header is cut off", refused=True)
    return _turned(*size, exif, xmp)


def _webp(data: Bytes, start: bytes) -> ImageSize:
    kind = start[12:16]
    if kind == b"VP8 ":
        if start[23:26] != b"\x9d\x01\x2a":
            raise UnknownMedia("a broken WebP image", refused=True)
        width, height = struct.unpack_from("<HH", start, 26)
        return ImageSize(width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<xL", start, 20)
        return ImageSize((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8X" or len(start) < 30:
        raise UnknownMedia("a broken WebP image", refused=True)
    width = int.from_bytes(start[24:27], "little") + 1
    height = int.from_bytes(start[27:30], "little") + 1
    exif, xmp = None, None
    for name, at, length in chunks(data, _MOST_CHUNKS):
        if name == b"EXIF":
            exif = data.read(at, min(length, _MOST_METADATA_BYTES))
        elif name == b"XMP ":
            xmp = data.read(at, min(length, _MOST_METADATA_BYTES))
    if start[20] & 8 and exif is None:
        raise UnknownMedia("a WebP image without the EXIF that it announces")
    return _turned(width, height, exif, xmp)


def _gif(data: Bytes) -> ImageSize:
    """The screen, enlarged to hold the first frame."""
    width, height, flags = struct.unpack("<HHB", data.read(6, 5))
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    for _ in range(_MOST_CHUNKS):
        kind = data.read(at, 1)
        if kind == b"!":
            at = _after_gif_blocks(data, at + 2)
        elif kind == b",":
            left, top, frame_width, frame_height = struct.unpack("<HHHH", data.read(at + 1, 8))
            return ImageSize(max(width, left + frame_width), max(height, top + frame_height))
        elif kind and kind != b";":
            at += 1
        else:
            break
    raise UnknownMedia("a GIF without an image", refused=True)


def _after_gif_blocks(data: Bytes, at: int) -> int:
    for _ in range(_MOST_CHUNKS):
        length = data.read(at, 1)
        if length in (b"", b"\0"):
            break
        at += 1 + length[0]
    return at + 1


def _bmp(start: bytes) -> ImageSize:
    (header_bytes,) = struct.unpack_from("<L", start, 14)
    if header_bytes == 12:
        return ImageSize(*struct.unpack_from("<HH", start, 18))
    width, height = struct.unpack_from("<ll", start, 18)
    return ImageSize(width, abs(height))
