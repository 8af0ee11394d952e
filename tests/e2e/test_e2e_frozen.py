"""A server that is stopped in the middle of its work, as a host that is gone looks, and goes on later.

Simulated ones only: they are cheap to lose.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from e2e_backends import LARGE, MODEL, simulated
from e2e_gateway import ANSWER_TIMEOUT_S, Gateway, eventually, serving
from e2e_processes import PLAIN, KvgateProcess

# Three looks of two seconds each. A status is told before that: then a stream must go on elsewhere.
SETTINGS = {
    "FLEET__TIMEOUT_S": "2",
    "FLEET__SCRAPE_SLOWEST_S": "1",
    "RELAY__HOLD_HEADERS_S": "1",
    "RELAY__KEEPALIVE_S": "0.5",
}
LOST_S = 6.0
GENEROUS_S = 20.0
SLOTS = "2"  # of each server: so many run, all others wait there


@pytest.fixture
def servers() -> Iterator[tuple[KvgateProcess, KvgateProcess]]:
    with simulated(LARGE, "--max-num-seqs", SLOTS) as first, simulated(LARGE, "--max-num-seqs", SLOTS) as second:
        yield first, second


@pytest.fixture
def gateway(servers: tuple[KvgateProcess, KvgateProcess]) -> Iterator[Gateway]:
    with serving([server.url for server in servers], MODEL, SETTINGS) as gateway:
        yield gateway
        eventually(lambda: gateway.in_flight() == 0, GENEROUS_S)


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=ANSWER_TIMEOUT_S, **PLAIN) as client:
        yield client


class Request:
    """One on its way: which server has it, and what came of it."""

    def __init__(self, http: httpx2.AsyncClient, path: str, **body: Any) -> None:
        self.backend = ""
        self.status = 0
        self.data = b""
        self.ended_s = 0.0
        self.task = asyncio.create_task(self._run(http, path, {"model": MODEL, **body}))

    async def _run(self, http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> None:
        async with http.stream("POST", path, json=body) as answer:
            self.status, self.backend = answer.status_code, answer.headers.get("x-kvgate-backend", "")
            async for part in answer.aiter_bytes():
                self.data += part
        self.ended_s = time.monotonic()

    def events(self) -> list[str]:
        return [line[6:] for line in self.data.decode().splitlines() if line.startswith("data: ")]


def conditions(gateway: Gateway) -> list[str]:
    return [item["condition"] for item in gateway.http.get("/kvgate/status").json()["backends"]]


async def until(condition: Any, timeout_s: float = GENEROUS_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_nobody_waits_for_a_server_that_is_frozen(
    servers: tuple[KvgateProcess, KvgateProcess], gateway: Gateway, http: httpx2.AsyncClient
) -> None:
    first = servers[0]
    names = [f"127.0.0.1:{server.port}" for server in servers]

    def prompt(number: int) -> list[int]:
        return [1000 + number] * 40

    running = [
        Request(http, "/v1/completions", prompt=prompt(i), max_tokens=1500, ignore_eos=True, stream=True)
        for i in range(4)
    ]
    await until(lambda: all(len(item.events()) > 3 for item in running))
    assert {item.backend for item in running} == set(names)
    streams = [
        Request(http, "/v1/completions", prompt=prompt(10 + i), max_tokens=5, ignore_eos=True, stream=True)
        for i in range(6)
    ]
    wholes = [Request(http, "/v1/completions", prompt=prompt(20 + i), max_tokens=5, ignore_eos=True) for i in range(6)]
    vectors = [Request(http, "/v1/embeddings", input=prompt(30 + i)) for i in range(4)]
    await asyncio.sleep(0.3)  # they are in the servers' own queues now
    first.signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        await until(lambda: "down" in conditions(gateway))
        down_s = time.monotonic()
        assert down_s - stopped_s >= LOST_S - 0.5
        await asyncio.wait([item.task for item in running if item.backend == names[0]], timeout=GENEROUS_S)
        await asyncio.wait_for(asyncio.gather(*(item.task for item in running)), ANSWER_TIMEOUT_S)
        await asyncio.wait_for(asyncio.gather(*(item.task for item in (*streams, *wholes, *vectors))), ANSWER_TIMEOUT_S)
        for item in running:
            last = item.events()[-2]
            if item.backend == names[0]:
                assert json.loads(last)["error"]["code"] == "backend_error"
                assert item.ended_s - down_s < 5
            else:
                assert '"finish_reason":"length"' in item.data.decode()
        assert names[0] in {item.backend for item in streams}  # whose status was told, and no event
        for item in streams:
            assert item.status == 200
            assert item.events()[-1] == "[DONE]"
            assert "error" not in item.data.decode()
        assert [item.status for item in wholes] == [200] * 6
        assert {item.backend for item in wholes} == {names[1]}
        assert {item.status for item in vectors} == {200}
        after = Request(http, "/v1/completions", prompt=prompt(40), max_tokens=2)
        await asyncio.wait_for(after.task, GENEROUS_S)
        assert (after.status, after.backend) == (200, names[1])
    finally:
        first.signal(signal.SIGCONT)
    await until(lambda: "down" not in conditions(gateway))
    assert gateway.metrics().sum("kvgate_retries_total") > 0


async def test_a_frozen_server_gets_no_new_requests_long_before_it_is_down(
    servers: tuple[KvgateProcess, KvgateProcess], gateway: Gateway, http: httpx2.AsyncClient
) -> None:
    first, second = servers
    first.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(3.5)  # a look begins within a second, and is late after another
        for number in range(8):
            item = Request(http, "/v1/completions", prompt=[2000 + number] * 20, max_tokens=2)
            await asyncio.wait_for(item.task, 3)
            assert item.backend == f"127.0.0.1:{second.port}"
    finally:
        first.signal(signal.SIGCONT)
    await until(lambda: conditions(gateway) == ["up", "up"])
