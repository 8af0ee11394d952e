"""The command as people meet it: help, wrong usage, and what each failure says and returns."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from gateway.cli import COMMANDS, main

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


def test_serve_on_a_port_in_use_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = kvgate(tmp_path, "serve", "--backend", "http://127.0.0.1:9", "--port", str(port))
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


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


def test_demo_says_which_part_did_not_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = kvgate(tmp_path, "demo", "--once", "--backend", "http://127.0.0.1:9", "--port", port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
