"""What KV events tell of real vLLM's prefix cache is what it then reports as cached, to the block.

One server with a small cache, so that blocks are evicted all the time; prompts that share beginnings and some that
repeat; then an emptied cache, and another process at the same addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pytest
import zmq
from vllm_server import VllmServer

from gateway.app import create_app
from gateway.block_keys import PromptBlocks, block_keys, id_bytes, root_key
from gateway.config import Settings
from gateway.fleet.kvevents.sources import told
from gateway.fleet.kvevents.subscriber import Subscriber
from gateway.fleet.kvevents.wire import decoder
from gateway.routing.blocks import BlockIndex
from gateway.routing.feeds import Knowledge
from gateway.simulator.model import default_folder, ensure_model
from gateway.simulator.server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PORT, EVENTS, REPLAY = 22010, 22020, 22030
BLOCK, BLOCKS, WINDOW = 32, 60, 1024
VOCABULARY = 150_000


def server(seed: str = "") -> VllmServer:
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{EVENTS}",
        "replay_endpoint": f"tcp://*:{REPLAY}",
    }
    flags = ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(WINDOW)]
    flags += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "8"]
    flags += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
    environment = {"VLLM_SERVER_DEV_MODE": "1"} | ({"PYTHONHASHSEED": seed} if seed else {})
    return VllmServer("kv-events", ensure_model(default_folder()), PORT, "m", flags, environment)


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmServer]:
    running = server()
    running.start()
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


async def until(happened: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until that is so."""
    for _ in range(int(timeout_s / 0.05)):
        if happened():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError


class Conversations:
    """Prompts of token ids, many of which begin as others do."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._kept: list[list[int]] = []

    def next(self) -> list[int]:
        """A new prompt, one that goes on where another ended or left it, or the same again."""
        dice = self._dice
        before: list[int] = []
        if self._kept and dice.random() < 0.75:
            before = dice.choice(self._kept[-6:])
            before = before[: dice.choice([len(before), dice.randint(1, len(before))])]
        new = dice.choice([0, dice.randint(1, 40), dice.randint(1, 300)])
        prompt = (before + [dice.randrange(VOCABULARY) for _ in range(new)])[: WINDOW - 64] or [1]
        self._kept.append(prompt)
        return prompt


class Watch:
    """A subscriber and what it has told, beside the server it listens to."""

    def __init__(self, client: httpx2.AsyncClient, subscriber: Subscriber, index: BlockIndex) -> None:
        self.client = client
        self.subscriber = subscriber
        self.index = index
        self.compared = self.hits = 0

    def reported(self, prompt: list[int], salt: str = "") -> int:
        keys = block_keys(id_bytes(prompt), BLOCK, root_key("", salt))
        found, exact = self.index.match(PromptBlocks(len(prompt), {BLOCK: keys}), 1)
        assert exact == 1, self.subscriber
        return found.get(1, 0)

    async def ask(self, prompt: list[int], **more: Any) -> int:
        """Have it answered. Cached tokens, as vLLM says."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, **more}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def compare(self, prompt: list[int], **more: Any) -> None:
        expected = self.reported(prompt, more.get("cache_salt", ""))
        cached = await self.ask(prompt, **more)
        assert cached == expected, (len(prompt), self.subscriber)
        self.compared += 1
        self.hits += cached > 0
        await self.settled()

    async def settled(self) -> None:
        """Until nothing new has come for a moment."""
        before = -1
        while before != self.subscriber.tally.messages:
            before = self.subscriber.tally.messages
            await asyncio.sleep(0.15)


@contextlib.asynccontextmanager
async def watching(url: str) -> AsyncIterator[Watch]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    index = BlockIndex()
    index.room("b", 1)
    async with httpx2.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        (source,) = told((await client.get("/kv_event_sources")).json(), url)
        assert source.endpoint == f"tcp://127.0.0.1:{EVENTS}"
        assert source.replay_endpoint == f"tcp://127.0.0.1:{REPLAY}"
        subscriber = Subscriber(context, source, index.feed("b"), decoder())
        subscriber.feed.sized(BLOCKS - 1)
        task = asyncio.create_task(subscriber.run())
        try:
            await until(lambda: subscriber.feed.knowledge is Knowledge.EXACT and subscriber.connected)
            yield Watch(client, subscriber, index)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            context.destroy(linger=0)


async def test_reported_blocks_are_what_vllm_finds_cached(vllm: VllmServer) -> None:
    prompts = Conversations(1)
    async with watching(vllm.url) as watch:
        await watch.ask(prompts.next())
        await watch.settled()
        for _ in range(100):
            await watch.compare(prompts.next())
        assert watch.hits > 25
        feed = watch.subscriber.feed
        assert 40 < feed.blocks < BLOCKS
        assert watch.subscriber.tally.events > 5 * BLOCKS  # far more blocks came than there are: most were evicted
        assert not (feed.odd or feed.orphans or watch.subscriber.tally.gaps or watch.subscriber.tally.odd)


async def test_side_by_side_requests_leave_the_index_right(vllm: VllmServer) -> None:
    """Equal prompts computed in one step are blocks twice, with one hash; half of these are evicted first."""
    prompts = Conversations(2)
    async with watching(vllm.url) as watch:
        for _ in range(12):
            same = prompts.next()
            await asyncio.gather(*(watch.ask(each) for each in (same, same, prompts.next(), same, prompts.next())))
            await watch.settled()
            await watch.compare(prompts.next())


async def test_who_comes_late_is_told_what_came_before(vllm: VllmServer) -> None:
    prompts = Conversations(3)
    async with watching(vllm.url) as watch:
        for _ in range(5):
            await watch.ask(prompts.next())
    async with watching(vllm.url) as late:
        for _ in range(10):
            await late.compare(prompts.next())
        assert late.hits and late.subscriber.tally.replays


async def test_salted_prompts_are_told_apart(vllm: VllmServer) -> None:
    prompt = [7] * 300
    async with watching(vllm.url) as watch:
        await watch.ask(prompt, cache_salt="one")
        await watch.settled()
        assert watch.reported(prompt, "one") == 288
        assert watch.reported(prompt, "two") == 0
        await watch.compare(prompt, cache_salt="one")
        await watch.compare(prompt, cache_salt="two")


async def test_the_gateway_expects_what_vllm_has(vllm: VllmServer) -> None:
    """Conversations that grow, through the whole gateway: counted, keyed, placed; all that was expected came true."""
    dice = random.Random(9)
    app = create_app(Settings(backends=[vllm.url]))
    async with serve(app=app) as url, httpx2.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        await app.counter.warm(app.fitter.served(app.fleet.resolve("m")))
        await until(lambda: any(record.knowledge is Knowledge.EXACT for record in app.kv_events.records()))
        chats: list[list[dict[str, str]]] = [[] for _ in range(4)]
        for _ in range(30):
            chat = dice.choice(chats)
            if sum(len(each["content"]) for each in chat) > 700:
                chat.clear()
            chat.append({"role": "user", "content": " ".join(str(dice.randrange(1000)) for _ in range(60))})
            body = {"model": "m", "messages": chat, "max_tokens": 8, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            chat.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or "-"})
            (record,) = app.kv_events.records()
            before = -1
            while before != record.messages:
                before = record.messages
                await asyncio.sleep(0.3)
                (record,) = app.kv_events.records()
        stats = app.gate.stats()
        assert stats["reported_expected_tokens"] == stats["reported_confirmed_tokens"] > 1000


async def test_an_emptied_cache_is_noticed(vllm: VllmServer) -> None:
    prompts = Conversations(4)
    async with watching(vllm.url) as watch:
        kept = prompts.next() + [5] * 200
        await watch.ask(kept)
        await watch.settled()
        assert watch.reported(kept)
        assert (await watch.client.post("/reset_prefix_cache")).status_code == 200
        await watch.ask([9] * 100)  # vLLM tells at the end of its next step
        await watch.settled()
        assert watch.reported(kept) == 0
        await watch.compare(kept)
        for _ in range(10):
            await watch.compare(prompts.next())


async def test_another_process_is_noticed(vllm: VllmServer) -> None:
    """The subscriber lives on while the server is replaced by one whose numbers begin at 0 again."""
    prompts = Conversations(5)
    async with watching(vllm.url) as watch:
        for _ in range(5):
            await watch.ask(prompts.next())
        await watch.settled()
        assert watch.subscriber.feed.blocks
        vllm.stop()
        other = server(seed="17")
        other.start()
        try:
            await asyncio.to_thread(other.wait_ready)
            feed = watch.subscriber.feed
            await until(lambda: watch.subscriber.connected and feed.knowledge is Knowledge.EXACT and not feed.blocks)
            await watch.ask(prompts.next())
            await watch.settled()
            for _ in range(20):
                await watch.compare(prompts.next())
            assert watch.hits
        finally:
            other.stop()
