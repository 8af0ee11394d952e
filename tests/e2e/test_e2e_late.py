"""Two servers of which one begins to answer late: too few to tell an outlier, so its price has to do it.

Simulated ones only: a real server cannot be asked to be late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
from e2e_backends import LARGE, MODEL, simulated
from e2e_gateway import Gateway, serving
from e2e_processes import PLAIN, KvgateProcess

LATE_S = 0.4  # ten times what the other takes, and less than an outlier must be late
CLIENTS = 6
SPREAD = 40


class Traffic:
    """Clients that ask one question after the other, and where each was answered."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._chance = random.Random(1)
        self.backends: list[str] = []

    async def run(self) -> None:
        async with httpx2.AsyncClient(base_url=self._url, timeout=60, **PLAIN) as http:
            await asyncio.gather(*(self._client(http) for _ in range(CLIENTS)))

    async def _client(self, http: httpx2.AsyncClient) -> None:
        while True:
            prompt = [self._chance.randint(1000, 9000) for _ in range(self._chance.randint(20, 600))]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_bytes():
                    pass
            self.backends.append(answer.headers["x-kvgate-backend"])

    def share(self, server: KvgateProcess, last: int = SPREAD) -> float:
        """The part of the last answers that came from a server."""
        return self.backends[-last:].count(f"127.0.0.1:{server.port}") / last

    async def more(self, count: int) -> None:
        """Until so many more were answered."""
        until, end_s = len(self.backends) + count, time.monotonic() + 60
        while len(self.backends) < until:
            assert time.monotonic() < end_s, "no progress"
            await asyncio.sleep(0.02)

    async def even(self, server: KvgateProcess, timeout_s: float) -> None:
        """Until a server has its share of the traffic."""
        end_s = time.monotonic() + timeout_s
        while len(self.backends) < SPREAD or not 0.3 < self.share(server) < 0.7:
            assert time.monotonic() < end_s, self.share(server)
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[KvgateProcess, KvgateProcess]]:
    with simulated(LARGE) as first, simulated(LARGE) as second:
        yield first, second


@pytest.fixture
def gateway(servers: tuple[KvgateProcess, KvgateProcess]) -> Iterator[Gateway]:
    with serving([server.url for server in servers], MODEL) as gateway:
        yield gateway


@pytest.fixture
async def traffic(gateway: Gateway) -> AsyncIterator[Traffic]:
    made = Traffic(gateway.url)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def late(server: KvgateProcess, fault: str | None) -> None:
    async with httpx2.AsyncClient(**PLAIN) as http:
        (await http.post(f"{server.url}/simulator/fault", json={"fault": fault})).raise_for_status()


async def test_a_late_server_is_avoided_as_long_as_it_is_late(
    servers: tuple[KvgateProcess, KvgateProcess], gateway: Gateway, traffic: Traffic
) -> None:
    first, second = servers
    await traffic.even(second, 20)
    await late(first, f"slow-headers={LATE_S}")
    await traffic.more(3 * SPREAD)  # in which it is found out
    await traffic.more(200)
    assert traffic.share(second, 200) >= 0.95
    base_s = {
        sample.labels["backend"]: sample.value
        for sample in gateway.metrics().named("kvgate_backend_first_byte_seconds")
    }
    assert base_s[f"127.0.0.1:{second.port}"] < LATE_S / 4 < base_s[f"127.0.0.1:{first.port}"]
    await late(first, None)
    await traffic.even(first, 90)
