"""``kvgate count`` prints what a request file will cost, or says what is wrong with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main

CHAT = {"messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hello there"}]}


class Server(BaseHTTPRequestHandler):
    """A vLLM whose model lies in a folder that only the server has."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "base", "root": "/only/there"}, {"id": "lora", "parent": "base", "root": "x"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._answer({"count": 42 if body["model"] == "lora" else 41})

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def request_file(folder: Path, document: Any) -> str:
    path = folder / "request.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_a_chat_with_a_local_tokenizer(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", request_file(tmp_path, CHAT), "--tokenizer", str(model_folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "18 prompt tokens (exact, source local)",
        "    1  system            8",
        "    2  user              7",
        "       (rest)            3",
    ]


def test_json_for_programs(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = request_file(tmp_path, {"prompt": ["a b c", "d"]})
    assert main(["count", prompts, "--tokenizer", str(model_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tokens": 3, "total_tokens": 4, "kind": "exact", "source": "local"}


@pytest.mark.parametrize(("model", "tokens"), [("base", 41), ("lora", 42)])
def test_a_backend_counts_what_cannot_be_counted_here(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, tokens: int
) -> None:
    assert main(["count", request_file(tmp_path, CHAT), "--backend", f"{server}/v1", "--model", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "tokens": tokens,
        "total_tokens": tokens,
        "kind": "exact",
        "source": "tokenize",
        "reason": "there is no folder /only/there on this machine",
    }


@pytest.mark.parametrize(
    ("document", "arguments", "words"),
    [
        ("{", ["--tokenizer", "."], "is not JSON"),
        ([], ["--tokenizer", "."], "must hold a JSON object with `messages`"),
        ({"messages": 3}, ["--tokenizer", "."], "`messages`"),
        (CHAT, ["--tokenizer", "/no/such/folder"], "there is no folder /no/such/folder"),
        (CHAT, ["--backend", "SERVER", "--model", "other"], "does not serve other; it serves: base, lora"),
        (CHAT, ["--backend", "ftp://x"], "not an http(s) URL"),
        (CHAT, ["--tokenizer", ".", "--chat-template", "none.jinja"], "cannot read none.jinja"),
    ],
)
def test_wrong_input_is_named_and_ends_with_2(
    document: Any, arguments: list[str], words: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [server if word == "SERVER" else word for word in arguments]
    assert main(["count", request_file(tmp_path, document), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "/no/such/file", "--tokenizer", "."]) == 2
    assert "cannot read /no/such/file" in capsys.readouterr().err


def test_a_backend_that_is_not_there_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", request_file(tmp_path, CHAT), "--backend", "http://127.0.0.1:1"]) == 1
    assert "gave no list of models" in capsys.readouterr().err


def test_one_of_both_sources_must_be_named(tmp_path: Path) -> None:
    assert main(["count", request_file(tmp_path, CHAT)]) == 2
