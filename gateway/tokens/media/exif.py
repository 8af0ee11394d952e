"""The orientation of an image from its EXIF or XMP data, found as Pillow 13 finds it."""

from __future__ import annotations

import re
import struct

_ORIENTATION = 0x0112
_FORMATS = {1: ("B", 1), 3: ("H", 2), 4: ("L", 4)}  # BYTE, SHORT, LONG
_XMP = re.compile(rb'tiff:Orientation(="|>)([0-9])')
_MOST_ENTRIES = 1000


def is_turned(exif: bytes | None, xmp: bytes | None) -> bool:
    """Whether showing the image upright swaps its width and height (orientations 5 to 8)."""
    orientation = exif_orientation(exif) if exif else None
    if orientation is None and xmp:
        found = _XMP.search(xmp)
        orientation = int(found[2]) if found else None
    return orientation in (5, 6, 7, 8)


def exif_orientation(exif: bytes) -> int | None:
    """The orientation tag of the first directory; ``None`` if it has none or cannot be read."""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        (directory,) = struct.unpack_from(f"{order}4xL", exif)
        (entries,) = struct.unpack_from(f"{order}H", exif, directory)
        for index in range(min(entries, _MOST_ENTRIES)):
            at = directory + 2 + 12 * index
            tag, kind, count = struct.unpack_from(f"{order}HHL", exif, at)
            if tag == _ORIENTATION:
                if kind not in _FORMATS or count != 1:
                    return None
                value: int = struct.unpack_from(order + _FORMATS[kind][0], exif, at + 8)[0]
                return value
    except struct.error:
        return None
    return None
