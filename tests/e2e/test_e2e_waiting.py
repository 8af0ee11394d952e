"""Streams in a full queue: opened before their turn, kept alive, and whole in the end; classes before others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from e2e_backends import Backends
from e2e_gateway import Gateway, eventually, serving
from e2e_processes import PLAIN
from test_e2e_placing import REQUESTS, long_requests


@pytest.fixture(scope="module")
def patient(backends: Backends) -> Iterator[Gateway]:
    """A gateway before the small server that opens streams after a short wait, and refuses after a long one."""
    settings = {"PLACING__KEEPALIVE_AFTER_S": "0.1", "RELAY__KEEPALIVE_S": "0.1"}
    with serving([backends.small.url], backends.model, settings) as gateway:
        yield gateway
        eventually(lambda: gateway.in_flight() == 0)


async def stream(client: httpx2.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as answer:
        return answer.status_code, (await answer.aread()).decode()


async def test_streams_that_wait_are_kept_alive_and_come_whole(patient: Gateway, backends: Backends) -> None:
    bodies = long_requests(backends.small, backends.model, 7)
    async with httpx2.AsyncClient(base_url=patient.url, timeout=300, **PLAIN) as client:
        answers = await asyncio.gather(*(stream(client, body, {}) for body in bodies))
    assert [status for status, _ in answers] == [200] * REQUESTS
    assert all(text.endswith("data: [DONE]\n\n") for _, text in answers)
    waited = [text for _, text in answers if text.startswith(": keep-alive\n\n")]
    assert waited
    for text in waited:
        assert text.count('"choices"') > 10
        assert '"error"' not in text


async def test_who_names_a_better_class_is_served_first(patient: Gateway, backends: Backends) -> None:
    bodies = long_requests(backends.small, backends.model, 8)
    done: list[str] = []

    async def send(body: dict[str, Any], name: str) -> None:
        answer = await client.post("/v1/completions", json=body, headers={"x-kvgate-priority": name})
        assert answer.status_code == 200
        done.append(name)

    async with httpx2.AsyncClient(base_url=patient.url, timeout=300, **PLAIN) as client:
        first = [asyncio.create_task(send(body, "normal")) for body in bodies[:6]]
        await asyncio.sleep(0.3)
        low = [asyncio.create_task(send(body, "low")) for body in bodies[6:9]]
        await asyncio.sleep(0.3)
        high = [asyncio.create_task(send(body, "high")) for body in bodies[9:]]
        await asyncio.gather(*first, *low, *high)
    assert done.index("high") < done.index("low")
