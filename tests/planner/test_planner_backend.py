"""``kvgate doctor --backend`` against a stand-in server: each thing that can be wrong is seen and named."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gateway.cli import main
from gateway.planner.backend_check import BackendReport, cache_config_labels, check_backend

CACHE = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
    'gpu_memory_utilization="0.92",kv_cache_size_tokens="16384",num_gpu_blocks="1024"} 1.0\n'
)
NO_PARSER = {
    "error": {"message": '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'}
}


class StandIn:
    """What the server says; a test changes the part it is about."""

    def __init__(self) -> None:
        self.health = 200
        self.model: dict[str, Any] = {"id": "Qwen/Qwen3-8B", "object": "model", "max_model_len": 8192}
        self.metrics = CACHE + "vllm:num_requests_running 0\n"
        self.version: dict[str, Any] | None = {"version": "0.32.0"}
        self.chat: tuple[int, Any] = (200, {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 4}})
        self.tools: tuple[int, Any] | None = None
        self.key: str | None = None
        self.events: Any = None
        self.url = ""

    def answer(self, path: str, body: dict[str, Any] | None, authorization: str | None) -> tuple[int, Any]:
        if self.key and authorization != f"Bearer {self.key}" and path.startswith("/v1"):
            return 401, {"error": "Unauthorized"}
        if path == "/health":
            return self.health, ""
        if path == "/version":
            return (200, self.version) if self.version else (404, {})
        if path == "/v1/models":
            return 200, {"object": "list", "data": [self.model]}
        if path == "/metrics":
            return 200, self.metrics
        if path == "/kv_event_sources" and self.events is not None:
            return 200, self.events
        if path == "/v1/chat/completions" and body is not None:
            return self.tools if "tools" in body and self.tools is not None else self.chat
        if path == "/v1/completions":
            return 200, {"choices": []}
        return 404, {}


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, body: dict[str, Any] | None) -> None:
            status, answer = stand_in.answer(self.path, body, self.headers.get("Authorization"))
            raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *args: Any) -> None:
            return

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    stand_in.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    yield stand_in
    httpd.shutdown()
    httpd.server_close()
    thread.join(5)


def _states(report: BackendReport) -> dict[str, str]:
    return {check.name: check.state for check in report.checks}


def test_a_sound_server_passes_every_check(server: StandIn) -> None:
    report = check_backend(server.url + "/v1/")
    assert _states(report) == {
        "health": "ok",
        "version": "info",
        "window": "ok",
        "metrics": "ok",
        "capacity": "ok",
        "prefix caching": "ok",
        "KV dtype": "info",
        "request": "ok",
        "tool calls": "ok",
        "plan": "ok",
    }
    assert (report.window, report.kv_tokens, report.num_blocks) == (8192, 16384, 1024)


@pytest.mark.parametrize(
    ("events", "state", "words"),
    [
        ({}, "info", "guessed"),
        ({"0": {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"}}, "ok", "by 1 engine"),
        ({"0": {"endpoint": "tcp://*:1", "replay_endpoint": None}}, "info", "without a replay_endpoint"),
        ([], None, ""),
    ],
)
def test_whether_the_prefix_cache_will_be_known_is_told(
    server: StandIn, events: Any, state: str | None, words: str
) -> None:
    server.events = events
    found = [check for check in check_backend(server.url).checks if check.name == "KV events"]
    assert [check.state for check in found] == ([state] if state else [])
    assert all(words in check.text for check in found)


def test_a_wrong_model_name_shows_as_a_plan_that_disagrees(server: StandIn) -> None:
    report = check_backend(server.url, model="openai/gpt-oss-20b")
    (check,) = [check for check in report.checks if check.name == "plan"]
    assert check.state == "warning"
    assert "--model" in check.text


def test_planned_memory_is_compared_when_the_card_is_known(server: StandIn) -> None:
    report = check_backend(server.url, gpu="RTX 4090")
    (check,) = [check for check in report.checks if check.name == "KV memory"]
    assert "2.25 GiB on the server" in check.text


@pytest.mark.parametrize(
    ("change", "name", "state", "words"),
    [
        ({"health": 503}, "health", "error", "dead"),
        ({"metrics": ""}, "metrics", "error", "--disable-log-stats"),
        (
            {"metrics": CACHE.replace('caching="True"', 'caching="False"')},
            "prefix caching",
            "warning",
            "--enable-prefix",
        ),
        ({"metrics": CACHE.replace("16384", "8200")}, "capacity", "warning", "--max-model-len 4100"),
        (
            {
                "metrics": CACHE.replace('num_gpu_blocks="1024"', 'num_gpu_blocks="None"').replace(
                    'tokens="16384"', 'tokens="None"'
                )
            },
            "capacity",
            "warning",
            "unknown",
        ),
        ({"tools": (400, NO_PARSER)}, "tool calls", "error", "--tool-call-parser"),
        ({"chat": (400, {"error": {"message": "no chat template"}})}, "request", "warning", "chat does not"),
        ({"version": None}, "version", "info", "not vLLM"),
        ({"model": {"id": "m"}}, "window", "warning", "unknown"),
        ({"key": "secret"}, "models", "error", "--api-key"),
    ],
)
def test_each_fault_is_seen(server: StandIn, change: dict[str, Any], name: str, state: str, words: str) -> None:
    for field, value in change.items():
        setattr(server, field, value)
    report = check_backend(server.url)
    (check,) = [check for check in report.checks if check.name == name]
    assert check.state == state
    assert words in f"{check.text} {check.change}"


def test_data_parallel_totals_are_divided_by_the_engines(server: StandIn) -> None:
    server.metrics = CACHE.replace("1024", "2048") + CACHE.replace("1024", "2048").replace('engine="0"', 'engine="1"')
    assert check_backend(server.url, send_request=False).num_blocks == 1024


def test_labels_with_quotes_inside_are_parsed_by_name() -> None:
    (labels,) = cache_config_labels(
        'vllm:cache_config_info{a="x\\"y",block_size="16"} 1.0\n# HELP vllm:cache_config_info x\n'
    )
    assert labels["block_size"] == "16"


def test_nothing_listening_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "http://127.0.0.1:9", "--timeout", "2"]) == 1
    assert "does not answer" in capsys.readouterr().out


def test_the_command_and_client_config_use_a_live_server(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache_size_tokens"] == 16384
    assert main(["client-config", "codex", "--backend", server.url]) == 0
    assert "model_context_window = 8192" in capsys.readouterr().out
    assert main(["client-config", "codex", "--backend", server.url, "--model", "other"]) == 2
    assert "it serves: Qwen/Qwen3-8B" in capsys.readouterr().err
