"""A server that freezes while requests wait there: once the looks say so, nobody waits any longer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from relay_house import COMPLETION, MODEL, House, asking, completion, house, json_answer, wire_of
from relay_wires import CHUNKED, DONE, LAST, Server, Wire, event, sends, serving

WAIT_S = 5.0  # far less than any timeout of the relay
EMBEDDING = json_answer(
    {
        "object": "list",
        "model": MODEL,
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0},
    }
)
STREAM = (CHUNKED + event("a"), event("b") + LAST + DONE)


class Scene:
    """A gateway, the server asked first, which freezes, and another."""

    def __init__(self, gateway: House, first: Server, second: Server) -> None:
        self.gateway = gateway
        self.first = first
        self.second = second
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, body: bytes, path: str = "/v1/completions", frozen: bool = True) -> Wire:
        """Send a request and return once the first server has it, if it does."""
        wire = wire_of(body)
        had = len(self.first.requests)
        self.tasks.append(asyncio.create_task(asking(self.gateway, wire, path)))
        async with asyncio.timeout(WAIT_S):
            while frozen and len(self.first.requests) == had:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)  # what it says has come, too
        return wire

    async def lose(self) -> None:
        """The first server is known to be frozen; return when all requests are over."""
        self.gateway.lose()
        await self.over()

    async def over(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks), WAIT_S)
        assert not await self.gateway.settled()


@contextlib.asynccontextmanager
async def scene(first: tuple[Any, ...], second: tuple[Any, ...], **settings: Any) -> AsyncIterator[Scene]:
    async with (
        serving(sends(*first)) as one,
        serving(sends(*second)) as two,
        house([one.url, two.url], **settings) as gateway,
    ):
        gateway.backends[1].settings = gateway.backends[1].settings.model_copy(update={"weight": 0.01})
        yield Scene(gateway, one, two)


def code(wire: Wire) -> str:
    return str(orjson.loads(wire.body)["error"]["code"])


@pytest.mark.parametrize("said", [b"", CHUNKED], ids=["before the status", "after the status"])
async def test_a_stream_that_waits_for_its_first_byte_is_sent_elsewhere(said: bytes) -> None:
    async with scene((said, None), STREAM) as on:
        wire = await on.ask(completion(True))
        assert wire.status is None
        await on.lose()
        assert wire.status == 200
        assert wire.body.endswith(b"data: [DONE]\n\n")
        assert b"error" not in wire.body
        assert on.gateway.total("kvgate_retries_total") == 1


@pytest.mark.parametrize("reason", ["lost", "broken off"])
async def test_so_is_one_whose_status_was_told_as_long_as_no_event_was(reason: str) -> None:
    """vLLM sends the status of a stream at once, and its first event when the prompt is done. The client sees one
    stream, kept alive all the time."""
    go, fail = asyncio.Event(), asyncio.Event()
    settings = {"hold_headers_s": 0.01, "keepalive_s": 0.02}
    async with scene((CHUNKED, fail), (go, *STREAM), relay=settings) as on:
        wire = await on.ask(completion(True))
        async with asyncio.timeout(WAIT_S):
            while wire.body.count(b": keep-alive") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert wire.status == 200
        if reason == "lost":
            on.gateway.lose()
        else:
            fail.set()
        async with asyncio.timeout(WAIT_S):
            while wire.body.count(b": keep-alive") < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go.set()
        await on.over()
        fail.set()
        assert [item["type"] for item in wire.sent].count("http.response.start") == 1
        assert wire.body.endswith(b"data: [DONE]\n\n")
        assert wire.body.count(b"[DONE]") == 1
        assert b"error" not in wire.body
        assert on.gateway.total("kvgate_retries_total") == 1


async def test_one_whose_status_was_told_ends_with_an_error_event_if_nobody_else_takes_it() -> None:
    async with scene((CHUNKED, None), (None,), relay={"hold_headers_s": 0.01}) as on:
        on.gateway.lose(1)
        wire = await on.ask(completion(True))
        assert wire.status == 200
        await on.lose()
        error, done = wire.body.split(b"\n\n")[-3:-1]
        assert b'"no_backend"' in error
        assert done == b"data: [DONE]"
        assert wire.complete


@pytest.mark.parametrize("said", [b"", COMPLETION[:-9]], ids=["before the status", "within the answer"])
async def test_so_is_what_is_not_streamed_until_its_answer_is_whole(said: bytes) -> None:
    async with scene((said, None), (COMPLETION,)) as on:
        wire = await on.ask(completion(False))
        await on.lose()
        assert wire.status == 200
        assert orjson.loads(wire.body)["choices"][0]["text"] == "b"


async def test_so_are_embeddings() -> None:
    async with scene((None,), (EMBEDDING,)) as on:
        wire = await on.ask(orjson.dumps({"model": MODEL, "input": [1, 2, 3]}), "/v1/embeddings")
        await on.lose()
        assert wire.status == 200
        assert orjson.loads(wire.body)["data"][0]["embedding"] == [0.5]


async def test_many_that_wait_there_go_at_once_within_the_share_that_may_be_repeated() -> None:
    async with scene((None,), (COMPLETION,), relay={"retry_share": 0.2}) as on:
        wires = [await on.ask(completion(False)) for _ in range(3)]
        on.gateway.app.serving._retries._left = 2.0
        await on.lose()
        assert sorted(wire.status or 0 for wire in wires) == [200, 200, 502]
        assert on.gateway.total("kvgate_retries_denied_total") == 1


async def test_without_another_backend_they_are_told_so_at_once() -> None:
    async with scene((None,), (None,)) as on:
        on.gateway.lose(1)
        wires = [await on.ask(completion(stream)) for stream in (False, True)]
        await on.lose()
        assert [wire.status for wire in wires] == [503, 503]
        assert {code(wire) for wire in wires} == {"no_backend"}


async def test_the_only_backend_lost_is_an_error_of_the_server() -> None:
    async with scene((None,), (None,), relay={"retries": 0}) as on:
        wire = await on.ask(completion(False))
        await on.lose()
        assert (wire.status, code(wire)) == (502, "backend_error")


async def test_a_stream_that_has_begun_ends_as_a_broken_one_does() -> None:
    async with scene((CHUNKED + event("a"), None), STREAM) as on:
        wire = await on.ask(completion(True))
        assert b'"a"' in wire.body
        await on.lose()
        error, done = wire.body.split(b"\n\n")[-3:-1]
        assert b'"backend_error"' in error
        assert done == b"data: [DONE]"
        assert wire.complete
        assert not on.second.requests


async def test_who_waits_at_another_waits_on() -> None:
    go = asyncio.Event()
    async with scene((None,), (go, *STREAM)) as on:
        on.gateway.backends[0].availability.drain(True)
        wire = await on.ask(completion(True), frozen=False)
        on.gateway.lose()
        await asyncio.sleep(0.05)
        assert wire.status is None
        go.set()
        await on.over()
        assert wire.status == 200


async def test_it_keeps_its_place_in_the_queue() -> None:
    """It came first, so it is first when the other server has room again."""
    async with scene((None,), (COMPLETION,)) as on:
        second = on.gateway.backends[1]
        full = second.reserve(on.gateway.whole_cache(), None)
        early = await on.ask(completion(False, user="early"))
        on.gateway.backends[0].availability.drain(True)
        late = await on.ask(completion(False, user="late"), frozen=False)
        on.gateway.lose()
        await asyncio.sleep(0.05)
        assert on.gateway.app.gate.stats()["waiting_requests"] == 2
        full.release()
        on.gateway.app.gate.wake()
        await on.over()
        assert [early.status, late.status] == [200, 200]
        assert [b'"early"' in request for request in on.second.requests] == [True, False]


async def test_that_it_froze_does_not_count_as_failures_of_requests() -> None:
    """It is down by the looks. When it answers these again, no breaker keeps it closed."""
    async with scene((None,), (COMPLETION,)) as on:
        for _ in range(5):
            await on.ask(completion(False))
        await on.lose()
        assert on.gateway.backends[0].availability.breaker.failures == 0
        assert on.gateway.backends[0].availability.breaker.half_open_at_s is None
