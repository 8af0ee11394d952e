"""Servers that die, stall or talk nonsense. Simulated ones only: a real server cannot be asked to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest
from e2e_backends import LARGE, MODEL, SMALL, simulated
from e2e_cases import says
from e2e_gateway import Gateway, events, eventually, serving
from e2e_processes import PLAIN, KvgateProcess


@dataclass(frozen=True)
class Scene:
    """One gateway, two simulated servers; small requests go to ``first``."""

    gateway: Gateway
    first: KvgateProcess
    second: KvgateProcess


def break_it(server: KvgateProcess, fault: str | None) -> None:
    httpx2.post(f"{server.url}/simulator/fault", json={"fault": fault}, **PLAIN).raise_for_status()


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[KvgateProcess, KvgateProcess]]:
    with simulated(SMALL) as first, simulated(LARGE) as second:
        yield first, second


@pytest.fixture
def scene(servers: tuple[KvgateProcess, KvgateProcess]) -> Iterator[Scene]:
    """A new gateway each time, so that no breaker is left open by the test before."""
    first, second = servers
    with serving(
        [first.url, second.url], MODEL, {"RELAY__IDLE_TIMEOUT_S": "1", "RELAY__KEEPALIVE_S": "0.5"}
    ) as gateway:
        yield Scene(gateway, first, second)
        for server in servers:
            break_it(server, None)
        eventually(lambda: gateway.in_flight() == 0)


def label(server: KvgateProcess) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("fault", ["die-after-chunks=4", "stall-after-chunks=4"])
def test_a_server_lost_mid_stream_ends_the_stream_with_an_error_event(scene: Scene, fault: str) -> None:
    break_it(scene.first, f"{fault}:1")
    with scene.gateway.stream("/v1/chat/completions", **says("hi"), max_tokens=500, ignore_eos=True) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-kvgate-backend"] == label(scene.first)
        sent = events(answer)
    assert sent[-1] == "[DONE]"
    error = json.loads(sent[-2])["error"]
    assert error["type"] == "server_error"
    assert error["code"] in {"backend_error", "backend_timeout"}
    assert all("error" not in json.loads(item) for item in sent[:-2])
    assert scene.gateway.chat(**says("again"), max_tokens=2).status_code == 200


@pytest.mark.parametrize("fault", ["die-before-headers", "status=503"])
def test_a_server_lost_before_the_first_byte_is_replaced_by_another(scene: Scene, fault: str) -> None:
    break_it(scene.first, fault)
    answer = scene.gateway.chat(**says("hi"), max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvgate-backend"] == label(scene.second)
    with scene.gateway.stream("/v1/chat/completions", **says("hi"), max_tokens=2) as stream:
        assert stream.status_code == 200
        assert events(stream)[-1] == "[DONE]"


def test_when_every_server_fails_the_client_is_told_so(scene: Scene) -> None:
    for server in (scene.first, scene.second):
        break_it(server, "die-before-headers")
    answer = scene.gateway.chat(**says("hi"), max_tokens=2)
    assert answer.status_code in {502, 503}
    assert answer.json()["error"]["type"] == "server_error"


def test_an_answer_that_is_garbage_is_an_error_of_the_server(scene: Scene) -> None:
    break_it(scene.first, "garbage:1")
    break_it(scene.second, "garbage:1")
    answer = scene.gateway.chat(**says("hi"), max_tokens=2)
    assert answer.status_code in {200, 502}
    if answer.status_code == 502:
        assert answer.json()["error"]["code"] == "backend_error"
    else:
        assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("fault", ["no-metrics", "garbage-metrics"])
def test_a_server_whose_metrics_are_gone_still_serves(scene: Scene, fault: str) -> None:
    for server in (scene.first, scene.second):
        break_it(server, fault)
    for _ in range(5):
        assert scene.gateway.chat(**says("hi"), max_tokens=2).status_code == 200


def test_a_server_that_comes_up_later_joins(scene: Scene) -> None:
    window = LARGE[0]
    prompt = [100] * (window - 10)
    assert scene.gateway.complete(prompt, max_tokens=2).headers["x-kvgate-backend"] == label(scene.second)
    late = KvgateProcess("late", ["simulate", "--model", MODEL, "--max-model-len", "32768", "--block-size", "32"])
    with serving([scene.first.url, late.url], MODEL, {"FLEET__DISCOVER_INTERVAL_S": "0.5"}, seen=1) as other:
        refused = other.complete(prompt, max_tokens=2)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        late.start()
        try:
            late.wait_ready("/health")
            eventually(lambda: other.complete(prompt, max_tokens=2).status_code == 200, timeout_s=15)
        finally:
            late.stop()


@pytest.mark.parametrize("fault", ["stall-after-chunks=0", "slow-headers=5"])
def test_a_stream_that_does_not_begin_is_sent_to_the_other_server_too(
    servers: tuple[KvgateProcess, KvgateProcess], fault: str
) -> None:
    """With hedging. What the silent server held is free at once, there as here."""
    first, second = servers
    settings = {"RELAY__HEDGE": "fixed", "RELAY__HEDGE_AFTER_S": "0.3", "RELAY__HEDGE_SHARE": "1"}
    with serving([first.url, second.url], MODEL, settings) as gateway:
        break_it(first, fault)
        with gateway.stream("/v1/chat/completions", **says("hi"), max_tokens=5, ignore_eos=True) as answer:
            assert answer.status_code == 200
            assert answer.headers["x-kvgate-backend"] == label(second)
            assert answer.headers["x-kvgate-hedge"] == "won"
            sent = events(answer)
        assert sent[-1] == "[DONE]"
        assert all("error" not in json.loads(item) for item in sent[:-1])
        page = gateway.metrics()
        assert {s.labels["outcome"]: s.value for s in page.named("kvgate_hedges_total") if s.value} == {"won": 1.0}
        break_it(first, None)
        eventually(lambda: gateway.in_flight() == 0)
