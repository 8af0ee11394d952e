"""``kvgate explain`` says what would happen to a request, in any dialect, with a backend or without."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.cli.explain import guessed_path

WINDOW = ["--window", "2048"]


def conversation(turns: int) -> list[dict[str, Any]]:
    text = "This is one of many sentences that say nothing new. " * 5
    messages = [{"role": "user", "content": f"Start. {text}"}]
    for number in range(turns):
        messages += [{"role": "assistant", "content": f"{number} {text}"}, {"role": "user", "content": f"Next. {text}"}]
    return messages


def file_of(folder: Path, document: Any) -> str:
    path = folder / "request.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_request_that_fits(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = file_of(tmp_path, {"messages": conversation(1), "max_tokens": 5000})
    assert main(["explain", name, "--tokenizer", str(model_folder), *WINDOW]) == 0
    out = capsys.readouterr().out
    assert "It fits; first choice: (offline)." in out
    assert "fits, output clamped to" in out
    assert all(len(line) <= 60 for line in out.splitlines()), out


def test_an_overflow_is_trimmed_on_paper(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = file_of(tmp_path, {"messages": conversation(40)})
    assert main(["explain", name, "--tokenizer", str(model_folder), *WINDOW, "--body", "out.json"]) == 0
    out = capsys.readouterr().out
    assert "Policy auto (from: default):" in out
    assert "messages 2-" in out and "earlier messages removed" in out
    assert "21 more; --json has all" in out
    assert all(len(line) <= 60 for line in out.splitlines()), out
    sent = json.loads(Path("out.json").read_text())
    assert 3 < len(sent["messages"]) < 40
    assert main(["explain", "out.json", "--tokenizer", str(model_folder), *WINDOW]) == 0
    assert "It fits" in capsys.readouterr().out


def test_json_and_the_body_alone(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = file_of(tmp_path, {"messages": conversation(40), "system": "Be brief.", "max_tokens": 9})
    flags = [name, "--tokenizer", str(model_folder), *WINDOW]
    assert main(["explain", *flags, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == "/v1/messages"
    assert said["tokens_after"] < 2048 < said["prompt_tokens"]
    assert sum(one["tokens"] for one in said["messages"]) + said["rest_tokens"] == pytest.approx(
        said["prompt_tokens"], rel=0.05
    )
    assert len(said["messages"]) == 81
    assert main(["explain", *flags, "--body", "-"]) == 0
    sent = capsys.readouterr().out.encode()
    assert json.loads(sent)["system"] == "Be brief."
    assert len(sent) == said["body_bytes"] + 1


def test_settings_count(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("kvgate.yaml").write_text("overflow: {routes: {/v1/chat/completions: reject}}")
    name = file_of(tmp_path, {"messages": conversation(40)})
    assert main(["explain", name, "--tokenizer", str(model_folder), *WINDOW]) == 0
    out = capsys.readouterr().out
    assert "Policy reject (from: route):" in out and "refused with a context error." in out
    assert out.endswith("not sent\n")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": []}, "/v1/chat/completions"),
        ({"messages": [], "prompt": "x"}, "/v1/chat/completions"),
        ({"messages": [], "system": "x"}, "/v1/messages"),
        ({"messages": [], "tools": [{"name": "f", "input_schema": {}}]}, "/v1/messages"),
        ({"messages": [{"content": [{"type": "tool_result"}]}]}, "/v1/messages"),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, "/v1/chat/completions"),
        ({"input": "x"}, "/v1/responses"),
        ({"prompt": "x"}, "/v1/completions"),
    ],
)
def test_the_path_is_guessed_from_the_shape(body: Any, path: str) -> None:
    assert guessed_path(json.dumps(body).encode()) == path


@pytest.mark.parametrize(
    ("document", "flags", "said"),
    [
        ("no json", ["--tokenizer", "x", *WINDOW], "the file is not JSON"),
        ("[]", ["--tokenizer", "x", *WINDOW], "must hold a JSON object"),
        ({"x": 1}, ["--tokenizer", "x", *WINDOW], "has none of `messages`, `input` and `prompt`"),
        ({"messages": "x"}, ["--tokenizer", "x", *WINDOW], "`messages` is wrong"),
        ({"messages": []}, [], "give --backend URL, or --tokenizer FOLDER"),
        ({"messages": []}, ["--tokenizer", "x"], "--tokenizer needs --window"),
        ({"messages": []}, ["--backend", "x", *WINDOW], "--window is for --tokenizer"),
        ({"messages": []}, ["--tokenizer", "/none", *WINDOW], "there is no folder /none"),
        ({"messages": []}, ["--tokenizer", "x", *WINDOW, "--config", "none.yaml"], "cannot read none.yaml"),
    ],
)
def test_wrong_usage_is_said(
    document: Any, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", file_of(tmp_path, document), *flags]) == 2
    assert said in capsys.readouterr().err


class Models(BaseHTTPRequestHandler):
    """A server that names its model and counts nothing."""

    root = ""

    def do_GET(self) -> None:
        card = {"id": "served", "root": self.root, "max_model_len": 2048}
        data = json.dumps({"data": [card]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_backend_says_model_and_window(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "root", str(model_folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            name = file_of(tmp_path, {"input": conversation(40), "instructions": "Be brief."})
            assert main(["explain", name, "--backend", url]) == 0
            out = capsys.readouterr().out
            assert out.startswith("/v1/responses, model served\n")
            assert "     2048  overflow: 1024 at most" in out
            assert main(["explain", name, "--backend", url, "--model", "another"]) == 2
            assert "no backend serves another; served are: served" in capsys.readouterr().err
        finally:
            server.shutdown()
            thread.join()


def test_a_backend_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = file_of(tmp_path, {"messages": conversation(1)})
    assert main(["explain", name, "--backend", "http://127.0.0.1:9"]) == 1
    assert "gave no list of models" in capsys.readouterr().err
    assert main(["explain", "nowhere.json", "--backend", "http://127.0.0.1:9"]) == 2
