"""Sizes of images and sounds are read from the first bytes, as vLLM sees them, and broken ones harm nobody."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens.media.data_urls import Base64Bytes, PlainBytes, data_url_bytes
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.headers import image_size
from gateway.tokens.media.sizes import AudioSize, ImageSize
from gateway.tokens.media.sounds import audio_size, resampled

# Written by Pillow 13 in all its ways (progressive, animated, EXIF, XMP, comments …); sizes are those of vLLM 0.32's
# image loader: Pillow, then ImageOps.exif_transpose.
IMAGES = json.loads((Path(__file__).parent / "media_images.json").read_text())


def png(width: int, height: int, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG file with ``extra`` chunks, of no pixels."""
    header = struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", b"x" * 5000), *extra, (b"IEND", b"")]
    packed = b"".join(
        struct.pack(">L", len(data)) + kind + data + struct.pack(">L", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + packed


def exif(orientation: int, order: str = ">") -> bytes:
    return struct.pack(
        f"{order}2sHLHHHLHHL", b"MM" if order == ">" else b"II", 42, 8, 1, 0x112, 3, 1, orientation, 0, 0
    )


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: f"{image['format']}-{'x'.join(map(str, image['size']))}")
def test_sizes_are_those_of_vllms_loader(image: dict[str, object]) -> None:
    data = data_url_bytes(f"data:image/any;base64,{image['data']}")
    assert data is not None
    assert image_size(data) == ImageSize(*image["size"])  # type: ignore[misc]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientations_that_lie_on_their_side_swap_the_sides(orientation: int, order: str) -> None:
    turned = orientation in (5, 6, 7, 8)
    for place in ("exif after the pixels", "profile of old tools"):
        raw = b"\nexif\n      38\n" + exif(orientation, order).hex().encode()
        chunk = (
            (b"eXIf", exif(orientation, order))
            if place == "exif after the pixels"
            else (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw))
        )
        assert image_size(PlainBytes(png(40, 30, chunk))) == (ImageSize(30, 40) if turned else ImageSize(40, 30))


def test_only_the_headers_of_a_large_image_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "data:image/png;base64," + base64.b64encode(png(9000, 8000, (b"IDAT", b"y" * 9_000_000))).decode()
    read = 0
    original = Base64Bytes.read

    def counted(self: Base64Bytes, offset: int, count: int) -> bytes:
        nonlocal read
        found = original(self, offset, count)
        read += len(found)
        return found

    monkeypatch.setattr(Base64Bytes, "read", counted)
    data = data_url_bytes(text)
    assert data is not None
    assert image_size(data) == ImageSize(9000, 8000)
    assert read < 200


@given(st.binary(max_size=200), st.integers(0, 220), st.integers(0, 220))
def test_base64_is_read_at_any_place(data: bytes, offset: int, count: int) -> None:
    encoded = Base64Bytes("xyz" + base64.b64encode(data).decode(), 3)
    assert encoded.size == len(data)
    assert encoded.read(offset, count) == data[offset : offset + count]


@given(st.sampled_from([base64.b64decode(image["data"]) for image in IMAGES]), st.data())
def test_no_damage_raises_anything_else(original: bytes, data: st.DataObject) -> None:
    damaged = bytearray(original[: data.draw(st.integers(0, len(original)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        size = image_size(PlainBytes(bytes(damaged)))
    except UnknownMedia:
        return
    assert size.width > 0
    assert size.height > 0


@given(st.binary(max_size=300))
def test_nor_do_bytes_that_are_no_image_or_sound(data: bytes) -> None:
    for start in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"RIFF....WEBPVP8X", b"RIFF....WAVE"):
        for measure in (image_size, audio_size):
            try:
                measure(PlainBytes(start + data))
            except UnknownMedia as error:
                assert error.reason


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("data:image/png;base64", True),
        ("data:image/png,%89PNG", True),
        ("data:image/png;base64,abc", True),
        ("data:image/png;base64,", False),
        ("data:image/png;base64,aGVsbG8=", False),
        ("data:image/png;base64,iVBORw0KGgo\u00e4", True),
        ("data:image/png;base64," + base64.b64encode(png(0, 10)).decode(), True),
        ("data:image/png;base64," + base64.b64encode(png(20_000, 20_000)).decode(), True),
        ("data:image/gif;base64," + base64.b64encode(b"GIF89a\1\0\1\0\0\0\0;").decode(), True),
    ],
)
def test_what_is_no_image_has_a_reason(url: str, refused: bool) -> None:
    with pytest.raises(UnknownMedia) as caught:
        data = data_url_bytes(url)
        assert data is not None
        image_size(data)
    assert caught.value.refused is refused


def test_a_data_url_may_have_capitals_and_parameters() -> None:
    text = "DATA:image/png;charset=x;base64," + base64.b64encode(png(3, 4)).decode()
    data = data_url_bytes(text)
    assert data is not None
    assert image_size(data) == ImageSize(3, 4)
    assert data_url_bytes("https://example.org/a.png") is None


def wav(samples: int, rate_hz: int, channels: int = 1, form: int = 1) -> bytes:
    data = bytes(samples * channels * 2)
    described = struct.pack("<HHLLHH", form, channels, rate_hz, rate_hz * channels * 2, channels * 2, 16)
    chunks = (
        b"fmt " + struct.pack("<L", 16) + described + b"LIST\3\0\0\0abc\0data" + struct.pack("<L", len(data)) + data
    )
    return b"RIFF" + struct.pack("<L", 4 + len(chunks)) + b"WAVE" + chunks


def test_wav_and_flac_say_how_long_they_are() -> None:
    assert audio_size(PlainBytes(wav(1234, 44_100, channels=2))) == AudioSize(1234, 44_100)
    flac = b"fLaC\x00\0\0\x22" + bytes(10) + struct.pack(">Q", 48_000 << 44 | 1 << 41 | 15 << 36 | 96_001)
    assert audio_size(PlainBytes(flac)) == AudioSize(96_001, 48_000)


def test_sounds_whose_length_is_not_in_the_header_are_unknown() -> None:
    for data in (wav(10, 8000, form=2), b"ID3\4\0\0" + bytes(40), b"OggS" + bytes(40)):
        with pytest.raises(UnknownMedia):
            audio_size(PlainBytes(data))


@pytest.mark.parametrize(
    ("size", "rate_hz", "samples"),
    [
        (AudioSize(44_100, 44_100), 16_000, 16_000),
        (AudioSize(100, 16_000), 16_000, 100),
        (AudioSize(1, 48_000), 16_000, 1),
    ],
)
def test_resampling_rounds_up(size: AudioSize, rate_hz: int, samples: int) -> None:
    assert resampled(size, rate_hz) == samples
