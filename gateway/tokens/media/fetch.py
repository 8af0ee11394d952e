"""The sizes of media at remote addresses: fetches only as much of each as its header takes, and remembers them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from gateway.tokens.lru import Lru
from gateway.tokens.media.data_urls import PlainBytes
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.prompt import Item, size_of_item
from gateway.tokens.media.sizes import MediaSize

MOST_BYTES = 1 << 20
MOST_ITEMS = 16
_MOST_REDIRECTS = 3
_CHUNK_BYTES = 16_384
_REMEMBERED = 4096
_REMEMBER_S = 300.0


class MediaFetcher:
    """Reads sizes over HTTP. ``private``: whether addresses within the operator's own networks may be asked."""

    def __init__(self, *, private: bool, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._private = private
        self._timeout_s = timeout_s
        self._clock = clock
        self._sizes: Lru[str, tuple[MediaSize, float]] = Lru(_REMEMBERED)

    async def sizes(self, items: Sequence[Item]) -> dict[str, MediaSize]:
        """Sizes of remote items by address, all within the timeout. Raises ``UnknownMedia`` if one cannot be had."""
        remote = {item.url: item for item in items if item.url[:5].lower() != "data:"}
        known: dict[str, MediaSize] = {}
        for url in remote:
            found = self._sizes.get(url)
            if found is not None and self._clock() - found[1] < _REMEMBER_S:
                known[url] = found[0]
        missing = [item for url, item in remote.items() if url not in known]
        if len(missing) > MOST_ITEMS:
            raise UnknownMedia(f"more than {MOST_ITEMS} items at remote addresses")
        if missing:
            known |= zip([item.url for item in missing], await self._fetch_all(missing), strict=True)
        return known

    async def _fetch_all(self, items: Sequence[Item]) -> list[MediaSize]:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(resolver=_Resolver(self._private)), auto_decompress=False
                ) as session,
            ):
                return list(await asyncio.gather(*(self._fetch(session, item) for item in items)))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise UnknownMedia(f"a remote item could not be had: {str(error) or type(error).__name__}") from None

    async def _fetch(self, session: aiohttp.ClientSession, item: Item) -> MediaSize:
        url = item.url
        for _ in range(_MOST_REDIRECTS + 1):
            self._check(url)
            async with session.get(url, allow_redirects=False, headers={"accept-encoding": "identity"}) as answer:
                if answer.status in (301, 302, 303, 307, 308) and "location" in answer.headers:
                    url = urljoin(url, answer.headers["location"])
                    continue
                if answer.status != 200:
                    raise UnknownMedia(f"a remote item is answered with status {answer.status}")
                size = await _size_of(answer, item)
                self._sizes.put(item.url, (size, self._clock()))
                return size
        raise UnknownMedia("a remote item is redirected too often")

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UnknownMedia("an address that is not http")
        try:
            address = ipaddress.ip_address(parts.hostname)
        except ValueError:
            return  # a name: the resolver judges what it stands for
        if not self._private and not is_public(address):
            raise UnknownMedia("an address within private networks")


class _Resolver(AbstractResolver):
    """Resolves names, and refuses those of private addresses: what is checked here is what is connected to."""

    def __init__(self, private: bool) -> None:
        self._private = private
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if not self._private and not all(is_public(ipaddress.ip_address(one["host"])) for one in found):
            raise UnknownMedia("an address within private networks")
        return found

    async def close(self) -> None:
        await self._inner.close()


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is one of the public internet's."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_global and not address.is_multicast


async def _size_of(answer: aiohttp.ClientResponse, item: Item) -> MediaSize:
    """Read until the header is there. Raises ``UnknownMedia`` if it is not within ``MOST_BYTES``."""
    data = bytearray()
    reason = UnknownMedia("a remote item is empty")
    total = answer.content_length
    async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
        data += chunk
        try:
            # How long an image is says nothing of its size; sounds and videos are judged by it.
            return size_of_item(PlainBytes(bytes(data), None if item.modality == "image" else total), item.modality)
        except UnknownMedia as error:
            reason = error
        if len(data) >= MOST_BYTES:
            break
    raise reason
