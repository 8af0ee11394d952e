"""Streams that wait in the queue: opened late, kept alive, and ended by an error where no status can tell it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from gateway.api.waiting import ending_events, idle_event
from gateway.relay.client import Client
from gateway.relay.waiting import WaitingRoom
from gateway.types import Dialect

HEADERS = [("content-type", "text/event-stream")]


class Wire:
    """What a client of ours gets."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.client = Client(self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        self.messages.append(dict(message))

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.messages if message["type"] == "http.response.start"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def room(wire: Wire, after_s: float | None = 0.01, dialect: Dialect = Dialect.CHAT) -> WaitingRoom:
    return WaitingRoom(
        wire.client,
        after_s,
        0.01,
        HEADERS,
        lambda: idle_event(dialect, "m"),
        lambda body: ending_events(dialect, body, "r", "m"),
    )


async def test_who_waits_long_gets_a_status_comments_and_now_and_then_an_event() -> None:
    wire = Wire()
    async with room(wire):
        await asyncio.sleep(0.2)
        await wire.client.start(200, [("x-other", "1")])
        await wire.client.body(b"data: first\n\n")
        await asyncio.sleep(0.05)
    await wire.client.end(b"data: [DONE]\n\n")
    assert wire.statuses == [200]
    signs, _, answer = wire.body.partition(b"data: first\n\n")
    assert signs.count(b": keep-alive\n\n") > 4
    assert answer == b"data: [DONE]\n\n"  # no sign of life amid the answer
    events = [orjson.loads(line[6:]) for line in signs.split(b"\n\n") if line.startswith(b"data: ")]
    assert events[0]["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]


async def test_a_short_wait_is_not_noticed() -> None:
    wire = Wire()
    async with room(wire, 10.0):
        await wire.client.answer(429, [], b"{}")
    assert wire.statuses == [429]
    assert wire.body == b"{}"


async def test_it_can_be_switched_off() -> None:
    wire = Wire()
    async with room(wire, None):
        await asyncio.sleep(0.03)
    assert wire.messages == []


async def test_a_request_that_is_placed_may_still_get_a_status_of_its_own() -> None:
    wire = Wire()
    async with room(wire) as waiting:
        waiting.queued = False
        await asyncio.sleep(0.05)
        assert wire.messages == []
        waiting.queued = True  # its backend failed, and it waits again
        await asyncio.sleep(0.05)
        assert wire.statuses == [200]


async def test_a_refusal_after_the_wait_ends_the_stream_in_the_clients_dialect() -> None:
    error = b'{"error":{"message":"busy","type":"x","code":"server_busy"}}'
    for dialect, start, end in (
        (Dialect.CHAT, b"data: " + error, b"data: [DONE]\n\n"),
        (Dialect.COMPLETIONS, b"data: " + error, b"data: [DONE]\n\n"),
        (Dialect.MESSAGES, b"event: error\ndata: " + error, b"\n\n"),
    ):
        wire = Wire()
        async with room(wire, dialect=dialect):
            await asyncio.sleep(0.015)
            await wire.client.answer(429, [("retry-after", "5")], error)
        assert wire.statuses == [200]
        told = wire.body.split(b": keep-alive\n\n")[-1]
        assert told.startswith(start)
        assert told.endswith(end)
        assert not wire.messages[-1]["more_body"]


async def test_responses_get_comments_only_and_a_failed_response() -> None:
    wire = Wire()
    async with room(wire, dialect=Dialect.RESPONSES):
        await asyncio.sleep(0.1)
        assert set(wire.body.split(b"\n\n")) == {b": keep-alive", b""}
        await wire.client.answer(429, [], b'{"error":{"message":"busy","type":"x","code":"server_busy"}}')
    assert b"response.failed" in wire.body
    assert b"busy" in wire.body


async def test_nothing_is_sent_after_the_room_is_left() -> None:
    wire = Wire()
    async with room(wire):
        await asyncio.sleep(0.03)
    count = len(wire.messages)
    await asyncio.sleep(0.05)
    assert len(wire.messages) == count
