"""``kvgate count --audit`` sends each request of a file for one token and tells where a count differs from usage."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gateway.auditing import Sample, for_one_token, samples
from gateway.cli import main


class Server(BaseHTTPRequestHandler):
    """A vLLM that reports ``usage`` for whatever it is asked, and remembers it; or a gateway that also counts."""

    usage: ClassVar[dict[str, int]] = {}
    told: ClassVar[dict[str, str]] = {}
    asked: ClassVar[list[tuple[str, Any]]] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m", "root": "/only/there"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body))
        if "bad" in json.dumps(body):
            self._answer(400, {"error": {"message": "no such role"}})
        elif self.path == "/tokenize":
            self._answer(200, {"count": 41})
        elif self.path.startswith("/v1/") and not self.path.endswith(("/render", "/count_tokens")):
            self._answer(200, {"usage": self.usage}, self.told)
        else:
            self._answer(404, {})

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    Server.asked.clear()
    Server.told = {}
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def file_of(folder: Path, *lines: Any) -> str:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_equal_counts_are_summed_up_in_a_line(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Server.usage = {"prompt_tokens": 41}
    assert main(["count", "--audit", file_of(tmp_path, chat(), chat("ho")), "--backend", server]) == 0
    assert capsys.readouterr().out == "2 requests: 2 exact, 0 wrong\n"


def test_a_difference_is_shown_and_fails(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Server.usage = {"prompt_tokens": 44}
    assert main(["count", "--audit", file_of(tmp_path, chat(), chat("bad")), "--backend", server]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["line", "request", "source", "ours", "usage", "differ"]
    assert lines[1].split() == ["1", "chat", "tokenize", "41", "44", "-3"]
    assert lines[2].split()[:4] == ["2", "chat", "refused:", "400"]
    assert lines[3] == "2 requests: 0 exact, 1 wrong, 1 refused"
    assert max(map(len, lines)) < 100


def test_a_gateways_own_count_is_held_against_usage(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Server.usage = {"input_tokens": 7, "output_tokens": 1}
    Server.told = {
        "x-kvgate-prompt-tokens": "9",
        "x-kvgate-count-kind": "estimate",
        "x-kvgate-count-source": "estimate",
    }
    requests = file_of(tmp_path, {"path": "/v1/messages", "body": chat(max_tokens=500)})
    assert main(["count", "--audit", requests, "--backend", server, "--gateway", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["summary"] == {
        "requests": 1,
        "exact": 0,
        "wrong": 0,
        "estimated": 1,
        "not counted": 0,
        "refused": 0,
    }
    (one,) = document["requests"]
    assert (one["path"], one["ours"], one["usage"], one["difference"]) == ("/v1/messages", 9, 7, 2)
    assert [path for path, _ in Server.asked] == ["/v1/messages"], "a gateway counts by itself"


def test_nothing_compared_is_no_success(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "--audit", file_of(tmp_path, chat("bad")), "--backend", server]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 requests: 0 exact, 0 wrong, 1 refused"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("{", "line 1 is not JSON"),
        ('{"a": 1}', "line 1: no `path`"),
        ("[]", "line 1 is no JSON object"),
        ("\n" + '{"messages": []}' + "\n3", "line 3 is no JSON object"),
    ],
)
def test_a_broken_file_is_named_by_its_line(
    lines: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(lines)
    assert main(["count", "--audit", str(path), "--backend", "http://127.0.0.1:9"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--audit"],
        ["--audit", "--backend", "u", "--path", "/v1/x"],
        ["--gateway", "--tokenizer", "x"],
        [],
        ["--tokenizer", "a", "--backend", "b"],
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], tmp_path: Path) -> None:
    assert main(["count", file_of(tmp_path, chat()), *flags]) == 2


def test_each_dialect_is_asked_for_one_token_of_the_same_prompt() -> None:
    body = {**chat(), "stream": True, "stream_options": {}, "max_completion_tokens": 9, "n": 4, "min_tokens": 5}
    assert for_one_token(Sample(1, "/v1/chat/completions", body), "m") == {**chat(), "model": "m", "max_tokens": 1}
    anthropic = {**chat(), "max_tokens": 9000, "thinking": {"type": "enabled", "budget_tokens": 4000}}
    asked = for_one_token(Sample(1, "/v1/messages", anthropic), "m")
    assert (asked["max_tokens"], asked["thinking"]) == (1, {"type": "adaptive"})
    response = for_one_token(Sample(1, "/v1/responses", {"input": "x", "background": True}), "m")
    assert response == {"input": "x", "model": "m", "max_output_tokens": 1, "store": False}
    assert for_one_token(Sample(1, "/v1/embeddings", {"input": "x"}), "m") == {"input": "x", "model": "m"}


def test_the_path_of_a_line_is_said_or_guessed() -> None:
    lines = [
        chat(),
        {"prompt": "x"},
        {"input": "x"},
        {**chat(), "system": "s"},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {**chat(), "tools": [{"input_schema": {}}]},
        {"path": "embeddings", "body": {"input": "x"}},
    ]
    assert [sample.path for sample in samples(map(json.dumps, lines))] == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages",
        "/v1/messages",
        "/v1/embeddings",
    ]
