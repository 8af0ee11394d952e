"""More requests at once than the KV cache holds: the gateway lets none be preempted, the server alone some."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from e2e_backends import Backend, Backends
from e2e_gateway import Gateway, eventually, serving
from e2e_processes import PLAIN

REQUESTS = 12


@pytest.fixture(scope="module")
def small_only(backends: Backends) -> Iterator[Gateway]:
    """A gateway whose one server is the small one."""
    with serving([backends.small.url], backends.model) as gateway:
        yield gateway
        eventually(lambda: gateway.in_flight() == 0 and gateway.metrics().sum("kvgate_kv_used_blocks") == 0)


def long_requests(backend: Backend, model: str, salt: int) -> list[dict[str, Any]]:
    """Twelve requests of which the cache holds six at their full length. Prompts share no prefix; all of them fit."""
    each_blocks = 2 * backend.capacity_blocks // REQUESTS
    prompt_tokens = backend.capacity_blocks // REQUESTS * backend.block_size_tokens - 8
    output_tokens = each_blocks * backend.block_size_tokens - prompt_tokens - 8
    return [
        {
            "model": model,
            "prompt": [1000 * salt + number, *([100 + number] * (prompt_tokens - 1))],
            "max_tokens": output_tokens,
            "ignore_eos": True,
        }
        for number in range(REQUESTS)
    ]


async def all_at_once(url: str, bodies: list[dict[str, Any]]) -> list[httpx2.Response]:
    async with httpx2.AsyncClient(timeout=300, **PLAIN) as client:
        return await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for body in bodies))


async def test_straight_at_the_server_long_requests_are_preempted(backends: Backends) -> None:
    before = backends.small.preemptions()
    answers = await all_at_once(backends.small.url, long_requests(backends.small, backends.model, 1))
    assert [answer.status_code for answer in answers] == [200] * REQUESTS
    assert backends.small.preemptions() > before


async def test_through_the_gateway_the_same_load_is_never_preempted(small_only: Gateway, backends: Backends) -> None:
    before = backends.small.preemptions()
    bodies = long_requests(backends.small, backends.model, 2)
    answers = await all_at_once(small_only.url, bodies)
    assert [answer.status_code for answer in answers] == [200] * REQUESTS
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [bodies[0]["max_tokens"]] * REQUESTS
    assert backends.small.preemptions() == before
    # Half of them had to wait for the other half.
    waits_ms = sorted(float(answer.headers["x-kvgate-queue-wait-ms"]) for answer in answers)
    assert waits_ms[0] < 1000 < waits_ms[-1]


async def test_the_load_spreads_over_both_servers_and_is_never_preempted(gateway: Gateway, backends: Backends) -> None:
    before = [backend.preemptions() for backend in backends.both()]
    answers = await all_at_once(gateway.url, long_requests(backends.small, backends.model, 3))
    assert [answer.status_code for answer in answers] == [200] * REQUESTS
    assert [backend.preemptions() for backend in backends.both()] == before
    assert {answer.headers["x-kvgate-backend"] for answer in answers} == {b.label for b in backends.both()}


async def test_requests_that_wait_and_hang_up_leave_the_queue(small_only: Gateway, backends: Backends) -> None:
    bodies = long_requests(backends.small, backends.model, 4)

    async def impatient(body: dict[str, Any]) -> None:
        async with httpx2.AsyncClient(timeout=1.0, **PLAIN) as client:
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(f"{small_only.url}/v1/completions", json=body)

    await asyncio.gather(*(impatient(body) for body in bodies))
    eventually(lambda: small_only.in_flight() == 0 and backends.small.at_rest(), timeout_s=5)
