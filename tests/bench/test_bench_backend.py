"""The canned backend speaks what the gateway needs, and the client of the bench refuses answers that are not right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
from openai import AsyncOpenAI

from bench.bodies import Conversation, assemble, small
from bench.canned_backend import BLOCKS, MODEL, WINDOW_TOKENS, CannedBackend, Connection, wish
from bench.load import LoadError, Request, Tally, connections, replay
from gateway.fleet.discovery import read_cards
from gateway.fleet.metrics_text import parse


@pytest.fixture
async def port() -> AsyncIterator[int]:
    backend = CannedBackend("/models/qwen", 0.001)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(backend), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def words(messages: list[dict[str, object]]) -> int:
    return sum(len(str(message.get("content"))) for message in messages) // 4


async def test_the_gateway_can_discover_it(port: int) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        (card,) = read_cards((await client.get("/v1/models")).content)
        assert (card.id, card.root, card.window_tokens) == (MODEL, "/models/qwen", WINDOW_TOKENS)
        reading = parse((await client.get("/metrics")).content)
        assert (reading.blocks, reading.block_size_tokens, reading.running) == (BLOCKS, 16, 0)
        assert reading.usage_ratio == {"0": 0.0}
        assert (await client.get("/version")).json() == {"version": "0.32.0"}
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/tokenize", json={})).status_code == 404


async def test_the_official_client_reads_its_answers(port: int) -> None:
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    async with client:
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            user="kvbench;tokens=77;chunks=64;stream=0;hold=0",
        )
        assert whole.usage is not None and whole.usage.prompt_tokens == 77
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            user="kvbench;tokens=77;chunks=20;stream=1;hold=0",
        )
        events = [event async for event in stream]
    assert len(events) == 21
    assert events[-1].usage is not None and events[-1].usage.prompt_tokens == 77
    assert events[-2].choices[0].finish_reason == "stop"


async def test_streams_side_by_side_have_all_their_chunks(port: int) -> None:
    tally = Tally()
    async with connections(port, 8) as opened:
        await replay(port, [[small(words, chunks=30), small(words, chunks=3)]] * 8, tally, opened)
        await replay(port, [[small(words)]] * 8, tally, opened)
    assert (tally.requests, tally.events) == (24, 8 * (31 + 4))


async def test_a_wrong_number_of_events_is_no_result(port: int) -> None:
    right = small(words, chunks=5)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with connections(port, 1) as opened:
            await replay(port, [[Request(right.body, right.tokens, right.events + 1)]], Tally(), opened)
    assert caught.group_contains(LoadError, match="6 events instead of 7")


async def test_an_answer_that_does_not_tell_its_count_is_no_result(port: int) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with connections(port, 1) as opened:
            await replay(port, [[small(words)]], Tally(), opened, "local")
    assert caught.group_contains(LoadError, match="not counted as local")


def test_a_conversation_grows_at_its_end_only() -> None:
    talk = Conversation(3, 5000, 4, 2400, words)
    first, third = json.loads(talk.request(0).body), json.loads(talk.request(2, chunks=9).body)
    assert third["messages"][: len(first["messages"])] == first["messages"]
    assert len(third["messages"]) == len(first["messages"]) + 8
    assert first["messages"][-1]["role"] == third["messages"][-1]["role"] == "user"
    assert (first["stream"], third["stream"], third["model"]) == (False, True, MODEL)
    assert 5000 <= talk.tokens[0] < talk.tokens[1] < talk.tokens[4]
    other = json.loads(Conversation(4, 5000, 0, 2400, words).request(0).body)
    assert other["messages"][1] != first["messages"][1]


def test_the_wish_survives_in_the_body() -> None:
    assert wish(assemble(b"", 61234, chunks=200).body) == {"tokens": 61234, "chunks": 200, "stream": 1, "hold": 0}
    assert wish(b'{"messages":[]}') == {}
