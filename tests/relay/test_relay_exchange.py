"""A stream or a body on its way, from a backend on loopback to a client in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from relay_wires import CHUNKED, DONE, LAST, Server, Wire, chunk, event, sends, serving

from gateway.api.errors import sse_error
from gateway.api.upstream_errors import event_error
from gateway.config import RelaySettings
from gateway.exceptions import BackendFailed, BackendTimeout, ClientGone, ContextOverflow
from gateway.relay.events import EventStream
from gateway.relay.exchange import KEEPALIVE, Progress, relay_bytes, relay_events
from gateway.relay.repair import StreamRepair
from gateway.relay.upstream import Upstream
from gateway.types import Ask, Dialect

ASK = Ask(Dialect.CHAT, "/v1/chat/completions", "m", None, b"{}", {}, stream=True)


class Holder:
    """Counts what a lease would be told."""

    def __init__(self) -> None:
        self.first_bytes = 0
        self.tokens = 0

    def first_byte(self) -> None:
        self.first_bytes += 1

    def grow(self, tokens: int) -> None:
        self.tokens += tokens


class Relay:
    """One exchange to run."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.holder = Holder()
        self.progress = Progress()

    async def events(self, server: Server, wire: Wire, **settings: Any) -> None:
        async with wire.client() as client:
            response = await self._upstream.open("POST", server.url, {}, b"{}", 2)
            await relay_events(
                client,
                response,
                [("content-type", "text/event-stream")],
                EventStream(ASK, StreamRepair(ASK.dialect, read_error=lambda data: event_error(data, ASK.dialect))),
                self.holder,
                self.progress,
                RelaySettings(**settings),
                lambda error: sse_error(error, ASK.dialect),
            )

    async def bytes(self, server: Server, wire: Wire, **settings: Any) -> None:
        async with wire.client() as client:
            response = await self._upstream.open("POST", server.url, {}, b"{}", 2)
            await relay_bytes(client, response, [], self.holder, self.progress, RelaySettings(**settings))


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    async with Upstream(RelaySettings()) as upstream:
        yield Relay(upstream)


def assert_ended_with_an_error(wire: Wire, code: str) -> None:
    error, done = wire.body.split(b"\n\n")[-3:-1]
    assert code.encode() in error
    assert error.startswith(b"data: ")
    assert done == b"data: [DONE]"
    assert wire.complete


async def test_a_stream_arrives_whole_and_its_tokens_are_told(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED, event("a"), LAST, DONE)) as server:
        await relay.events(server, wire)
    assert wire.status == 200
    assert wire.body.count(b"data:") == 3
    assert wire.complete
    assert (relay.holder.first_bytes, relay.holder.tokens) == (1, 2)
    assert relay.progress.first_byte_s is not None


@pytest.mark.parametrize(
    ("message", "code", "raised"),
    [
        ("Input length (40) exceeds model's maximum context length (32).", 400, ContextOverflow),
        ("EngineCore encountered an issue.", 500, BackendFailed),
    ],
)
async def test_an_error_that_begins_a_stream_can_still_be_told_by_its_status(
    relay: Relay, message: str, code: int, raised: type[Exception]
) -> None:
    wire = Wire()
    error = chunk(b'data: {"error":{"message":"%s","type":"x","code":%d}}\n\n' % (message.encode(), code))
    async with serving(sends(CHUNKED, error, DONE)) as server:
        with pytest.raises(raised):
            await relay.events(server, wire)
    assert wire.status is None
    assert wire.body == b""


@pytest.mark.parametrize("answer", [[], [event("a")]], ids=["before-the-first-byte", "mid-stream"])
async def test_a_hang_up_closes_the_backend_at_once(relay: Relay, answer: list[bytes]) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED, *answer, None)) as server:
        task = asyncio.create_task(relay.events(server, wire))
        await asyncio.sleep(0.1)
        began_s = time.monotonic()
        wire.hang_up()
        with pytest.raises(ClientGone):
            await task
        await asyncio.wait_for(server.closed.wait(), 1)
        assert time.monotonic() - began_s < 0.1


async def test_a_shutdown_closes_the_backend_and_is_no_hang_up(relay: Relay) -> None:
    async with serving(sends(CHUNKED, event("a"), None)) as server:
        wire = Wire()
        task = asyncio.create_task(relay.events(server, wire))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.closed.wait(), 0.1)
    assert_ended_with_an_error(wire, "shutting_down")


async def test_a_slow_backend_gets_its_headers_sent_and_comments_keep_the_client_waiting(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED, 0.4, event("a"), DONE)) as server:
        task = asyncio.create_task(relay.events(server, wire, hold_headers_s=0.1, keepalive_s=0.05))
        await asyncio.sleep(0.05)
        assert wire.status is None
        await asyncio.sleep(0.25)
        assert wire.status == 200
        assert wire.body == KEEPALIVE * wire.body.count(KEEPALIVE) != b""
        await task
    assert wire.body.endswith(b"data: [DONE]\n\n")
    assert wire.complete


async def test_a_failure_before_the_first_byte_leaves_the_client_unanswered_for_another_backend(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED)) as server:
        with pytest.raises(BackendFailed):
            await relay.events(server, wire)
    assert wire.sent == []
    assert relay.holder.first_bytes == 0


async def test_an_empty_stream_leaves_the_client_unanswered_too(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED, b"0\r\n\r\n")) as server:
        with pytest.raises(BackendFailed, match="before it began"):
            await relay.events(server, wire)
    assert wire.sent == []


async def test_a_backend_silent_for_too_long_ends_the_stream_with_an_error(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED, event("a"), None)) as server:
        with pytest.raises(BackendTimeout):
            await relay.events(server, wire, idle_timeout_s=0.2)
        await asyncio.wait_for(server.closed.wait(), 0.1)
    assert_ended_with_an_error(wire, "backend_timeout")


@pytest.mark.parametrize(
    "end",
    [b"", b"0\r\n\r\n", b"zz\r\n", chunk(b"data: {torn")],
    ids=["dies", "ends-without-done", "garbage", "dies-in-an-event"],
)
async def test_a_stream_that_breaks_off_ends_with_an_error(relay: Relay, end: bytes) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED, event("a"), 0.05, end)) as server:
        with pytest.raises(BackendFailed):
            await relay.events(server, wire)
    assert_ended_with_an_error(wire, "backend_error")
    assert b"torn" not in wire.body


@pytest.mark.parametrize("parts", [[None], [event("b"), DONE], []], ids=["waits", "goes-on", "dies"])
async def test_a_client_that_does_not_read_is_dropped_and_the_backend_is_not_blamed(
    relay: Relay, parts: list[bytes | None]
) -> None:
    wire = Wire()
    wire.reads.clear()
    async with serving(sends(CHUNKED, event("a"), 0.05, *parts)) as server:
        began_s = time.monotonic()
        with pytest.raises(ClientGone):
            await asyncio.wait_for(relay.events(server, wire, idle_timeout_s=0.2), 2)
        assert time.monotonic() - began_s < 1


async def test_a_client_that_stops_reading_before_the_end_is_dropped(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED, event("a"), 0.1, DONE)) as server:
        task = asyncio.create_task(relay.events(server, wire, idle_timeout_s=0.3))
        await asyncio.sleep(0.05)
        assert b"data:" in wire.body
        wire.reads.clear()
        with pytest.raises(ClientGone):
            await asyncio.wait_for(task, 2)


async def test_a_client_that_does_not_take_the_error_is_dropped(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(CHUNKED, event("a"), 0.1)) as server:
        task = asyncio.create_task(relay.events(server, wire, idle_timeout_s=0.3))
        await asyncio.sleep(0.05)
        assert b"data:" in wire.body
        wire.reads.clear()
        with pytest.raises((ClientGone, BackendFailed)):
            await asyncio.wait_for(task, 2)


async def test_other_bodies_pass_as_they_are(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n\x00\xff\r\n")) as server:
        await relay.bytes(server, wire)
    assert wire.body == b"\x00\xff\r\n"
    assert (b"content-length", b"4") in wire.sent[0]["headers"]
    assert wire.complete


async def test_a_body_that_breaks_off_is_not_ended_in_form(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")) as server:
        with pytest.raises(BackendFailed):
            await relay.bytes(server, wire)
    assert not wire.complete


async def test_a_body_that_stalls_is_cut_off(relay: Relay) -> None:
    wire = Wire()
    async with serving(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", None)) as server:
        with pytest.raises(BackendTimeout):
            await relay.bytes(server, wire, idle_timeout_s=0.2)
    assert not wire.complete
