"""``kvgate status``: what it prints, in how many columns, and how it fails."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.cli import main
from gateway.cli.status import table

KV = {
    "engines": 1,
    "block_size_tokens": 16,
    "capacity_tokens": 1_234_567,
    "used_tokens": 617_283,
    "usage_ratio": 0.5,
    "stale": False,
}
BACKEND = {
    "name": "gpu-large-0.cluster.example.org:8000",
    "health": "up",
    "breaker": "closed",
    "draining": False,
    "error": None,
    "version": "0.32.0",
    "models": [{"id": "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8-and-a-longer-name", "window_tokens": 131072}],
    "in_flight": 12,
    "running": 14,
    "waiting": 0,
    "kv": KV,
    "age_s": 0.42,
}
DOCUMENT = {"backends": [BACKEND], "models": [], "waiting_requests": 3, "waiting_bytes": 81234, "oldest_wait_s": 1.6}


@pytest.fixture
def gateway() -> Iterator[tuple[str, dict[str, Any]]]:
    """A server that answers /kvgate/status with ``state["body"]`` and ``state["status"]``."""
    state: dict[str, Any] = {"body": json.dumps(DOCUMENT).encode(), "status": 200, "keys": []}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state["keys"].append(self.headers.get("authorization"))
            self.send_response(state["status"] if self.path == "/kvgate/status" else 404)
            self.send_header("content-length", str(len(state["body"])))
            self.end_headers()
            self.wfile.write(state["body"])

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", state
    server.shutdown()
    thread.join()
    server.server_close()


def shown(text: str) -> list[str]:
    """The lines, with single blanks."""
    assert max(map(len, text.splitlines())) <= 80
    return [" ".join(line.split()) for line in text.splitlines()]


def test_what_is_known_of_prefix_caches_is_shown_of_backends_that_tell() -> None:
    known = {"backend": BACKEND["name"], "rank": 0, "knowledge": "exact", "blocks": 12345, "age_s": 1.2}
    other = {"backend": BACKEND["name"], "rank": 1, "knowledge": "exact", "blocks": 7, "age_s": None}
    events = [known | {"connected": True}, {"backend": "another", "rank": 0}]
    assert "prefixes exact, 12,345 blocks, heard 1.2 s ago" in shown(table(DOCUMENT | {"kv_events": events}))
    events.append(other | {"connected": False})
    lines = shown(table(DOCUMENT | {"kv_events": events}))
    assert [line for line in lines if line.startswith("prefixes")] == [
        "prefixes of engine 0 exact, 12,345 blocks, heard 1.2 s ago",
        "prefixes of engine 1 not connected, nothing heard yet",
    ]


def test_of_a_dead_backend_nothing_is_told_but_what_is_wrong_and_when_it_was_seen() -> None:
    """What its cache held then, it holds no more."""
    reason = "cannot connect: connection refused"
    trouble = {"kind": "metrics_failing", "detail": reason, "age_s": 0.3}
    dead = BACKEND | {"health": "down", "condition": "down", "error": reason, "age_s": 3.7, "troubles": [trouble]}
    events = [{"backend": BACKEND["name"], "rank": 0, "knowledge": "exact", "blocks": 9, "connected": False}]
    lines = shown(table({"backends": [dead], "kv_events": events}))
    assert lines[:-2] == [
        "gpu-large-0.cluster.example.org:8000 down vLLM 0.32.0",
        reason,
        "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8-and-a-longer-name window 131,072",
        "in flight 12 last seen 3.7 s ago",
    ]


def test_a_cause_is_told_once() -> None:
    trouble = {"kind": "metrics_failing", "detail": "/metrics answered 500", "age_s": 90.0}
    lines = shown(table({"backends": [BACKEND | {"error": "/metrics answered 500", "troubles": [trouble]}]}))
    assert [line for line in lines if "500" in line] == ["! metrics_failing: /metrics answered 500 (for 2 min)"]


def test_who_was_never_seen_is_starting_or_not_there() -> None:
    backend = {"name": "a", "health": "down", "condition": "starting", "error": "cannot connect: host not found"}
    lines = shown(table({"backends": [backend]}))
    assert lines[:3] == ["a starting, or not there", "cannot connect: host not found", "in flight ? never seen"]
    assert shown(table({"backends": [backend | {"error": "it serves no models yet"}]}))[0] == "a starting"


def test_a_drained_backend_gets_no_new_requests() -> None:
    drained = BACKEND | {"draining": True, "condition": "draining"}
    assert shown(table({"backends": [drained]}))[0].endswith("up, draining: no new requests vLLM 0.32.0")
    assert "up, drained: no new requests" in shown(table({"backends": [drained | {"in_flight": 0}]}))[0]


def test_engines_are_shown_where_there_are_several() -> None:
    engines = [
        {"engine": "0", "in_flight": 3, "kv": {**KV, "used_tokens": 1000, "usage_ratio": 0.01}},
        {"engine": "1", "in_flight": 0, "kv": None},
    ]
    lines = table({"backends": [{**BACKEND, "engines": engines}]}).splitlines()
    shown = [line.split() for line in lines if line.startswith("    engine")]
    assert [" ".join(line) for line in shown] == [
        "engine 0, 3 in flight 1,000 / 1,234,567 tokens 1%",
        "engine 1, 0 in flight unknown",
    ]
    assert "engine" not in table({"backends": [{**BACKEND, "engines": engines[:1]}]})


def test_it_prints_everything_in_eighty_columns(
    gateway: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = gateway
    assert main(["status", "--url", url + "/v1/"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    for part in ("gpu-large-0", "up  vLLM 0.32.0", "131,072", "617,283 / 1,234,567 tokens  50%", "in flight 12"):
        assert part in output
    assert "queue  3 waiting, longest 2 s, 81,234 bytes" in output
    assert "seen 0.4 s ago" in output


def test_what_is_unknown_is_not_shown_as_zero() -> None:
    backend = {
        "name": "a",
        "health": "down",
        "breaker": "half_open",
        "draining": True,
        "error": "cannot connect: x" * 9,
    }
    text = table({"backends": [backend]})
    assert "down, draining: no new requests, breaker half open" in text
    assert "in flight ?" in text
    assert "never seen" in text
    assert " ".join(text.split()).count("cannot connect: x") == 9
    assert max(map(len, text.splitlines())) <= 80


def test_how_it_stands_and_what_is_wrong_is_shown() -> None:
    trouble = {"kind": "same_server", "detail": "as gpu-large-0.cluster.example.org:8000", "age_s": 240.0}
    text = table({"backends": [BACKEND | {"condition": "standby", "troubles": [trouble]}]})
    assert "standby  vLLM 0.32.0" in text
    assert "! same_server: as gpu-large-0" in text
    assert "(for 4 min)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "up  vLLM" in table({"backends": [BACKEND | {"condition": "warming", "troubles": []}]})


def test_old_numbers_say_so() -> None:
    text = table({"backends": [BACKEND | {"kv": KV | {"stale": True}, "age_s": 300}]})
    assert "50% (old)" in text
    assert "5 min ago" in text
    unknown = table({"backends": [BACKEND | {"kv": None, "running": None, "waiting": None, "age_s": None}]})
    assert "running ?   waiting ?" in unknown
    assert "metrics never read" in unknown


def test_json_is_the_document(gateway: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", gateway[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT


@pytest.mark.parametrize(
    "backends",
    [
        [],
        [BACKEND | {"health": "down"}],
        [BACKEND | {"draining": True}],
        [BACKEND | {"condition": "standby"}, BACKEND | {"draining": True}],
    ],
)
def test_that_no_backend_takes_new_requests_shows_in_the_exit_status(
    gateway: tuple[str, dict[str, Any]], backends: list[dict[str, Any]]
) -> None:
    url, state = gateway
    state["body"] = json.dumps({"backends": backends}).encode()
    assert main(["status", "--url", url]) == 3
    state["body"] = json.dumps({"backends": [*backends, BACKEND]}).encode()
    assert main(["status", "--url", url]) == 0


def test_the_key_is_sent_and_a_missing_one_explained(
    gateway: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, state = gateway
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["status", "--url", url, "--api-key", "k"]) == 0
    state["status"] = 401
    assert main(["status", "--url", url]) == 1
    assert state["keys"] == ["Bearer k", None]
    assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"backends": 3}', b"\xff"])
def test_something_else_is_not_taken_for_a_gateway(
    gateway: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str], body: bytes
) -> None:
    url, state = gateway
    state["body"] = body
    assert main(["status", "--url", url]) == 1
    errors = capsys.readouterr().err
    assert "not a kvgate" in errors
    assert "--url http://HOST:PORT" in errors


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:99999", "ftp://x"])
def test_a_gateway_that_is_not_there_is_said_to_be_out_of_reach(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url]) == 1
    errors = capsys.readouterr().err
    assert "cannot reach a gateway at" in errors
    assert "--url http://HOST:PORT" in errors
    assert ".." not in errors


def test_a_reader_that_has_had_enough_is_no_crash(gateway: tuple[str, dict[str, Any]]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "gateway", "status", "--url", gateway[0], "--json"]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=30, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_it_says_why_somebody_waits_though_there_is_room() -> None:
    shown = table({"backends": [BACKEND], "waiting_requests": 2, "oldest_wait_s": 3, "kept_out_requests": 1})
    assert "room is kept for conversations about to return (placing.keep_ratio)" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "kept" not in table({"backends": [BACKEND], "waiting_requests": 2, "kept_out_requests": 0})
