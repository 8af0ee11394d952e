"""Remote media are looked at only as far as allowed: addresses, bytes, redirects and time are bounded."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
import zlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from gateway.tokens.media import fetch
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.fetch import MediaFetcher, is_public
from gateway.tokens.media.prompt import Item
from gateway.tokens.media.sizes import ImageSize


def png_start(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">L", 13) + header + struct.pack(">L", zlib.crc32(header))


class Site:
    """A web server of images on the loopback. ``sent``: bytes it could send of an endless image."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.sent = 0
        self.base = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path == "/again":
            raise web.HTTPFound("/again")
        if request.path == "/moved":
            raise web.HTTPFound("/small.png")
        if request.path == "/away":
            raise web.HTTPFound("file:///etc/passwd")
        if request.path == "/slow":
            await asyncio.sleep(30)
        if request.path == "/missing":
            raise web.HTTPNotFound
        if request.path in ("/large.png", "/endless"):
            response = web.StreamResponse()
            await response.prepare(request)
            first = png_start(4000, 3000) + struct.pack(">L", 50_000_000) + b"IDAT"
            for block in [first if request.path == "/large.png" else b"\xff\xd8\xff", *[b"\0" * 65_536] * 400]:
                await response.write(block)
                self.sent += len(block)
            return response
        return web.Response(body=png_start(30, 20) + bytes(200))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    pages = Site()
    app = web.Application()
    app.router.add_get("/{name}", pages.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    assert runner.addresses
    pages.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield pages
    await runner.cleanup()


def items(*urls: str) -> list[Item]:
    return [Item("image", url) for url in urls]


def fetcher(*, private: bool = True, timeout_s: float = 5.0) -> MediaFetcher:
    return MediaFetcher(private=private, timeout_s=timeout_s)


async def test_sizes_are_read_and_remembered(site: Site) -> None:
    ours, urls = fetcher(), (f"{site.base}/small.png", f"{site.base}/moved")
    for _ in range(2):
        assert await ours.sizes(items(*urls, "data:,")) == dict.fromkeys(urls, ImageSize(30, 20))
    assert sorted(site.asked) == ["/moved", "/small.png", "/small.png"]


async def test_what_is_remembered_is_asked_again_after_a_while(site: Site) -> None:
    now = [0.0]
    ours = MediaFetcher(private=True, timeout_s=5.0, clock=lambda: now[0])
    await ours.sizes(items(f"{site.base}/small.png"))
    now[0] = 1000.0
    await ours.sizes(items(f"{site.base}/small.png"))
    assert len(site.asked) == 2


async def test_only_the_header_of_a_large_image_is_fetched(site: Site) -> None:
    url = f"{site.base}/large.png"
    assert await fetcher().sizes(items(url)) == {url: ImageSize(4000, 3000)}
    assert site.sent < 10_000_000


@pytest.mark.parametrize("path", ["/again", "/away", "/missing", "/endless"])
async def test_what_cannot_be_had_has_no_size(site: Site, path: str) -> None:
    with pytest.raises(UnknownMedia):
        await fetcher().sizes(items(f"{site.base}{path}"))
    assert site.sent < 20_000_000


async def test_slow_servers_are_not_waited_for(site: Site) -> None:
    with pytest.raises(UnknownMedia):
        await fetcher(timeout_s=0.2).sizes(items(f"{site.base}/slow"))


async def test_private_addresses_are_refused_unless_allowed(site: Site) -> None:
    port = site.base.rpartition(":")[2]
    for url in (f"{site.base}/small.png", f"http://localhost:{port}/small.png", f"http://[::ffff:127.0.0.1]:{port}/a"):
        with pytest.raises(UnknownMedia):
            await fetcher(private=False).sizes(items(url))
    assert site.asked == []


@pytest.mark.parametrize("url", ["ftp://x/a", "http://", "nonsense", "http://[bad/a", "http://nowhere.invalid/a"])
async def test_addresses_that_are_none_have_no_size(url: str) -> None:
    with pytest.raises(UnknownMedia):
        await fetcher().sizes(items(url))


async def test_not_more_than_a_few_are_fetched_for_one_request() -> None:
    with pytest.raises(UnknownMedia):
        await fetcher().sizes(items(*(f"http://127.0.0.1:1/{index}" for index in range(fetch.MOST_ITEMS + 1))))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("::1", False),
        ("::ffff:10.0.0.1", False),
        ("224.0.0.1", False),
        ("100.64.0.1", False),
        ("2606:4700::1111", True),
        ("fd00::1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public
