"""Frames, rate and size of a video from the header of an MP4 or MOV file, never from its pictures.

Says what OpenCV 5 says of the file, with which vLLM 0.32 reads videos, and only where the header leaves no doubt: one
H.264, HEVC, MPEG-4 or VP9 track of constant frame rate, not in fragments, of which no frame is hidden by an edit list.
Matroska, WebM and AVI do not state their number of frames; OpenCV guesses it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from gateway.tokens.media.data_urls import Bytes
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.headers import MAX_PIXELS
from gateway.tokens.media.sizes import VideoSize

_MOST_BOXES = 1000
_MOST_TIMES = 100_000
# FFmpeg's av_reduce rounds fractions beyond this.
_MOST_TERM = 2**31 - 1
_CODECS = frozenset({b"avc1", b"avc3", b"hvc1", b"hev1", b"mp4v", b"vp09"})
_Box = tuple[bytes, int, int]
"""Kind, and where its content begins and ends."""

# tkhd's matrix: a, b, c, d of the rotation, in 16.16 fixed point. OpenCV turns frames by it.
_UPRIGHT = frozenset({(1, 0, 0, 1), (-1, 0, 0, -1)})
_TURNED = frozenset({(0, 1, -1, 0), (0, -1, 1, 0)})


def video_size(data: Bytes) -> VideoSize:
    """What the header says of the video. Raises ``UnknownMedia`` where that is not all there is to know."""
    if data.read(4, 4) != b"ftyp":
        raise UnknownMedia("a video of a format whose header does not tell its frames")
    try:
        return _movie(data)
    except (struct.error, IndexError, ZeroDivisionError):
        raise UnknownMedia("a video whose header is cut off") from None


def _movie(data: Bytes) -> VideoSize:
    top = list(_boxes(data, 0, data.size))
    if top[-1][2] > data.size:
        raise UnknownMedia("a video that is cut off")
    movie = _one(top, b"moov", "a video without an index")
    inside = list(_boxes(data, movie[1], movie[2]))
    if any(kind == b"moof" for kind, _, _ in top) or any(kind == b"mvex" for kind, _, _ in inside):
        raise UnknownMedia("a video in fragments")
    movie_scale = _scale(data, _one(inside, b"mvhd", "a video without a time scale"))
    tracks = [list(_boxes(data, start, end)) for kind, start, end in inside if kind == b"trak"]
    pictures = [track for track in tracks if _handler(data, track) == b"vide"]
    if len(pictures) != 1:
        raise UnknownMedia(f"a file with {len(pictures)} video tracks")
    return _track(data, pictures[0], movie_scale)


def _track(data: Bytes, track: list[_Box], movie_scale: int) -> VideoSize:
    media = _inside(data, track, b"mdia")
    scale = _scale(data, _one(media, b"mdhd", "a video without a time scale"))
    tables = _inside(data, _inside(data, media, b"minf"), b"stbl")
    frames, length = _times(data, _one(tables, b"stts", "a video without times"))
    _, start, _ = _one(tables, b"stsz", "a video without sizes")
    if struct.unpack(">L", data.read(start + 8, 4))[0] != frames:
        raise UnknownMedia("a video whose tables do not agree")
    _check_edits(data, track, tables, length * movie_scale / scale)
    width, height = _pixels(data, _one(tables, b"stsd", "a video without a description"))
    if _is_turned(data, _one(track, b"tkhd", "a video track without a header")):
        width, height = height, width
    if not 0 < width * height <= MAX_PIXELS:
        raise UnknownMedia(f"a video of {width} x {height} pixels")
    return VideoSize(width, height, frames, _rate(scale * frames, length))


def _boxes(data: Bytes, at: int, end: int) -> Iterator[_Box]:
    for _ in range(_MOST_BOXES):
        if at + 8 > end:
            return
        length, kind = struct.unpack(">L4s", data.read(at, 8))
        start = at + 8
        if length == 1:
            (length,) = struct.unpack(">Q", data.read(start, 8))
            start += 8
        elif length == 0:
            length = end - at
        if at + length < start:
            raise UnknownMedia("a video with a broken box")
        yield kind, start, at + length
        at += length
    raise UnknownMedia("a video of very many boxes")


def _one(boxes: list[_Box], kind: bytes, otherwise: str) -> _Box:
    found = [box for box in boxes if box[0] == kind]
    if len(found) != 1:
        raise UnknownMedia(otherwise)
    return found[0]


def _inside(data: Bytes, boxes: list[_Box], kind: bytes) -> list[_Box]:
    _, start, end = _one(boxes, kind, "a video with an incomplete track")
    return list(_boxes(data, start, end))


def _handler(data: Bytes, track: list[_Box]) -> bytes:
    _, start, _ = _one(_inside(data, track, b"mdia"), b"hdlr", "a track that does not say what it holds")
    return data.read(start + 8, 4)


def _scale(data: Bytes, box: _Box) -> int:
    """Units of time in a second, of a movie or of a track."""
    start = box[1]
    (scale,) = struct.unpack(">L", data.read(start + (20 if data.read(start, 1) == b"\1" else 12), 4))
    return int(scale)


def _times(data: Bytes, box: _Box) -> tuple[int, int]:
    """How many frames there are, and for how many units of time they are shown altogether.

    Of varying rates vLLM finds the number of frames by a seek to the end, which misses some.
    """
    (entries,) = struct.unpack(">L", data.read(box[1] + 4, 4))
    if entries > _MOST_TIMES:
        raise UnknownMedia("a video of very many times")
    runs = list(struct.iter_unpack(">LL", data.read(box[1] + 8, entries * 8)))
    frames, length = sum(count for count, _ in runs), sum(count * step for count, step in runs)
    if len({step for _, step in runs}) > 1:
        raise UnknownMedia("a video of varying frame rate")
    if frames < 2 or not length:  # FFmpeg does not show the only frame of a file
        raise UnknownMedia("a video of hardly any frames")
    return frames, length


def _rate(frames: int, time: int) -> float:
    common = math.gcd(frames, time)
    if max(frames, time) // common > _MOST_TERM:
        raise UnknownMedia("a video whose frame rate is no simple fraction")
    return frames / time


def _pixels(data: Bytes, box: _Box) -> tuple[int, int]:
    (entries,) = struct.unpack(">L", data.read(box[1] + 4, 4))
    codec = data.read(box[1] + 12, 4)
    if entries != 1 or codec not in _CODECS:
        raise UnknownMedia("a video of a codec not known here")
    width, height = struct.unpack(">HH", data.read(box[1] + 40, 4))
    return int(width), int(height)


def _is_turned(data: Bytes, box: _Box) -> bool:
    start = box[1] + (52 if data.read(box[1], 1) == b"\1" else 40)
    a, b, _, c, d = struct.unpack(">lllll", data.read(start, 20))
    rotation = tuple(value / 65536 for value in (a, b, c, d))
    if rotation not in _UPRIGHT | _TURNED:
        raise UnknownMedia("a video that is mirrored, skewed or scaled")
    return rotation in _TURNED


def _check_edits(data: Bytes, track: list[_Box], tables: list[_Box], whole: float) -> None:
    """Raise ``UnknownMedia`` for an edit list that hides frames, delays them or plays them at another speed.

    ``whole``: the track's length in the movie's units of time, to which lists round theirs. A list that begins at the
    first frame's own offset, as frames stored out of order need it, and lasts so long changes nothing.
    """
    if not any(kind == b"edts" for kind, _, _ in track):
        return
    _, start, _ = _one(_inside(data, track, b"edts"), b"elst", "a video with an empty edit list")
    wide = data.read(start, 1) == b"\1"
    (entries,) = struct.unpack(">L", data.read(start + 4, 4))
    length, begin, rate = struct.unpack(">QqL" if wide else ">LlL", data.read(start + 8, 20 if wide else 12))
    offset = 0
    if any(kind == b"ctts" for kind, _, _ in tables):
        _, at, _ = _one(tables, b"ctts", "a video with two tables of offsets")
        (offset,) = struct.unpack(">l", data.read(at + 12, 4))
    if entries != 1 or begin != offset or rate != 0x10000 or length + 1 <= whole:
        raise UnknownMedia("a video of which an edit list shows only a part")
