"""The gateway under test: the real ``kvgate serve`` in front of servers, and what a client sees of it."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from e2e_metrics import Page, scrape
from e2e_processes import PLAIN, KvgateProcess

# Generous: the servers share two cores with everything else.
ANSWER_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Gateway:
    """A running gateway. ``http`` is a client whose base URL it is."""

    url: str
    http: httpx2.Client
    model: str

    def chat(self, **body: Any) -> httpx2.Response:
        return self.http.post("/v1/chat/completions", json={"model": self.model, **body})

    def complete(self, prompt: Any, **body: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"model": self.model, "prompt": prompt, **body})

    def stream(self, path: str, **body: Any) -> contextlib.AbstractContextManager[httpx2.Response]:
        return self.http.stream("POST", path, json={"model": self.model, "stream": True, **body})

    def counts_locally(self) -> bool:
        """Whether its tokenizer is loaded."""
        answer = self.http.post("/tokenize", json={"model": self.model, "prompt": "x"})
        return answer.headers.get("x-kvgate-count-source") == "local"

    def metrics(self) -> Page:
        return scrape(self.url)

    def in_flight(self) -> float:
        """What the gateway holds for requests: places at servers and in the queue, and blocks set aside.

        A server whose KV cache is unknown has no blocks to set aside, and no gauge of them.
        """
        page = self.metrics()
        blocks = sum(sample.value for sample in page.named("kvgate_kv_reserved_blocks"))
        return blocks + sum(page.sum(f"kvgate_{name}") for name in HELD)


# The gauges that are zero when no request is anywhere in the gateway.
HELD = ("requests_in_flight", "queue_requests", "queue_bytes")


@contextlib.contextmanager
def serving(
    urls: Sequence[str], model: str, settings: dict[str, str] | None = None, *, seen: int | None = None
) -> Iterator[Gateway]:
    """``kvgate serve`` in front of ``urls``, once it has seen the KV cache of ``seen`` (all) of them.

    ``settings`` are environment variables without their prefix, such as ``FLEET__SCRAPE_INTERVAL_S``.
    """
    flags = ["serve", *(part for url in urls for part in ("--backend", url))]
    environment = {f"KVGATE_{key}": value for key, value in (settings or {}).items()}
    expected = len(urls) if seen is None else seen
    process = KvgateProcess("gateway", flags, environment)
    process.start()
    try:
        process.wait_ready("/ready")
        with httpx2.Client(base_url=process.url, timeout=ANSWER_TIMEOUT_S, **PLAIN) as http:
            gateway = Gateway(process.url, http, model)
            eventually(lambda: len(gateway.metrics().named("kvgate_kv_capacity_blocks")) >= expected)
            yield gateway
    finally:
        status = process.stop()
    assert status == 0, f"the gateway ended with {status}:\n{process.tail()}"


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Wait until ``condition`` holds; seconds it took. Fails the test when the time is up."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s} s: {condition}"
        time.sleep(0.005)
    return time.monotonic() - started


def assert_at_once(took_s: list[float], at_once_s: float) -> None:
    """Of several times that something took, looking included, most are short, and the best is next to nothing.

    A look at two servers takes some hundredths of a second, and on a busy machine any one of them may take long.
    """
    assert statistics.median(took_s) < 1.0, took_s
    assert min(took_s) < at_once_s, took_s


def events(response: httpx2.Response) -> list[str]:
    """The data of each event of a finished or running stream, comments left out."""
    return [line[len("data: ") :] for line in response.iter_lines() if line.startswith("data: ")]


def chunks(response: httpx2.Response) -> list[dict[str, Any]]:
    """The JSON of each event, ``[DONE]`` checked and left out."""
    data = events(response)
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(item) for item in data[:-1]]
