"""The whole gateway in one process, before servers that answer with bytes: one request from its first await to its
last, and what must be left when it is over, however it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any

import httpx2
import orjson
from prometheus_client.parser import text_string_to_metric_families
from relay_wires import Wire, scope

from gateway.app import App, create_app
from gateway.config import Settings
from gateway.fleet.backend import WatchedBackend
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.discovery import ModelCard
from gateway.types import Need

MODEL = "m"
WINDOW, BLOCKS, SIZE = 4096, 300, 16


def json_answer(document: Any, status: bytes = b"200 OK") -> bytes:
    """A whole answer."""
    body = orjson.dumps(document)
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


COMPLETION = json_answer(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "b", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
)


class House:
    """A gateway and its backends, whose servers run already. ``backends`` are in the order of ``urls``."""

    def __init__(self, urls: list[str], settings: dict[str, Any]) -> None:
        self.app: App = create_app(Settings(backends=urls, **settings))
        self.backends: list[WatchedBackend] = list(self.app.fleet._backends.values())
        self._losing: asyncio.TimerHandle | None = None

    def find(self) -> None:
        """All backends are up, with an empty cache."""
        now_s = asyncio.get_running_loop().time()
        for backend in self.backends:
            backend.found((ModelCard(MODEL, None, None, WINDOW),), KvCapacity(1, BLOCKS, SIZE))
            backend.engines.begin_scrape()
            backend.engines.reconcile([0], None, now_s)

    def revive(self) -> None:
        """Forget failures: of each request the first server must be tried first."""
        if self._losing is not None:
            self._losing.cancel()
        for backend in self.backends:
            backend.availability.breaker.succeeded()
            backend.pulse.answered()
            backend.touched()
        self.find()

    def lose(self, index: int = 0) -> None:
        """The looks find a backend silent for too long, as if it had been frozen for a while."""
        backend = self.backends[index]
        backend.pulse.answered()
        for _ in range(self.app.settings.fleet.failures_to_open):
            backend.pulse.asked(0.0)
            backend.pulse.missed()
        assert backend.pulse.judge(1e9)
        backend.availability.set_reachable(False)

    def lose_later(self, after_s: float) -> None:
        """That happens to the first one after so long."""
        self._losing = asyncio.get_running_loop().call_later(after_s, self.lose)

    def whole_cache(self) -> Need:
        """A request that takes all of a backend."""
        return Need(BLOCKS * SIZE, 0)

    def total(self, name: str) -> float:
        """The sum over a counter's or gauge's samples."""
        families = text_string_to_metric_families(self.app.metrics.text().decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and not sample.name.endswith("_created")
        )

    def held(self) -> dict[str, float]:
        """Whatever the gateway holds for requests; all of it 0 when there are none."""
        stats = self.app.gate.stats()
        held = {name: stats[name] for name in ("waiting_requests", "waiting_bytes", "waiting_tokens", "leases")}
        held["placer"] = len(self.app.gate._placer)
        held["alarms"] = float(self.app.gate._alarm is not None) + float(self.app.gate._run is not None)
        for session in (self.app.upstream._session, self.app.upstream._fresh):
            assert session is not None and session.connector is not None
            held["connections"] = held.get("connections", 0) + len(session.connector._acquired)
        for backend in self.backends:
            engines = backend.engines
            held[f"{backend.name} requests"] = engines.in_flight
            held[f"{backend.name} blocks"] = engines.used_blocks + engines.reserved_blocks
            held[f"{backend.name} pending"] = sum(ledger.pending_prompt_tokens for ledger in engines)
            held[f"{backend.name} listeners"] = backend.pulse.listeners
            held[f"{backend.name} trials"] = float(backend.availability.breaker._trial is not None)
        return held

    async def settled(self) -> dict[str, float]:
        """What is still held after a short while: connections are closed a few turns after whoever used them left."""
        for _ in range(200):
            held = {name: value for name, value in self.held().items() if value}
            if not held:
                break
            await asyncio.sleep(0.001)
        return held


@contextlib.asynccontextmanager
async def house(urls: list[str], **settings: Any) -> AsyncIterator[House]:
    """A gateway before those servers, none of which is scraped."""
    built = House(urls, settings)
    async with built.app.upstream, httpx2.AsyncClient(trust_env=False) as built.app._control:
        built.find()
        yield built
        await built.app.summariser.close()
        built.app.fitter.close()
        built.app.counter.close()
        for backend in built.backends:
            await backend.looker.close()


def completion(stream: bool, **more: Any) -> bytes:
    """A request whose prompt is of three given tokens: counted exactly, without a tokenizer."""
    return orjson.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 8, "stream": stream, **more})


def wire_of(body: bytes) -> Wire:
    """The client's side of a request with that body."""
    return Wire({"type": "http.request", "body": body, "more_body": False})


def asking(house: House, wire: Wire, path: str = "/v1/completions") -> Coroutine[Any, Any, None]:
    """The request as the server would run it."""
    headers = [(b"content-type", b"application/json")]
    return house.app(scope(path=path, query_string=b"", headers=headers), wire.receive, wire.send)


class Steps:
    """Runs coroutines and counts their suspensions, all together; at number ``at`` it does ``act``.

    ``act`` gets what the task is suspended on, ``None`` for a bare turn of the loop.
    """

    def __init__(self, at: int, act: Callable[[asyncio.Future[Any] | None], None]) -> None:
        self.at = at
        self.act = act
        self.count = 0

    def of(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """``coroutine``, its suspensions counted."""
        return _Stepped(self, coroutine)

    def suspended(self, on: asyncio.Future[Any] | None) -> asyncio.Future[Any] | None:
        """A coroutine waits for ``on``."""
        if self.count == self.at:
            self.act(on)
        self.count += 1
        return on


class _Stepped(Coroutine[Any, Any, Any], Generator[Any, Any, Any]):
    """A coroutine that a task drives, or whoever awaits it."""

    def __init__(self, steps: Steps, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._steps = steps
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def send(self, value: Any) -> Any:
        return self._steps.suspended(self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        return self._steps.suspended(self._coroutine.throw(*error))

    def close(self) -> None:
        self._coroutine.close()


HOWS = ("while it waits", "as it is told", "by its client")


async def cancelled_at(house: House, body: bytes, at: int, how: str, path: str = "/v1/completions") -> tuple[int, Wire]:
    """Send a request and cancel it at the ``at``-th suspension of its task or of those it makes: while it is suspended,
    in the very turn in which what it waits for has come, or by its client hanging up. How many suspensions there were.
    """
    loop = asyncio.get_running_loop()
    wire = wire_of(body)
    task: asyncio.Task[Any]

    def act(on: asyncio.Future[Any] | None) -> None:
        if how == "by its client":
            wire.hang_up()
        elif how == "as it is told" and on is not None:
            on.add_done_callback(lambda _: task.cancel())
        else:
            loop.call_soon(lambda: task.cancel())

    steps = Steps(at, act)
    before = asyncio.all_tasks()

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        return asyncio.Task(steps.of(coroutine), loop=loop, **more)

    loop.set_task_factory(factory)
    try:
        task = loop.create_task(asking(house, wire, path))
    finally:
        if how == "by its client":
            loop.set_task_factory(None)
    try:
        async with asyncio.timeout(10):
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        loop.set_task_factory(None)
    for _ in range(200):
        left = asyncio.all_tasks() - before
        if not left:
            break
        await asyncio.sleep(0.001)
    served = {name for item in left if (name := repr(item.get_coro())) and "Server.serve" not in name}
    assert not served, f"tasks are left: {served}"
    return steps.count, wire
