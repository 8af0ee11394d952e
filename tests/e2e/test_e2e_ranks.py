"""A server with two engines behind one address: the gateway chooses the engine, or sees it as the server will choose.

Simulated servers: real vLLM with two engines on a CPU takes minutes and twice the memory (see docs/placing.md).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from e2e_backends import BLOCK_SIZE_TOKENS, MODEL, SMALL, simulated
from e2e_gateway import Gateway, eventually, serving
from e2e_metrics import scrape
from e2e_processes import PLAIN, KvgateProcess

from gateway.simulator.model import default_folder, ensure_model

REQUESTS = 16
WINDOW, BLOCKS = SMALL
ENGINES = ("0", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """One server with two engines, and as many API servers, as ``vllm serve`` starts them."""
    ensure_model(default_folder())
    with simulated(SMALL, "--data-parallel-size", "2", "--api-server-count", "2") as process:
        yield process.url


@contextmanager
def before(url: str, pin: bool, **settings: str) -> Iterator[Gateway]:
    backend = json.dumps([{"url": url, "name": "gpu", "pin_ranks": pin}])
    with serving([], MODEL, {"BACKENDS": backend, **settings}, seen=1) as gateway:
        yield gateway
        if not settings:  # readings that come once in ten minutes correct nothing
            eventually(lambda: gateway.in_flight() == 0 and gateway.metrics().sum("kvgate_kv_used_blocks") == 0)
        eventually(lambda: gateway.metrics().sum("kvgate_requests_in_flight") == 0)


@pytest.fixture(scope="module")
def pinned(server: str) -> Iterator[Gateway]:
    with before(server, True) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def unpinned(server: str) -> Iterator[Gateway]:
    with before(server, False) as gateway:
        yield gateway


def finished(url: str) -> Counter[str]:
    """Requests each engine of the server has ended well."""
    page = scrape(url)
    return Counter({rank: int(page.sum("vllm:request_success_total", engine=rank)) for rank in ENGINES})


def preemptions(url: str) -> int:
    return int(scrape(url).sum("vllm:num_preemptions_total"))


def load(salt: int) -> list[dict[str, Any]]:
    """Requests of which each engine holds four at their full length; every fourth is three times as large."""
    bodies = []
    for number in range(REQUESTS):
        blocks = BLOCKS // 4 if number % 4 else 3 * BLOCKS // 4
        output_tokens = blocks * BLOCK_SIZE_TOKENS // 4
        prompt = [1000 * salt + number] * (blocks * BLOCK_SIZE_TOKENS - output_tokens - 64)
        bodies.append({"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True})
    return bodies


async def all_at_once(gateway: Gateway, bodies: list[dict[str, Any]]) -> list[httpx2.Response]:
    async with httpx2.AsyncClient(timeout=300, **PLAIN) as client:
        url = f"{gateway.url}/v1/completions"
        answers = (client.post(url, json={"model": MODEL, **body}) for body in bodies)
        return await asyncio.gather(*answers)


def assert_engines_add_up(gateway: Gateway) -> None:
    """At one moment the gauges of the engines are those of the backend, taken apart."""
    page = gateway.metrics()
    for name in ("capacity", "used", "reserved"):
        engines = page.named(f"kvgate_engine_kv_{name}_blocks", backend="gpu")
        assert [sample.labels["engine"] for sample in engines] == list(ENGINES)
        assert sum(sample.value for sample in engines) == page.sum(f"kvgate_kv_{name}_blocks", backend="gpu")
    in_flight = page.sum("kvgate_engine_requests_in_flight", backend="gpu")
    assert in_flight == page.sum("kvgate_requests_in_flight", backend="gpu")


@pytest.mark.parametrize("pin", [True, False])
async def test_everybody_is_answered_and_with_pinned_engines_nobody_is_preempted(
    server: str, pinned: Gateway, unpinned: Gateway, pin: bool
) -> None:
    gateway = pinned if pin else unpinned
    done, preempted = finished(server), preemptions(server)
    answering = asyncio.create_task(all_at_once(gateway, load(1 + pin)))
    while not answering.done():
        await asyncio.to_thread(assert_engines_add_up, gateway)
        await asyncio.sleep(0.1)
    answers = answering.result()
    assert [answer.status_code for answer in answers] == [200] * REQUESTS
    told = Counter(answer.headers.get("x-kvgate-engine") for answer in answers)
    if pin:  # else some may be: two API servers know nothing of each other's requests for a moment
        assert preemptions(server) == preempted
        assert told == finished(server) - done
        assert all(told[rank] for rank in ENGINES)
    else:
        assert set(told) == {None}
        assert sum((finished(server) - done).values()) == REQUESTS
    assert {answer.headers["x-kvgate-backend"] for answer in answers} == {"gpu"}


def test_a_conversation_stays_at_its_engine(server: str, pinned: Gateway) -> None:
    # What others had there makes an engine dearer, until a reading tells that they have gone.
    eventually(lambda: pinned.metrics().sum("kvgate_kv_used_blocks") == 0)
    told = []
    for turn in range(4):
        other = pinned.complete([5000 + turn] * 200, max_tokens=1)  # takes the engine that is next otherwise
        prompt = " ".join(f"told in turn {number}: " + "word " * 200 for number in range(turn + 1))
        answer = pinned.complete(prompt, max_tokens=4)
        told.append(answer.headers["x-kvgate-engine"])
        assert other.status_code == answer.status_code == 200
    assert len(set(told)) == 1


def test_who_chooses_the_engine_does_not_leave_it_to_clients(server: str, pinned: Gateway) -> None:
    done = finished(server)
    headers = {"x-data-parallel-rank": "7"}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    answer = pinned.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert finished(server) - done == Counter([answer.headers["x-kvgate-engine"]])


def test_else_a_client_may_ask_for_an_engine(server: str, unpinned: Gateway) -> None:
    done = finished(server)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for rank in "1101":
        answer = unpinned.http.post("/v1/completions", json=body, headers={"x-data-parallel-rank": rank})
        assert answer.status_code == 200
    assert finished(server) - done == Counter({"1": 3, "0": 1})
    answer = unpinned.http.post("/v1/completions", json=body, headers={"x-data-parallel-rank": "2"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "data_parallel_rank 2 is out of range [0, 2)."


def test_what_a_client_asked_for_is_booked_there(unpinned: Gateway) -> None:
    body = {"model": MODEL, "prompt": [7] * 1000, "max_tokens": 500, "ignore_eos": True, "stream": True}
    headers = {"x-data-parallel-rank": "1"}
    with unpinned.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()  # to be kept: with it goes the connection
        next(lines)
        page = unpinned.metrics()
        assert [page.sum("kvgate_engine_requests_in_flight", engine=rank) for rank in ENGINES] == [0, 1]
        assert page.sum("kvgate_engine_kv_used_blocks", engine="1") >= 1000 // BLOCK_SIZE_TOKENS


def test_a_request_that_the_server_puts_where_it_likes_is_found_there(server: str, pinned: Gateway) -> None:
    """vLLM heeds no rank of a Responses request: the ledger follows its use."""
    text = "word " * 1500
    body = {"model": MODEL, "input": text, "max_output_tokens": 600, "ignore_eos": True, "stream": True}
    with pinned.http.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)

        def agrees() -> bool:
            ours, theirs = pinned.metrics(), scrape(server)
            used = [ours.sum("kvgate_engine_kv_used_blocks", engine=rank) > 40 for rank in ENGINES]
            return used == [theirs.sum("vllm:kv_cache_usage_perc", engine=rank) > 0.25 for rank in ENGINES]

        eventually(agrees)


def test_a_restart_with_fewer_engines_costs_nobody_an_answer() -> None:
    """The gateway asks for an engine that is gone, is told so, sends the request elsewhere and learns the number."""
    ensure_model(default_folder())
    flags = ["simulate", "--model", MODEL, "--max-model-len", str(WINDOW), "--num-gpu-blocks", str(BLOCKS)]
    flags += ["--decode-tokens-per-s", "100"]
    first = KvgateProcess("two-engines", [*flags, "--data-parallel-size", "2"])
    first.start()
    names = ("SCRAPE_INTERVAL_S", "SCRAPE_FASTEST_S", "SCRAPE_SLOWEST_S", "DISCOVER_INTERVAL_S")
    rare = {f"FLEET__{name}": "600" for name in names}
    try:
        first.wait_ready("/health")
        with before(first.url, True, **rare) as gateway:
            assert len(gateway.metrics().named("kvgate_engine_kv_capacity_blocks")) == 2
            first.stop()
            first = KvgateProcess("one-engine", flags, port=first.port)
            first.start()
            first.wait_ready("/health")
            body = {"model": MODEL, "prompt": [7] * 1000, "max_tokens": 1200, "ignore_eos": True, "stream": True}
            with gateway.http.stream("POST", "/v1/completions", json=body) as busy:
                assert busy.headers["x-kvgate-engine"] == "0"
                lines = busy.iter_lines()  # to be kept: with it goes the connection
                next(lines)
                answer = gateway.complete([8] * 100, max_tokens=4)
                assert (answer.status_code, answer.headers["x-kvgate-engine"]) == (200, "0")
            assert gateway.metrics().sum("kvgate_retries_total", backend="gpu") == 1
            assert gateway.metrics().sum("kvgate_backend_breaker_open", backend="gpu") == 0
            eventually(lambda: not gateway.metrics().named("kvgate_engine_kv_capacity_blocks"))
            engines = gateway.http.get("/kvgate/status").json()["backends"][0]["engines"]
            assert [engine["engine"] for engine in engines] == ["0"]
    finally:
        first.stop()
