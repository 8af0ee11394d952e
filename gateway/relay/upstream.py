"""The one way to a backend: an HTTP exchange over aiohttp, whose body can be cut off at any moment.

aiohttp and not httpx2 here: on one core it relays several times as many requests, at half the CPU per chunk.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
from yarl import URL

from gateway.config import RelaySettings
from gateway.exceptions import BackendFailed, BackendLost, BackendTimeout

# vLLM's uvicorn closes idle connections after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). Ours go first, so that no request is
# written into a connection which is just being closed.
KEEPALIVE_S = 4.0

READ_BUFFER_BYTES = 1 << 18

# A kept connection may be closed by the backend in the moment a request is written into it (nginx does so after
# keepalive_requests). That says nothing of the backend, so the request goes out again, on a new connection.
_CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)


LOST = "The backend is down: it has sent nothing for a while, and does not answer. Try again."


class Pulse(Protocol):
    """Whether anything is heard of a backend."""

    def heard(self) -> None:
        """A byte came."""

    def listen(self, key: object, tell: Callable[[], None]) -> None:
        """Have ``tell`` called once when the backend is lost; now, if it is."""

    def ignore(self, key: object) -> None:
        """Tell whoever listens by ``key`` nothing any more."""


class Unwatched:
    """The pulse of a server that nobody looks at: it is never lost."""

    def heard(self) -> None:
        """Nobody asks."""

    def listen(self, key: object, tell: Callable[[], None]) -> None:
        """Nothing will be told."""

    def ignore(self, key: object) -> None:
        """Nothing would have been."""


UNWATCHED = Unwatched()


class UpstreamResponse:
    """An answer that has begun. ``headers`` names are lower case. Close it, or its connection is lost to the pool.

    It is cut off when the backend is ``lost``, as its ``pulse`` tells.
    """

    __slots__ = ("_closed", "_pulse", "_response", "headers", "lost", "status", "timed_out")

    def __init__(self, response: aiohttp.ClientResponse, pulse: Pulse) -> None:
        self._response = response
        self._pulse = pulse
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self.timed_out = self.lost = False
        self._closed = _closed(response)
        if self._closed is not None:
            self._closed.add_done_callback(self._break_off)
        pulse.heard()
        pulse.listen(self, self._lose)

    async def chunk(self) -> bytes:
        """The next bytes of the body, as they arrived; ``b""`` at its end.

        Raises ``BackendTimeout`` if ``expire`` was called, ``BackendLost`` if the backend is down and silent, and
        ``BackendFailed`` if it broke off.
        """
        try:
            data = await self._response.content.readany()
            self._pulse.heard()
            return data
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failure(error) from error

    async def read(self, limit_bytes: int, idle_s: float) -> bytes:
        """The whole body. Raises as ``chunk``, ``BackendTimeout`` after a silence of ``idle_s`` and ``BackendFailed``
        beyond ``limit_bytes``.
        """
        parts: list[bytes] = []
        size = 0
        while part := await self.chunk_within(idle_s):
            parts.append(part)
            size += len(part)
            if size > limit_bytes:
                self.close()
                raise BackendFailed(f"The backend's answer is larger than {limit_bytes} bytes.")
        return b"".join(parts)

    async def chunk_within(self, idle_s: float) -> bytes:
        """``chunk``; raises ``BackendTimeout`` after a silence of ``idle_s``."""
        try:
            async with asyncio.timeout(idle_s):
                return await self.chunk()
        except TimeoutError as error:
            self.expire()
            raise self._failure(error) from None

    def expire(self) -> None:
        """Cut the exchange off because the backend was silent for too long."""
        self.timed_out = True
        self._break_off()
        self.close()

    def _lose(self) -> None:
        self.lost = True
        self._break_off()
        self.close()

    def close(self) -> None:
        """Close the connection unless the answer was read to its end: vLLM then aborts and frees its blocks."""
        self._forget()
        self._response.close()

    def release(self) -> None:
        """Give the connection back to the pool after the whole answer was read."""
        self._forget()
        self._response.release()

    def _break_off(self, _: object = None) -> None:
        """Wake whoever waits for the body. aiohttp (3.14) itself leaves him waiting for ever when the connection ends
        because a chunk's size was garbage.
        """
        content = self._response.content
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection ended"))

    def _forget(self) -> None:
        self._pulse.ignore(self)
        if self._closed is not None:
            self._closed.remove_done_callback(self._break_off)

    def _failure(self, error: Exception) -> BackendFailed:
        if self.lost:
            return BackendLost(LOST)
        if self.timed_out:
            return BackendTimeout("The backend sent nothing for too long and was cut off. Try again.")
        return BackendFailed(f"The backend broke off its answer ({type(error).__name__}). Try again.")


class Upstream:
    """Connections to all backends, kept alive and reused. An async context manager."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = self._pool(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=60))
        self._fresh = self._pool(aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=60))
        return self

    def _pool(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            trace_configs=[tracing],
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s),
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in (self._session, self._fresh):
            if session is not None:
                await session.close()
        self._session = self._fresh = None

    async def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
        pulse: Pulse = UNWATCHED,
    ) -> UpstreamResponse:
        """Send a request and return when the status line and headers are there. ``url`` is sent as it stands.

        Raises ``BackendTimeout`` when that takes longer than ``timeout_s``, ``BackendLost`` when ``pulse`` tells before
        that the backend is down and silent, and ``BackendFailed`` when it cannot be reached, hangs up or does not speak
        HTTP.
        """
        limit = asyncio.timeout(timeout_s)
        lost = False

        def lose() -> None:
            nonlocal lost
            lost = True
            if not limit.expired():
                limit.reschedule(0.0)

        try:
            async with limit:
                pulse.listen(limit, lose)
                try:
                    response = await self._request(method, URL(url, encoded=True), headers, body)
                finally:
                    pulse.ignore(limit)
        except TimeoutError as error:
            if lost:
                raise BackendLost(LOST) from error
            if isinstance(error, aiohttp.ServerTimeoutError):
                raise BackendFailed("The backend cannot be reached: connecting took too long. Try again.") from error
            raise BackendTimeout("The backend did not begin to answer in time. Try again.") from error
        except (aiohttp.ClientError, OSError, ssl.SSLError, ValueError) as error:
            raise BackendFailed(f"The backend cannot be reached or hung up ({_gist(error)}). Try again.") from error
        return UpstreamResponse(response, pulse)

    async def _request(
        self, method: str, url: URL, headers: Mapping[str, str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "Upstream is used outside its context"
        assert self._fresh is not None
        reused: list[bool] = []
        ask: dict[str, Any] = {"headers": headers, "data": body, "allow_redirects": False, "raise_for_status": False}
        try:
            return await self._session.request(method, url, trace_request_ctx=reused, **ask)
        except _CLOSED:
            if not reused:
                raise
        return await self._fresh.request(method, url, trace_request_ctx=reused, **ask)


async def _note_reuse(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
    context.trace_request_ctx.append(True)


def _closed(response: aiohttp.ClientResponse) -> asyncio.Future[None] | None:
    """A future that is done when the connection of ``response`` ends; ``None`` if the body was here at once."""
    protocol = response.connection.protocol if response.connection is not None else None
    closed = protocol.closed if protocol is not None else None
    if closed is not None:
        closed.remove_done_callback(_take_exception)  # connections serve many requests: once is enough
        closed.add_done_callback(_take_exception)
    return closed


def _take_exception(closed: asyncio.Future[None]) -> None:
    if not closed.cancelled():
        closed.exception()  # else asyncio logs that nobody did


def _gist(error: Exception) -> str:
    """The kind of a failure without addresses: backends are none of the client's business."""
    number = error.os_error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    if number is not None and number > 0:
        return os.strerror(number)  # the error's own text holds the address: Connect call failed ('10.0.0.1', 8000)
    return type(error).__name__
