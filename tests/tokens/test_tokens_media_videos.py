"""A video's header says what vLLM finds in it, and its frames become the tokens that vLLM makes of them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from gateway.tokens.media.data_urls import Base64Bytes, PlainBytes
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.families import VIDEOS, ProcessorKwargs, family_of
from gateway.tokens.media.family import Family, ModelFiles, Rule
from gateway.tokens.media.frames import video_io_kwargs
from gateway.tokens.media.prompt import expanded, noted
from gateway.tokens.media.sizes import VideoSize
from gateway.tokens.media.videos import video_size

# "files": small videos made with FFmpeg, and width, height, frames and rate by OpenCV 5 as vLLM 0.32 asks it; "tokens":
# width, height, frames, rate; loader arguments of server and request; processor arguments; tokens but those of the
# notes; notes. By vLLM's loaders and processors in process, from real files (MPEG-4, H.264 with and without B-frames,
# HEVC), with transformers 5.19.
KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "media_videos.json").read_text())


@pytest.mark.parametrize("name", KNOWN["files"])
def test_headers_say_what_opencv_says(name: str) -> None:
    known = KNOWN["files"][name]
    size = video_size(Base64Bytes(known["data"]))
    assert [size.width, size.height, size.frames, size.fps] == known["size"]


@pytest.mark.parametrize("name", KNOWN["tokens"])
def test_videos_take_the_tokens_that_vllm_says(name: str) -> None:
    known = KNOWN["tokens"][name]
    files = ModelFiles(known["config"], known["preprocessor"], known["processor"], known["video_preprocessor"])
    wrong = []
    for size, server_io, request_io, kwargs, tokens, notes in known["videos"]:
        given = ProcessorKwargs({}, kwargs, {"video": server_io}, {"video": request_io})
        rule = family_of(files, given, {"video"}).video
        assert rule is not None
        video = VideoSize(*size)
        ours: Any
        try:
            ours = (rule.tokens(video), list(rule.notes(video)) if rule.notes else [])
        except UnknownMedia as error:
            ours = "refused" if error.refused else error.reason
        if ours != ("refused" if tokens == "refused" else (tokens, notes)):
            wrong.append((size, server_io, request_io, kwargs, ours, tokens, notes))
    assert wrong == []


def box(kind: bytes, *content: bytes) -> bytes:
    inside = b"".join(content)
    return struct.pack(">L4s", 8 + len(inside), kind) + inside


def longs(*values: int) -> bytes:
    return struct.pack(f">{len(values)}l", *values)


def movie(
    *,
    frames: int = 50,
    runs: tuple[tuple[int, int], ...] = ((50, 1000),),
    edit: tuple[int, int, int] | None = (2000, 0, 0x10000),
    matrix: tuple[int, int, int, int] = (1, 0, 0, 1),
    codec: bytes = b"avc1",
    tracks: int = 1,
    more: bytes = b"",
) -> bytes:
    """An MP4 file of 320 x 240 pixels, 25 frames a second in units of 1/25000 s, without its pictures."""
    a, b, c, d = (value * 0x10000 for value in matrix)
    table = box(
        b"stbl",
        box(b"stsd", longs(0, 1), longs(86), codec, bytes(24), struct.pack(">HH", 320, 240), bytes(50)),
        box(b"stts", longs(0, len(runs)), *(longs(*run) for run in runs)),
        box(b"stsz", longs(0, 0, frames)),
    )
    edits = box(b"edts", box(b"elst", longs(0, 1, *edit))) if edit is not None else b""
    track = box(
        b"trak",
        box(b"tkhd", bytes(40), longs(a, b, 0, c, d, 0, 0, 0, 1 << 30), bytes(8)),
        edits,
        box(
            b"mdia",
            box(b"mdhd", longs(0, 0, 0, 25_000, 50_000, 0)),
            box(b"hdlr", bytes(8), b"vide", bytes(13)),
            box(b"minf", table),
        ),
    )
    sound = box(b"trak", box(b"mdia", box(b"hdlr", bytes(8), b"soun", bytes(13))))
    header = box(b"mvhd", longs(0, 0, 0, 1000, 2000), bytes(80))
    return box(b"ftyp", b"isom") + box(b"mdat", b"pictures") + box(b"moov", header, sound, track * tracks, more)


def test_a_movie_is_read_with_its_index_behind_the_pictures() -> None:
    assert video_size(PlainBytes(movie())) == VideoSize(320, 240, 50, 25.0)
    assert video_size(PlainBytes(movie(matrix=(0, 1, -1, 0), edit=None))) == VideoSize(240, 320, 50, 25.0)
    assert video_size(PlainBytes(movie(runs=((20, 1000), (30, 1000))))).frames == 50


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1aE\xdf\xa3 a Matroska file",
        movie()[:-20],
        movie()[:30],
        movie(runs=((49, 1000), (1, 2000))),
        movie(runs=((49, 1000),)),
        movie(frames=1, runs=((1, 1000),)),
        movie(runs=((50, 0),)),
        movie(edit=(1000, 0, 0x10000)),
        movie(edit=(2000, 500, 0x10000)),
        movie(edit=(2000, 0, 0x20000)),
        movie(matrix=(-1, 0, 0, 1)),
        movie(codec=b"av01"),
        movie(tracks=2),
        movie(tracks=0),
        movie(more=box(b"mvex")),
        movie() + box(b"moof"),
    ],
)
def test_what_a_header_leaves_open_is_not_counted_here(data: bytes) -> None:
    with pytest.raises(UnknownMedia) as caught:
        video_size(PlainBytes(data))
    assert not caught.value.refused


def test_an_index_beyond_what_was_fetched_is_not_missing() -> None:
    data = movie()
    with pytest.raises(UnknownMedia):
        video_size(PlainBytes(data[:40], len(data)))


def test_base64_is_decoded_only_where_the_header_is() -> None:
    data = box(b"ftyp", b"isom") + box(b"mdat", bytes(30_000)) + movie()[28:]
    text = base64.b64encode(data).decode()
    broken = text[:1000] + "!" * 36_000 + text[37_000:]
    assert video_size(Base64Bytes(broken)).frames == 50


def test_a_request_that_sets_the_rate_unsets_the_servers_number_of_frames() -> None:
    assert video_io_kwargs({"video": {"num_frames": 8, "max_frames": 9}}, {"video": {"fps": 1}}) == {
        "fps": 1,
        "max_frames": 9,
    }
    assert video_io_kwargs({"video": {"fps": 2}}, {"video": {"num_frames": 4}}) == {"num_frames": 4}
    assert video_io_kwargs({}, {"image": {"image_mode": None}}) == {}
    assert video_io_kwargs({"video": {"backend": "opencv", "fps": 3}}, {}) == {"backend": "opencv", "fps": 3}


@pytest.mark.parametrize("io", [{"backend": "torchcodec"}, {"video_backend": "x"}, {"fps": "2"}, {"fps": True}, [1]])
def test_loaders_that_are_not_known_leave_the_count_to_the_backend(io: Any) -> None:
    with pytest.raises(UnknownMedia):
        video_io_kwargs({"video": io}, {})


@pytest.mark.parametrize("name", VIDEOS)
@pytest.mark.parametrize(
    ("settings", "kwargs"), [({"video_processor_type": "Other"}, {}), ({}, {"use_audio_in_video": True})]
)
def test_processors_that_are_not_known_have_no_formula(name: str, settings: Any, kwargs: dict[str, Any]) -> None:
    files = ModelFiles({"architectures": [name]}, video_preprocessor=settings)
    with pytest.raises(UnknownMedia):
        family_of(files, ProcessorKwargs(kwargs), {"video"})


def test_images_are_counted_whatever_would_become_of_videos() -> None:
    files = ModelFiles({"architectures": ["Qwen2VLForConditionalGeneration"]}, {"do_sample_frames": True})
    assert family_of(files, ProcessorKwargs(), {"image"}).image is not None
    with pytest.raises(UnknownMedia):
        family_of(files, ProcessorKwargs(), {"image", "video"})


def test_notes_come_once_a_video() -> None:
    rule: Rule[VideoSize] = Rule("<v>", "<v>", lambda video: video.frames, notes=lambda video: (f"{video.fps}",))
    family, videos = Family(video=rule), [VideoSize(1, 1, 5, 2.0), VideoSize(1, 1, 7, 3.0)]
    assert expanded("a<v>b<v>", videos, family) == ("a<v>b<v>", 5 + 7 - 2)
    assert noted(videos, family) == ("2.0", "3.0")
    assert noted(videos, Family()) == ()
