"""The gateway is told to stop: what becomes of its readiness, new connections, the queue and what runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from e2e_backends import MODEL, SMALL, Backend, simulated
from e2e_cases import says
from e2e_gateway import Gateway, eventually
from e2e_processes import PLAIN, KvgateProcess
from test_e2e_placing import long_requests


@pytest.fixture(scope="module")
def server() -> Iterator[Backend]:
    """A simulated server: the gateways stop, it goes on."""
    with simulated(SMALL) as process:
        backend = Backend.at(process.url)
        yield backend
        eventually(backend.at_rest)


@contextlib.contextmanager
def gateway(server: Backend, **settings: str) -> Iterator[tuple[KvgateProcess, Gateway]]:
    """A gateway that the test will stop."""
    environment = {f"KVGATE_{name}": value for name, value in settings.items()}
    process = KvgateProcess("stopping", ["serve", "--backend", server.url], environment)
    process.start()
    try:
        process.wait_ready("/ready")
        with httpx2.Client(base_url=process.url, timeout=60, **PLAIN) as http:
            seen = Gateway(process.url, http, MODEL)
            eventually(lambda: bool(seen.metrics().named("kvgate_kv_capacity_blocks")))
            yield process, seen
    finally:
        process.stop()
    assert "Traceback" not in process.tail(200)


def get(url: str) -> int | None:
    """The status a new connection gets; ``None`` if it is refused, or reset because it was not taken any more."""
    try:
        return httpx2.get(url, timeout=5, **PLAIN).status_code
    except httpx2.TransportError:
        return None


def last_error(sent: list[str]) -> dict[str, Any]:
    """The error event a chat or completions stream ended with."""
    assert sent[-1] == "[DONE]"
    error = json.loads(sent[-2])["error"]
    assert isinstance(error, dict)
    return error


def test_through_the_notice_all_is_served_while_readiness_says_no(server: Backend) -> None:
    with gateway(server, SHUTDOWN__NOTICE_S="3") as (process, seen):
        assert "connection" not in seen.chat(**says("hi"), max_tokens=1).headers
        process.signal(signal.SIGTERM)
        took_s = eventually(lambda: get(f"{seen.url}/ready") == 503, timeout_s=2)
        assert took_s < 1.0
        assert get(f"{seen.url}/health") == 200
        answer = httpx2.post(
            f"{seen.url}/v1/chat/completions", json={"model": MODEL, **says("hi"), "max_tokens": 1}, timeout=30, **PLAIN
        )
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        eventually(lambda: get(f"{seen.url}/ready") is None)
        assert process.wait() == 0


def test_an_answer_under_way_ends_whole_and_nobody_else_is_let_in(server: Backend) -> None:
    with gateway(server) as (process, seen):
        with seen.stream("/v1/completions", prompt="a", max_tokens=300, ignore_eos=True) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.signal(signal.SIGTERM)
            eventually(lambda: get(f"{seen.url}/health") is None)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 250
        assert process.wait() == 0


def test_an_idle_connection_is_closed_in_good_order(server: Backend) -> None:
    with gateway(server) as (process, seen):
        assert seen.http.get("/health").status_code == 200  # and is kept
        started_s = time.monotonic()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert time.monotonic() - started_s < 10  # it waits for nobody
        with pytest.raises(httpx2.ConnectError):
            seen.http.get("/health")


async def until(seen: Gateway, metric: str, least: int) -> None:
    """Wait until so many requests run, or wait."""
    await asyncio.to_thread(eventually, lambda: seen.metrics().sum(f"kvgate_{metric}") >= least)


async def test_who_waits_is_sent_elsewhere_and_who_runs_is_not(server: Backend) -> None:
    """Of twelve that want the cache five find room. The others wait, two in streams that are opened meanwhile."""
    settings = {"PLACING__KEEPALIVE_AFTER_S": "0.1", "RELAY__KEEPALIVE_S": "0.1"}
    bodies = long_requests(server, MODEL, 11)
    with gateway(server, **settings) as (process, seen):
        async with httpx2.AsyncClient(base_url=seen.url, timeout=120, **PLAIN) as client:

            async def post(body: dict[str, Any]) -> httpx2.Response:
                return await client.post("/v1/completions", json=body)

            async def stream(body: dict[str, Any]) -> list[str]:
                async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                    text = (await answer.aread()).decode()
                return [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]

            plain = [asyncio.create_task(post(body)) for body in bodies[:10]]
            await until(seen, "queue_requests", 5)
            streams = [asyncio.create_task(stream(body)) for body in bodies[10:]]
            await until(seen, "queue_requests", 7)
            await asyncio.sleep(0.4)  # streams are opened
            process.signal(signal.SIGTERM)
            ended = [await task for task in streams]
            answers = [await task for task in plain]
        assert process.wait() == 0
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) == 5
    for answer in refused:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "shutting_down"
    for sent in ended:
        assert last_error(sent)["code"] == "shutting_down"


async def test_who_waits_is_told_in_its_own_dialect(server: Backend) -> None:
    bodies = long_requests(server, MODEL, 12)
    message = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": " a" * 3000}]}
    with gateway(server) as (process, seen):
        await asyncio.to_thread(eventually, seen.counts_locally, 60.0)
        async with httpx2.AsyncClient(base_url=seen.url, timeout=120, **PLAIN) as client:
            first = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies[:5]]
            await until(seen, "requests_in_flight", 5)
            waits = asyncio.create_task(client.post("/v1/messages", json=message))
            await until(seen, "queue_requests", 1)
            process.signal(signal.SIGTERM)
            answer = await waits
            await asyncio.gather(*first)
        assert process.wait() == 0
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["type"] == "error"


@pytest.mark.parametrize("how", ["the grace is over", "a second signal"])
def test_what_has_not_ended_is_cut_off_with_an_error_event(server: Backend, how: str) -> None:
    settings = {"SHUTDOWN__GRACE_S": "1"} if how == "the grace is over" else {}
    with gateway(server, **settings) as (process, seen):
        with seen.stream("/v1/chat/completions", **says("hi"), max_tokens=3000, ignore_eos=True) as stream:
            lines = stream.iter_lines()
            next(lines)
            started_s = time.monotonic()
            process.signal(signal.SIGTERM)
            if how == "a second signal":
                time.sleep(0.5)
                process.signal(signal.SIGTERM)
            sent = [line[len("data: ") :] for line in lines if line.startswith("data: ")]
            assert time.monotonic() - started_s < 10
        assert last_error(sent)["code"] == "shutting_down"
        assert process.wait() == 0
    eventually(server.at_rest)


def test_a_client_that_reads_nothing_does_not_keep_the_gateway(server: Backend) -> None:
    """Its connection is full: not even the end of the stream can be written."""
    with gateway(server, SHUTDOWN__GRACE_S="0.5") as (process, seen):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 8}
        with httpx2.stream("POST", f"{seen.url}/v1/completions", json=body, timeout=30, **PLAIN) as stream:
            next(stream.iter_raw(16))
            time.sleep(1.0)
            process.signal(signal.SIGINT)
            assert process.wait() == 0
    eventually(server.at_rest)


def test_without_requests_it_ends_at_once(server: Backend) -> None:
    with gateway(server) as (process, _):
        started_s = time.monotonic()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert time.monotonic() - started_s < 10
