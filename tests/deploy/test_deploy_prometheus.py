"""A real Prometheus scrapes the gateway under traffic of every outcome and answers every query of the dashboard.

The gateway is started with the image's own entry point and command, and checked with its health check.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import yaml
from deploy_files import ROOT, Query, final_stage, healthcheck, queries
from deploy_prometheus import Prometheus, prometheus
from e2e_gateway import eventually
from e2e_processes import PLAIN, KvgateProcess, free_port

from gateway.simulator.model import default_folder, ensure_model

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(180)]

MODEL = "qwen3"
KEY = "a-key-of-the-test"
SCRAPE_INTERVAL_S = 0.5
ODD_ONES, LESSONS = 3, 14  # requests a round
KV_EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:0",
    "replay_endpoint": "tcp://127.0.0.1:0",
}
INTERVAL = "5s"  # what $__rate_interval stands for here


@pytest.fixture(scope="module")
def simulators() -> Iterator[list[KvgateProcess]]:
    """A small window and a large one with two engines; both publish KV events."""
    folder = default_folder()
    ensure_model(folder)
    processes = []
    with contextlib.ExitStack() as stack:
        for window, blocks, engines in ((2048, 200, 1), (8192, 600, 2)):
            flags = ["simulate", "--model", MODEL, "--tokenizer", str(folder), "--max-model-len", str(window)]
            flags += ["--num-gpu-blocks", str(blocks), "--eos", "always", "--mean-output-tokens", "8"]
            flags += ["--enable-prompt-tokens-details", "--data-parallel-size", str(engines)]
            flags += ["--kv-events-config", json.dumps(KV_EVENTS)]
            process = KvgateProcess(f"deploy-{window}", flags)
            process.start()
            stack.callback(process.stop)
            processes.append(process)
        for process in processes:
            process.wait_ready("/health")
        yield processes


@pytest.fixture(scope="module")
def gateway(simulators: list[KvgateProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of the gateway, run as the container runs it, but on loopback."""
    stage, port = final_stage(), free_port()
    (program,) = json.loads(stage["ENTRYPOINT"])
    script = Path(sys.executable).with_name(program)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVGATE_")} | {
        "KVGATE_BACKENDS": ",".join(process.url for process in simulators),
        "KVGATE_API_KEYS": KEY,
        "KVGATE_PORT": str(port),
        "KVGATE_GPU_METRICS": "true",
        "PYTHONPATH": str(ROOT / "tests" / "planner" / "standin"),  # one card, since the machine of the test has none
    }
    command = [*json.loads(stage["CMD"]), "--host", "127.0.0.1"]
    log = tmp_path_factory.mktemp("gateway") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([script, *command], env=environment, stdout=output, stderr=output, cwd=log.parent)
    try:
        check = [sys.executable if part == "python" else part for part in healthcheck()]

        def healthy() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")
            return subprocess.run(check, env=environment, capture_output=True, timeout=30).returncode == 0

        eventually(healthy, timeout_s=60)
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: httpx2.get(f"{url}/ready", timeout=5, **PLAIN).status_code == 200, timeout_s=30)
        yield url
    finally:
        process.terminate()
        status = process.wait(30)
    assert status == 0, log.read_text(errors="replace")
    environment["KVGATE_PORT"] = str(free_port())
    assert subprocess.run(check, env=environment, capture_output=True, timeout=30).returncode != 0


@pytest.fixture(scope="module")
def scraping(gateway: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration: only addresses and intervals are those of the test."""
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": f"{SCRAPE_INTERVAL_S * 1000:.0f}ms", "scrape_timeout": "400ms"}
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] == "kvgate"]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [gateway.removeprefix("http://")]}]
    with prometheus(config, tmp_path_factory.mktemp("prometheus")) as server:
        eventually(lambda: any(target["health"] == "up" for target in server.targets()), timeout_s=20)
        yield server


@pytest.fixture(scope="module")
def loaded(gateway: str, simulators: list[KvgateProcess], scraping: Prometheus) -> Prometheus:
    """Prometheus after several rounds of requests of every kind, scraped in between."""
    with httpx2.Client(base_url=gateway, headers={"authorization": f"Bearer {KEY}"}, timeout=60, **PLAIN) as http:
        for number in range(3):
            traffic(http, simulators)
            odd_requests(http)
            lessons(http, number)
            time.sleep(2.5 * SCRAPE_INTERVAL_S)
    return scraping


def traffic(http: httpx2.Client, simulators: list[KvgateProcess]) -> None:
    """One request of each kind: served, clamped, refused by window, by name, by the backend, and one retried."""

    def chat(words: int, **body: object) -> httpx2.Response:
        messages = [{"role": "user", "content": "word " * words}]
        return http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **body})

    assert chat(10, max_tokens=4).status_code == 200
    clamped = chat(100, max_tokens=100_000)
    assert clamped.headers["x-kvgate-clamped-from"] == "100000"
    assert chat(20_000, max_tokens=4).json()["error"]["code"] == "context_length_exceeded"
    assert chat(10, model="nobody-serves-this").status_code == 404
    assert chat(10, max_tokens=4, temperature=-1).status_code == 400
    fault = {"fault": "status=502:1"}
    assert httpx2.post(f"{simulators[0].url}/simulator/fault", json=fault, timeout=5, **PLAIN).status_code == 200
    assert chat(10, max_tokens=4).headers["x-kvgate-backend"] == simulators[1].url.removeprefix("http://")
    assert chat(10, max_tokens=4).status_code == 200  # closes the breaker's count of failures


def odd_requests(http: httpx2.Client) -> None:
    """One to be counted only, one to be repaired, one to be trimmed."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "word"}]}
    assert http.post("/v1/messages/count_tokens", json=body).status_code == 200
    broken = {**body, "tools": [], "tool_choice": "auto", "max_tokens": 4}
    assert http.post("/v1/chat/completions", json=broken).headers["x-kvgate-repairs"]
    turns = [{"role": role, "content": "word " * 500} for _ in range(20) for role in ("user", "assistant")]
    long = {"model": MODEL, "messages": [*turns, body["messages"][0]], "max_tokens": 4}
    trimmed = http.post("/v1/chat/completions", json=long, headers={"x-kvgate-overflow": "trim"})
    assert int(trimmed.headers["x-kvgate-trimmed-tokens"]) > 0


def lessons(http: httpx2.Client, number: int) -> None:
    """Streams of many sizes, from whose timing the gateway learns, and a conversation that grows."""
    told = f"round {number} " + "word " * 300
    for size in range(LESSONS):
        messages = [{"role": "user", "content": told + "more " * 60 * size}]
        length = {"max_tokens": 16, "ignore_eos": True} if size % 3 == 0 else {"max_tokens": 200}
        body = {"model": MODEL, "messages": messages, "stream": True, **length}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            answer.read()


@pytest.mark.parametrize("query", list(queries(INTERVAL, "1m")), ids=lambda query: f"{query.panel} {query.ref}")
def test_query_has_an_answer(loaded: Prometheus, query: Query) -> None:
    series = loaded.query_range(query.expr, 60)
    values = [float(value) for one in series for _, value in one["values"]]
    assert any(value == value for value in values), f"no value: {query.expr}"  # NaN is not equal to itself
    assert all(value >= 0 for value in values if value == value)


def test_gateway_is_scraped_without_a_key(loaded: Prometheus) -> None:
    (target,) = loaded.targets()
    assert (target["health"], target["lastError"]) == ("up", "")
    assert target["labels"]["job"] == "kvgate"


def test_values_are_those_of_the_traffic(loaded: Prometheus, simulators: list[KvgateProcess]) -> None:
    def totals(expr: str, label: str) -> dict[str, float]:
        return {sample["metric"][label]: float(sample["value"][1]) for sample in loaded.query(expr)}

    rounds = 3
    reasons = totals("sum by (reason) (kvgate_rejections_total)", "reason")
    assert reasons == {"context_length_exceeded": rounds, "model_not_found": rounds}
    outcomes = totals("sum by (outcome) (kvgate_requests_total)", "outcome")
    assert outcomes == reasons | {"ok": (4 + ODD_ONES + LESSONS) * rounds, "upstream_4xx": rounds}
    small, large = (process.url.removeprefix("http://") for process in simulators)
    assert totals("kvgate_backend_window_tokens", "backend") == {small: 2048, large: 8192}
    assert totals("kvgate_kv_capacity_tokens", "backend") == {small: 199 * 16, large: 2 * 599 * 16}
    assert totals("kvgate_retries_total", "backend") == {small: rounds}
    assert set(totals('kvgate_count_checks_total{result="equal"}', "kind")) == {"exact"}
    assert loaded.query('kvgate_count_checks_total{result!="equal"}') == []


def test_the_programs_own_check_passes_the_shipped_configuration() -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None
    done = subprocess.run([promtool, "check", "config", ROOT / "deploy" / "prometheus.yml"], capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
