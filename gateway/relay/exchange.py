"""One answer on its way from a backend to the client: a stream of events, or a whole body."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.config import RelaySettings
from gateway.exceptions import BackendFailed, GatewayError, ShuttingDown
from gateway.relay.client import Client
from gateway.relay.events import EventStream
from gateway.relay.upstream import UpstreamResponse

KEEPALIVE = b": keep-alive\n\n"  # Continue ends a stream at a line that starts with ": ping"

FAREWELL_S = 1.0  # for the last event of a stream that a shutdown ends

HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# Written anew by us or by our server.
REPLACED = HOP_BY_HOP | {"content-length", "date", "server", "x-request-id"}


class Holder(Protocol):
    """Whatever holds KV blocks for the request (a lease)."""

    def first_byte(self) -> None:
        """The prompt is in the backend's cache now."""

    def grow(self, tokens: int) -> None:
        """So many more tokens were generated."""


@dataclass(slots=True)
class Progress:
    """What is known of an exchange so far. ``first_byte_s`` is of ``time.monotonic``."""

    first_byte_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


def passed_headers(response: UpstreamResponse) -> list[tuple[str, str]]:
    """The backend's headers that belong to the client."""
    return [(name, value) for name, value in response.headers.items() if name not in REPLACED]


def is_event_stream(response: UpstreamResponse) -> bool:
    """Whether the body is a stream of server-sent events."""
    return response.headers.get("content-type", "").startswith("text/event-stream")


class Watchdog:
    """Keeps a silent stream alive for the client, and cuts off a backend that is silent for too long.

    One timer an exchange, re-armed only when it fires: relaying a chunk costs no timer. ``touch`` marks life;
    ``streaming`` allows comments to the client. While the client has yet to take what was sent, it is the client that
    keeps us waiting: if it reads nothing for as long, it is dropped, and the backend is not blamed.
    """

    __slots__ = (
        "_client",
        "_comment",
        "_handle",
        "_last_s",
        "_limit_s",
        "_loop",
        "_response",
        "_settings",
        "streaming",
    )

    def __init__(
        self, client: Client, response: UpstreamResponse, settings: RelaySettings, first_byte_s: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._response = response
        self._settings = settings
        self._limit_s = first_byte_s
        self._last_s = self._loop.time()
        self._comment: asyncio.Task[None] | None = None
        self.streaming = False
        self._handle = self._loop.call_later(self._pause(), self._tick)

    def touch(self) -> None:
        """The backend sent something."""
        self._last_s = self._loop.time()
        self._limit_s = self._settings.idle_timeout_s

    def stop(self) -> None:
        """No more comments, no more cutting off."""
        self._handle.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _pause(self) -> float:
        return min(self._settings.keepalive_s, self._settings.idle_timeout_s, self._limit_s)

    def _tick(self) -> None:
        silent_s = self._loop.time() - self._last_s
        if silent_s >= self._limit_s:
            if self._client.writing:
                self._client.drop()
                return
            self._response.expire()
            self._last_s, silent_s = self._loop.time(), 0.0  # the client has as long to take the error
        if (
            self.streaming
            and not self._client.writing
            and silent_s >= self._settings.keepalive_s
            and (self._comment is None or self._comment.done())
        ):
            self._comment = self._loop.create_task(self._client.body(KEEPALIVE))
        self._handle = self._loop.call_later(min(self._pause(), self._limit_s - silent_s), self._tick)


async def relay_events(
    client: Client,
    response: UpstreamResponse,
    headers: Iterable[tuple[str, str]],
    events: EventStream,
    holder: Holder,
    progress: Progress,
    settings: RelaySettings,
    failure: Callable[[GatewayError], bytes],
    first: bytes | None = None,
    held: bool = False,
) -> None:
    """Relay a stream of events as it arrives. ``failure`` words an error for a stream that has begun. ``first``: what
    was read of it already, if anything; ``held``: that was waited for long enough.

    The status waits up to ``hold_headers_s`` for the first byte: until then a failure raises ``BackendFailed`` with
    nothing sent, so that another backend can take over. So it can afterwards, until the first event, if the client can
    take back that its answer was started. Else a failure ends the stream with an error event and is raised, too.
    """
    begun = False
    watchdog = Watchdog(client, response, settings, settings.first_byte_timeout_s)
    try:
        data = first
        if data is None and not held:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.hold_headers_s):
                    data = await response.chunk()
        if data == b"":
            raise BackendFailed("The backend ended its answer before it began. Try again.")
        if data is not None:
            watchdog.touch()
            refused = None if client.started else events.early_error(data)
            if refused is not None:
                raise refused
        await client.start(response.status, headers)
        watchdog.streaming = True
        if data is None:
            data = await response.chunk()
        begun = bool(data)
        progress.first_byte_s = time.monotonic()
        holder.first_byte()
        while data:
            watchdog.touch()
            out = events.feed(data)
            holder.grow(events.take_new())
            if out:
                await client.body(out)
                watchdog.touch()
            data = await response.chunk()
        rest = events.close()
        if not events.finished:
            raise BackendFailed("The backend ended its answer in the middle. Try again.")
        response.release()
        watchdog.streaming = False
        await client.end(rest)
    except BackendFailed as error:
        watchdog.streaming = False
        if client.started and (begun or not client.take_back()):
            await client.end(failure(error))  # a torn event in the buffer would only break the client's parser
        raise
    except asyncio.CancelledError:
        if client.started and not client.gone:  # our server shuts down; a stream must not just break off
            watchdog.streaming = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await client.end(failure(ShuttingDown("The gateway is shutting down. Try again.")))
        raise
    finally:
        watchdog.stop()
        response.close()
        progress.prompt_tokens, progress.output_tokens = events.prompt_tokens, events.output_tokens
        progress.cached_tokens = events.cached_tokens


async def relay_bytes(
    client: Client,
    response: UpstreamResponse,
    headers: Iterable[tuple[str, str]],
    holder: Holder,
    progress: Progress,
    settings: RelaySettings,
) -> None:
    """Relay any other body as it arrives, untouched. A failure after the start can only cut the connection short."""
    watchdog = Watchdog(client, response, settings, settings.idle_timeout_s)
    try:
        data = await response.chunk()
        progress.first_byte_s = time.monotonic()
        holder.first_byte()
        watchdog.touch()
        length = response.headers.get("content-length")
        await client.start(response.status, [*headers, *((("content-length", length),) if length else ())])
        while data:
            watchdog.touch()
            await client.body(data)
            watchdog.touch()
            data = await response.chunk()
        response.release()
        await client.end()
    finally:
        watchdog.stop()
        response.close()
