"""Servers that sleep, start, refuse or tell nonsense of themselves: known as such, and every request is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from e2e_backends import LARGE, MODEL, SMALL, simulated
from e2e_cases import says
from e2e_gateway import Gateway, events, eventually, serving
from e2e_processes import LOGS, PLAIN, KvgateProcess

QUICK = {
    "FLEET__SCRAPE_INTERVAL_S": "0.1",
    "FLEET__SCRAPE_SLOWEST_S": "0.2",
    "FLEET__DISCOVER_INTERVAL_S": "0.3",
    "FLEET__TIMEOUT_S": "2",
}


@dataclass(frozen=True)
class Scene:
    """One gateway, two simulated servers; small requests go to ``first``."""

    gateway: Gateway
    first: KvgateProcess
    second: KvgateProcess

    def is_true(self, metric: str, server: KvgateProcess, **labels: str) -> bool:
        return self.gateway.metrics().sum(f"kvgate_backend_{metric}", backend=label(server), **labels) == 1

    def log(self) -> str:
        return (LOGS / f"gateway-{httpx2.URL(self.gateway.url).port}.log").read_text()


def label(server: KvgateProcess) -> str:
    return f"127.0.0.1:{server.port}"


def break_it(server: KvgateProcess, fault: str | None) -> None:
    httpx2.post(f"{server.url}/simulator/fault", json={"fault": fault}, **PLAIN).raise_for_status()


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[KvgateProcess, KvgateProcess]]:
    with simulated(SMALL) as first, simulated(LARGE) as second:
        yield first, second


@pytest.fixture(scope="module")
def shared(servers: tuple[KvgateProcess, KvgateProcess]) -> Iterator[Gateway]:
    with serving([server.url for server in servers], MODEL, QUICK) as gateway:
        eventually(gateway.counts_locally, timeout_s=60)
        yield gateway


@pytest.fixture
def scene(servers: tuple[KvgateProcess, KvgateProcess], shared: Gateway) -> Iterator[Scene]:
    scene = Scene(shared, *servers)
    yield scene
    for server in servers:
        break_it(server, None)
    for server in servers:
        eventually(lambda server=server: scene.is_true("up", server))  # type: ignore[misc]
        eventually(lambda server=server: troubles(scene, server) == set())  # type: ignore[misc]
    eventually(lambda: shared.metrics().sum("kvgate_backend_breaker_open") == 0)
    eventually(lambda: len(shared.metrics().named("kvgate_kv_capacity_blocks")) == 2)
    eventually(lambda: shared.in_flight() == 0)


def troubles(scene: Scene, server: KvgateProcess) -> set[str]:
    page = scene.gateway.metrics()
    return {
        sample.labels["kind"]
        for sample in page.named("kvgate_backend_trouble")
        if sample.value and sample.labels["backend"] == label(server)
    }


def status_of(scene: Scene, server: KvgateProcess) -> dict[str, Any]:
    backends = scene.gateway.http.get("/kvgate/status").json()["backends"]
    found: dict[str, Any] = next(item for item in backends if item["name"] == label(server))
    return found


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("no-metrics", {"no_metrics"}),
        ("garbage-metrics", {"not_metrics"}),
        ("endless-metrics", {"not_metrics"}),
        ("slow-metrics=9", {"metrics_failing"}),
        ("nan-metrics", {"bad_value"}),
        ("high-metrics", {"bad_value"}),
        ("renamed-metrics", {"no_usage", "no_capacity"}),
        ("doubled-metrics", {"duplicate_engine"}),
        ("backward-metrics", {"counter_back"}),
        ("two-servers", {"several_servers"}),
        ("clock-jump", {"clock_jump"}),
    ],
)
def test_odd_metrics_are_known_by_name_and_no_request_suffers(scene: Scene, fault: str, kinds: set[str]) -> None:
    # Counters that stand at 0 cannot go back.
    scene.gateway.chat(**says("count something"), max_tokens=2)
    scene.gateway.complete([100] * (SMALL[0] + 100), max_tokens=2)
    for server in (scene.first, scene.second):
        break_it(server, fault)
    eventually(lambda: all(kinds <= troubles(scene, server) for server in (scene.first, scene.second)))
    for _ in range(5):
        answer = scene.gateway.chat(**says("hi"), max_tokens=2)
        assert answer.status_code == 200, answer.text
    with scene.gateway.stream("/v1/chat/completions", **says("hi"), max_tokens=2) as stream:
        assert events(stream)[-1] == "[DONE]"
    for server in (scene.first, scene.second):
        assert scene.is_true("up", server)
    begun = [line for line in scene.log().splitlines() if f"backend {label(scene.first)}: {min(kinds)}: " in line]
    assert len(begun) == 1  # no flood


def test_of_a_page_that_is_none_the_cache_is_unknown_and_of_a_sane_one_known_again(scene: Scene) -> None:
    break_it(scene.first, "two-servers")
    eventually(lambda: status_of(scene, scene.first)["kv"] is None)
    assert status_of(scene, scene.first)["troubles"][0]["kind"] == "several_servers"
    break_it(scene.first, None)
    eventually(lambda: status_of(scene, scene.first)["kv"] is not None)


def test_a_server_that_sleeps_gets_nothing_and_is_back_when_it_wakes_up(scene: Scene) -> None:
    break_it(scene.first, "asleep")
    eventually(lambda: scene.is_true("condition", scene.first, condition="asleep"))
    for _ in range(3):
        answer = scene.gateway.chat(**says("hi"), max_tokens=2)
        assert answer.headers["x-kvgate-backend"] == label(scene.second)
    break_it(scene.second, "asleep")
    eventually(lambda: scene.is_true("condition", scene.second, condition="asleep"))
    refused = scene.gateway.chat(**says("hi"), max_tokens=2)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "15"
    assert refused.json()["error"]["code"] == "no_backend"
    assert "asleep" in refused.json()["error"]["message"]
    anthropic = scene.gateway.http.post("/v1/messages", json={"model": MODEL, **says("hi"), "max_tokens": 2})
    assert anthropic.json()["error"]["type"] == "overloaded_error"
    break_it(scene.first, None)
    eventually(lambda: scene.gateway.chat(**says("hi"), max_tokens=2).status_code == 200)
    eventually(lambda: scene.is_true("condition", scene.first, condition="up"), timeout_s=15)


@pytest.mark.parametrize("fault", ["scaling", "no-models"])
def test_a_server_that_is_not_ready_is_starting_and_not_failing(scene: Scene, fault: str) -> None:
    break_it(scene.first, fault)
    eventually(lambda: scene.is_true("condition", scene.first, condition="starting"))
    answer = scene.gateway.chat(**says("hi"), max_tokens=2)
    assert answer.headers["x-kvgate-backend"] == label(scene.second)
    assert scene.gateway.metrics().sum("kvgate_backend_breaker_open", backend=label(scene.first)) == 0


def test_a_dead_engine_is_found_before_a_request_meets_it(scene: Scene) -> None:
    break_it(scene.first, "unhealthy")
    eventually(lambda: scene.is_true("condition", scene.first, condition="down"))
    assert "engine is dead" in status_of(scene, scene.first)["error"]


def test_what_a_full_server_refuses_goes_to_another(scene: Scene) -> None:
    break_it(scene.first, "overloaded=0")
    answer = scene.gateway.chat(**says("hi"), max_tokens=2)
    assert answer.status_code == 200
    assert answer.headers["x-kvgate-backend"] == label(scene.second)
    assert scene.gateway.metrics().sum("kvgate_backend_overloads", backend=label(scene.first)) >= 1
    assert scene.gateway.metrics().sum("kvgate_backend_breaker_open", backend=label(scene.first)) == 0
    assert scene.is_true("up", scene.first)


def test_what_all_servers_refuse_waits_for_its_turn_and_is_served(scene: Scene) -> None:
    for server in (scene.first, scene.second):
        break_it(server, "overloaded=1")

    def ask(number: int) -> int:
        return scene.gateway.chat(**says(f"number {number}"), max_tokens=20, ignore_eos=True).status_code

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [200] * 8


def test_a_full_server_that_takes_nothing_for_too_long_is_a_full_queue_to_the_client(
    servers: tuple[KvgateProcess, KvgateProcess],
) -> None:
    with serving([servers[0].url], MODEL, QUICK | {"PLACING__QUEUE_TIMEOUT_S": "1.5"}) as gateway:
        break_it(servers[0], "overloaded=0")
        try:
            refused = gateway.chat(**says("hi"), max_tokens=2)
        finally:
            break_it(servers[0], None)
    assert refused.status_code == 429
    assert refused.headers["retry-after"]


def test_one_server_under_two_urls_counts_once(servers: tuple[KvgateProcess, KvgateProcess]) -> None:
    first = servers[0]
    with serving([first.url, f"http://0.0.0.0:{first.port}"], MODEL, QUICK) as gateway:
        second = f"0.0.0.0:{first.port}"
        page = gateway.metrics
        eventually(lambda: page().sum("kvgate_backend_trouble", backend=second, kind="same_server") == 1)
        eventually(lambda: page().sum("kvgate_backend_condition", backend=second, condition="standby") == 1)
        for _ in range(3):
            assert gateway.chat(**says("hi"), max_tokens=2).headers["x-kvgate-backend"] == label(first)
        assert page().sum("kvgate_backend_trouble", backend=label(first)) == 0


def test_one_url_in_two_spellings_is_one_backend_and_shows(servers: tuple[KvgateProcess, KvgateProcess]) -> None:
    first = servers[0]
    with serving([first.url, f"http://LOCALHOST:{first.port}/v1/"], MODEL, QUICK, seen=1) as gateway:
        (backend,) = json.loads(gateway.http.get("/kvgate/status").text)["backends"]
        assert [trouble["kind"] for trouble in backend["troubles"]] == ["listed_twice"]
        assert gateway.chat(**says("hi"), max_tokens=2).status_code == 200
