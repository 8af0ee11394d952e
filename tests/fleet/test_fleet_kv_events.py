"""Simulated servers that publish KV events as vLLM does, in front of them the whole gateway: it knows their caches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from gateway.app import App, create_app
from gateway.config import Settings
from gateway.fleet.kvevents import listener
from gateway.simulator.model import default_folder, ensure_model
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.rendering import Renderer, open_renderer
from gateway.simulator.server import Simulator
from gateway.simulator.server import serve as serve_app
from gateway.simulator.service import Service
from gateway.tokens import service as counting
from gateway.tokens.local import LocalCounter, TemplateOptions, load

EVENTS = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"})
WORDS = ["stone", "river", "cloud", "seven", "amber", "quiet", "north", "paper", "glass", "ember"]


@functools.cache
def renderer() -> Renderer:
    return open_renderer(ensure_model(default_folder()))


@functools.cache
def local(source: str) -> LocalCounter:
    """Tokenizers take seconds to load: once is enough."""
    return load(source, TemplateOptions(), hub=False, cache_bytes=1 << 24)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LOOK_S", 0.05)
    monkeypatch.setattr(counting, "load", lambda source, *rest, **more: local(source))


def serve(server: Simulator) -> contextlib.AbstractAsyncContextManager[str]:
    return serve_app(app=server)


def simulated(**fields: Any) -> Simulator:
    basis: dict[str, Any] = {
        "num_gpu_blocks": 121,
        "max_model_len": 1920,
        "time_scale": 200.0,
        "enable_prompt_tokens_details": True,
        "kv_events_config": EVENTS,
    }
    return Simulator(Service(SimulatorOptions(**(basis | fields)), renderer()))


class House:
    """The gateway and a client of it."""

    def __init__(self, app: App, client: httpx2.AsyncClient) -> None:
        self.app = app
        self.client = client

    async def ask(self, text: str, **more: Any) -> tuple[str, int]:
        """Have a question answered. By whom, and how much of it was cached there."""
        body = {"model": "simulated", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
        answer = await self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.headers["x-kvgate-backend"], cached

    async def heard(self, servers: list[Simulator]) -> None:
        """Until all that the servers have published was taken in."""
        for _ in range(1000):
            sent = sum(publisher.published for server in servers for publisher in server.service.publishers)
            if sent == sum(record.messages for record in self.app.kv_events.records()):
                return
            await asyncio.sleep(0.01)
        raise TimeoutError

    async def known(self, wanted: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The status page's KV events, once they are as wanted."""
        for _ in range(400):
            told = (await self.client.get("/kvgate/status")).json()["kv_events"]
            if wanted(told):
                return list(told)
            await asyncio.sleep(0.02)
        raise TimeoutError(told)


@contextlib.asynccontextmanager
async def house(*backends: dict[str, Any] | str) -> AsyncIterator[House]:
    settings = Settings(backends=backends, fleet={"scrape_interval_s": 0.2})
    async with contextlib.AsyncExitStack() as stack:
        app = create_app(settings)
        url = await stack.enter_async_context(serve_app(app=app))
        client = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False))
        await app.counter.warm(app.fitter.served(app.fleet.resolve("simulated")))
        yield House(app, client)


def exact(count: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda told: len(told) == count and all(each["knowledge"] == "exact" for each in told)


def story(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


async def test_what_is_reported_is_what_is_cached_and_the_gateway_knows_it() -> None:
    dice = random.Random(3)
    servers = [simulated(), simulated()]
    async with serve(servers[0]) as one, serve(servers[1]) as two, house(one, two) as gateway:
        await gateway.known(exact(2))
        stories = [story(dice, 200) for _ in range(14)]
        for _ in range(60):
            place = dice.randrange(len(stories))
            stories[place] += " " + story(dice, 20)
            if len(stories[place].split()) > 500:
                stories[place] = story(dice, 200)
            await gateway.ask(stories[place])
            await gateway.heard(servers)
        stats = (await gateway.client.get("/kvgate/status")).json()
        assert stats["reported_expected_tokens"] == stats["reported_confirmed_tokens"] > 1500
        told = await gateway.known(exact(2))
        assert not any(each["odd_events"] or each["lost"] or each["gaps"] or each["orphaned_blocks"] for each in told)


async def test_an_older_server_is_listened_to_where_the_settings_say() -> None:
    server = simulated(vllm_version="0.19.0")
    async with serve(server) as url:
        config = server.service.publishers[0].config
        events = {"endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint}
        async with house({"url": url, "kv_events": events}) as gateway:
            (told,) = await gateway.known(exact(1))
            text = story(random.Random(5), 300)
            await gateway.ask(text)
            await gateway.known(lambda told: told[0]["blocks"] > 15)
            _, cached = await gateway.ask(text)
            assert cached > 250
            assert told["endpoint"] == config.endpoint


async def test_each_engine_of_a_server_is_listened_to() -> None:
    async with serve(simulated(data_parallel_size=2)) as url, house({"url": url, "name": "b"}) as gateway:
        told = await gateway.known(exact(2))
        assert [(each["backend"], each["rank"]) for each in told] == [("b", 0), ("b", 1)]


async def test_a_server_that_publishes_nothing_is_left_alone() -> None:
    down = {"url": "http://127.0.0.1:9", "name": "down"}
    servers = [simulated(kv_events_config=None), simulated()]
    async with serve(servers[0]) as silent, serve(servers[1]) as loud, house(silent, loud, down) as gateway:
        assert len(await gateway.known(exact(1))) == 1
        await gateway.ask("Hello!")


async def test_who_is_told_not_to_listen_does_not() -> None:
    async with serve(simulated()) as url, house({"url": url, "kv_events": {"enabled": False}}) as gateway:
        await gateway.ask("Hello!")
        await asyncio.sleep(0.3)
        assert await gateway.known(lambda told: True) == []


async def test_without_the_extra_all_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import builtins

    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name == "zmq" and rest[0] and rest[0]["__name__"] == listener.__name__:
            raise ImportError("No module named 'zmq'")
        return real(name, *rest, **more)

    async with serve(simulated()) as url:
        monkeypatch.setattr(builtins, "__import__", absent)
        async with house(url) as gateway:
            await gateway.ask("Hello!")
            for _ in range(100):
                if "kvgate[kv-events]" in caplog.text:
                    break
                await asyncio.sleep(0.02)
            await gateway.ask("Hello again!")
        assert caplog.text.count("kvgate[kv-events]") == 1


async def test_a_cache_that_was_emptied_is_known_to_be_empty() -> None:
    async with serve(simulated()) as url, house(url) as gateway:
        await gateway.known(exact(1))
        await gateway.ask(story(random.Random(1), 300))
        await gateway.known(lambda told: told[0]["blocks"] > 15)
        async with httpx2.AsyncClient(trust_env=False) as client:
            await client.post(f"{url}/reset_prefix_cache")
        await gateway.ask("Short.")  # a server tells at the end of its next step
        told = await gateway.known(lambda told: told[0]["blocks"] < 5)
        assert told[0]["knowledge"] == "exact"


async def test_a_pinned_engine_gets_what_it_has() -> None:
    """Two engines behind one server: who comes again is sent to the engine that has the prompt, not to the other."""
    pinned = {"name": "b", "pin_ranks": True}
    async with serve(simulated(data_parallel_size=2)) as url, house({"url": url, **pinned}) as gateway:
        await gateway.known(exact(2))
        dice = random.Random(8)
        stories = [story(dice, 300) for _ in range(4)]
        for text in stories:
            await gateway.ask(text)
        await gateway.known(lambda told: sum(each["blocks"] for each in told) > 60)
        for text in stories:
            _, cached = await gateway.ask(text)
            assert cached > 250
