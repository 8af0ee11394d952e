"""A raw HTTP/1.1 client that replays prepared bodies over kept connections and checks every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

TIMEOUT_S = 30.0


class LoadError(Exception):
    """An answer was not the one expected; the number it would have given is worthless."""


@dataclass(frozen=True, slots=True)
class Request:
    """A body, its prompt tokens, and how many events its answer must have; 0: an answer that is not a stream."""

    body: bytes
    tokens: int
    events: int = 0


@dataclass(slots=True)
class Tally:
    """What a load did, and the CPU it took the target. Latencies run from the first byte sent to the last received."""

    requests: int = 0
    events: int = 0
    reads: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._need_bytes = 0
        self._chunked = False
        self._body_at = 0
        self.status = 0
        self.reads = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for future in (self._waiter, self._first):
            if future is not None and not future.done():
                future.set_exception(LoadError("the connection was closed in the middle of an answer"))

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self._data += data
        if not self._body_at and not self._read_head():
            return
        if self._first is not None and not self._first.done() and len(self._data) > self._body_at:
            self._first.set_result(None)
        # No event of the canned backend ends in "0\r\n", so these five bytes at the end are the last chunk.
        complete = self._data.endswith(b"0\r\n\r\n") if self._chunked else len(self._data) >= self._need_bytes
        if complete and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._data[:end]).lower()
        self.status = int(head[9:12])
        self._body_at = end + 4
        self._chunked = b"transfer-encoding: chunked" in head
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._need_bytes = self._body_at + int(head[at + 17 :].split(b"\r\n", 1)[0])
        return True

    def _send(self, head: bytes, body: bytes) -> None:
        if self._transport is None:
            raise LoadError("the connection was closed between two requests")
        self._data = bytearray()
        self._body_at = self._need_bytes = self.status = self.reads = 0
        loop = asyncio.get_running_loop()
        self._waiter, self._first = loop.create_future(), loop.create_future()
        self._transport.write(head)
        self._transport.write(body)

    async def fetch(self, head: bytes, request: Request, count_source: str | None = None) -> bytes:
        """Send and wait for the whole answer, which must be as ``request`` says. Raises ``LoadError``.

        ``count_source``: where a gateway must say that its count came from; ``local`` ones must be right, too.
        """
        self._send(head, request.body)
        assert self._waiter is not None and self._first is not None
        await self._waiter
        self._first.cancel()
        answer = bytes(self._data[self._body_at :])
        if self.status != 200:
            raise LoadError(f"status {self.status}: {answer[:300]!r}")
        if count_source is not None:
            self._check_count(request, count_source)
        if request.events:
            events = answer.count(b"data: ")
            if events != request.events or b"data: [DONE]" not in answer:
                raise LoadError(f"{events} events instead of {request.events}; the end is {answer[-300:]!r}")
        elif b'"usage"' not in answer:
            raise LoadError(f"not the answer of the backend: {answer[:300]!r}")
        return answer

    def _check_count(self, request: Request, source: str) -> None:
        head = bytes(self._data[: self._body_at]).lower()
        wanted = [b"\r\nx-kvgate-count-source: %b\r\n" % source.encode()]
        if source == "local":
            wanted.append(b"\r\nx-kvgate-prompt-tokens: %d\r\n" % request.tokens)
        if not all(line in head for line in wanted):
            raise LoadError(f"not counted as {source}, {request.tokens} tokens: {head.decode('latin-1')}")

    async def open_stream(self, head: bytes, body: bytes) -> None:
        """Send and wait for the first bytes of the answer's body only."""
        self._send(head, body)
        assert self._waiter is not None and self._first is not None
        self._waiter.add_done_callback(lambda future: future.cancelled() or future.exception())
        async with asyncio.timeout(TIMEOUT_S):
            await self._first
        if self.status != 200:
            raise LoadError(f"status {self.status}: {bytes(self._data)[:300]!r}")

    def close(self) -> None:
        """Close the connection, whatever is under way."""
        self._waiter = self._first = None
        if self._transport is not None:
            self._transport.abort()


def request_head(port: int, length: int) -> bytes:
    """The head every client in the field sends in one form or another."""
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nuser-agent: OpenAI/Python 3.57.0\r\n"
        f"accept: application/json\r\nauthorization: Bearer none\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


@asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """``count`` open connections to 127.0.0.1:``port``; closed at the end."""
    loop = asyncio.get_running_loop()
    opened: list[Connection] = []
    try:
        for _ in range(count):
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()


async def replay(
    port: int,
    lanes: Sequence[Iterable[Request]],
    tally: Tally,
    opened: list[Connection],
    count_source: str | None = None,
) -> None:
    """Send each lane's requests one after the other over a connection of its own, the lanes side by side."""
    started_s = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        for connection, lane in zip(opened, lanes, strict=True):
            group.create_task(_lane(port, connection, iter(lane), tally, count_source))
    tally.wall_s += time.perf_counter() - started_s


async def _lane(
    port: int, connection: Connection, lane: Iterator[Request], tally: Tally, count_source: str | None
) -> None:
    for request in lane:
        head = request_head(port, len(request.body))
        started_s = time.perf_counter()
        await connection.fetch(head, request, count_source)
        tally.latencies_s.append(time.perf_counter() - started_s)
        tally.requests += 1
        tally.events += request.events
        tally.reads += connection.reads


def repeated(request: Request, seconds: float) -> Callable[[], Iterator[Request]]:
    """A lane that sends the same request until ``seconds`` have passed."""

    def lane() -> Iterator[Request]:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            yield request

    return lane


async def settled(check: Callable[[], Awaitable[None]], timeout_s: float, what: str) -> None:
    """Repeat ``check`` until it raises nothing. Raises ``LoadError`` with its last complaint."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            await check()
            return
        except (OSError, LoadError, TimeoutError) as error:
            if time.monotonic() > end_s:
                raise LoadError(f"{what}: {error or type(error).__name__}") from None
        await asyncio.sleep(0.1)
