"""The command as people meet it: help, wrong usage, and what each failure says and returns."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.cli import COMMANDS, demo, main
from gateway.cli.listening import CannotListen, listen
from gateway.cli.parts import Part, PartFailed
from gateway.simulator import model

HEAVY = ("pydantic", "transformers", "uvicorn", "aiohttp", "starlette", "tokenizers", "numpy", "yaml", "jinja2")
READY_S = 60


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("KVGATE_")}


def kvgate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=folder,
        env=environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of another program, which answers 200 to whatever it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "m"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Signal handlers as they were, after a command that sets some has run in this process."""
    kept = {number: signal.getsignal(number) for number in demo.ENDINGS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def running(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that serves on a free port, until the block ends; the process and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments, "--port", "0"],
        cwd=folder,
        env=environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        found = re.search(r"http://[\d.:]+", process.stdout.readline())
        assert found is not None
        yield process, found[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"kvgate {command}" in text
    assert "--" in text


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in text] == []


@pytest.mark.parametrize("arguments", [[], ["nope"], ["serve", "--nope"], ["serve", "--port", "x"], ["--nope"]])
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: kvgate" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"], ["demo", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys, contextlib\n"
        "from gateway.cli import main\n"
        f"with contextlib.suppress(SystemExit): main({arguments!r})\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_config_prints_what_the_settings_come_to_and_no_key(tmp_path: Path) -> None:
    (tmp_path / "kvgate.yaml").write_text("port: 1234\nrelay: {retries: 5}\n", encoding="utf-8")
    done = kvgate(tmp_path, "config", "--json", "--api-key", "top-secret", "--set", "relay.retries=7")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["port"], tree["relay"]["retries"]) == (1234, 7)
    assert "top-secret" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "relay.retires=1"], "did you mean retries?"),
        (["--set", "relay"], "write KEY=VALUE"),
        (["--set", "port=[1"], "not valid YAML"),
        (["--set", "relay=1", "--set", "relay.retries=1"], "relay was set to a value before"),
        (
            ["--set", "placing.class_timeouts_s={urgent: 3}"],
            "class_timeouts_s: the key urgent should be 'high'",
        ),
        (["--set", "models={1: {}}"], "models: the key 1 should be a valid string"),
        (["--tokenizer", "x"], "write MODEL=FOLDER"),
        (["--backend", "ftp://x"], "not an http(s) URL"),
        (["--host", "0.0.0.0"], "api_keys"),
        (["--config", "missing.yaml"], "cannot read missing.yaml"),
    ],
)
def test_wrong_settings_are_told_in_a_line_and_end_with_2(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("config", "serve"):
        assert main([command, *arguments]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("kvgate: ")
        assert says in errors


def test_serve_without_a_backend_says_how_to_name_one(tmp_path: Path) -> None:
    done = kvgate(tmp_path, "serve")
    assert done.returncode == 2
    assert "--backend http://host:8000" in done.stderr


@pytest.mark.parametrize("command", ["serve", "simulate", "demo"])
def test_a_port_in_use_is_named_and_how_to_choose_another(
    command: str, tmp_path: Path, stranger: int, model_folder: Path
) -> None:
    flags = {
        "serve": ["--backend", "http://127.0.0.1:9"],
        "simulate": ["--tokenizer", str(model_folder)],
        "demo": ["--backend", "http://127.0.0.1:9"],
    }[command]
    done = kvgate(tmp_path, command, "--port", str(stranger), *flags)
    assert done.returncode == {"serve": 2, "simulate": 2, "demo": 1}[command]
    assert f"cannot listen on 127.0.0.1:{stranger}: another program has port {stranger}" in done.stderr
    assert "--port" in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 80
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("127.0.0.1", 65536, "ports are 0 to 65535"),
        ("192.0.2.1", 0, "this machine has no address 192.0.2.1; see --host"),
        ("host.invalid", 0, "there is no host host.invalid here; see --host"),
    ],
)
def test_an_address_that_cannot_be_had_is_told_with_its_reason(host: str, port: int, says: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {host}:{port}: {says}"):
        listen(host, port)


def test_who_listens_has_its_port_before_it_serves() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(CannotListen, match=f"another program has port {port}"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_serve_starts_without_its_backends_and_ends_in_good_order(tmp_path: Path, stop: signal.Signals) -> None:
    with running(tmp_path, "serve", "--backend", f"http://127.0.0.1:{free_port()}") as (process, url):
        with httpx2.Client(
            base_url=url, timeout=10, trust_env=False, transport=httpx2.HTTPTransport(retries=20)
        ) as http:
            assert http.get("/health").status_code == 200
            assert http.get("/ready").status_code == 503
        process.send_signal(stop)
        errors, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_demo_asks_one_question_and_ends(tmp_path: Path, model_folder: Path) -> None:
    """In front of a simulator of its own, so that no fixed port is needed."""
    assert model_folder.is_dir()
    with running(tmp_path, "simulate", "--model", "m", "--tokenizer", str(model_folder)) as (_, url):
        done = kvgate(tmp_path, "demo", "--once", "--json", "--backend", url, "--port", str(free_port()))
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["model"] == "m"
    assert outcome["headers"]["x-kvgate-prompt-tokens"] == str(outcome["usage"]["prompt_tokens"])
    assert outcome["headers"]["x-kvgate-backend"] == url.removeprefix("http://")


@pytest.mark.usefixtures("own_signals")
def test_demo_takes_no_answer_of_another_program_for_its_own(
    stranger: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that one took the port after it was looked at."""
    parts: list[Part] = []

    class Seen(Part):
        def __init__(self, name: str, flags: list[str]) -> None:
            super().__init__(name, flags)
            parts.append(self)

    monkeypatch.setattr(demo, "listen", lambda *_: socket.socket())
    monkeypatch.setattr(demo, "Part", Seen)
    assert main(["demo", "--once", "--backend", "http://127.0.0.1:9", "--port", str(stranger)]) == 1
    said = capsys.readouterr()
    assert f"another program has port {stranger}" in said.err
    assert "the gateway ended with status 2" in said.err
    assert "answer" not in said.out
    for part in parts:
        with pytest.raises(PartFailed):
            part.check()


@pytest.mark.usefixtures("own_signals")
def test_demo_starts_servers_of_its_own_on_free_ports_and_leaves_none_behind(
    capsys: pytest.CaptureFixture[str], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "default_folder", lambda: model_folder)
    assert main(["demo", "--once", "--port", "0"]) == 0
    output = capsys.readouterr().out
    urls = re.findall(r"http://127\.0\.0\.1:\d+", output)
    assert len(set(urls)) == 3
    assert max(map(len, output.splitlines())) <= 80
    for url in urls:
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(url, trust_env=False)


@pytest.mark.usefixtures("own_signals")
def test_demo_says_what_is_wrong_with_backends_that_do_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "READY_TIMEOUT_S", 2.0)
    port = free_port()
    assert main(["demo", "--once", "--backend", f"http://127.0.0.1:{port}", "--port", "0"]) == 1
    output, errors = capsys.readouterr()
    assert "no backend answers yet; waiting 2 s for one" in output
    assert "waited 2 s, and no backend answers" in errors
    assert f"  127.0.0.1:{port}: cannot connect" in errors


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_demo_ends_its_parts_however_it_is_ended(tmp_path: Path, stop: signal.Signals) -> None:
    with running(tmp_path, "demo", "--backend", "http://127.0.0.1:9") as (process, url):
        process.send_signal(stop)
        process.send_signal(stop)  # make passes Ctrl-C on a second time
        assert process.wait(timeout=READY_S) == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url, trust_env=False)
