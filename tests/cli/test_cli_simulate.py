"""What ``kvgate simulate`` says before it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gateway.cli import main, simulate


def test_kv_events_without_their_packages_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "find_spec", lambda name: None)
    assert main(["simulate", "--port", "0", "--kv-events-config", "{}"]) == 2
    assert "pip install 'kvgate[kv-events]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{bad}", "is not JSON"),
        ("[1]", "takes a JSON object"),
        ('{"endpoints": "tcp://*:5557"}', "takes a JSON object with some of buffer_steps"),
        ('{"buffer_steps": "many"}', 'buffer_steps must be a number, not "many"'),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events must be a boolean, not 1"),
        ('{"replay_endpoint": 5557}', "replay_endpoint must be a text, not 5557"),
        ('{"publisher": "kafka"}', "publisher must be null or zmq, not kafka"),
        ('{"enable_kv_cache_events": true, "endpoint": "nowhere"}', "cannot publish at nowhere: Invalid argument"),
    ],
)
def test_what_is_wrong_with_kv_events_is_told_with_the_flag(
    config: str, says: str, capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    flags = ["--tokenizer", str(model_folder), "--kv-events-config", config]
    assert main(["simulate", "--port", "0", *flags]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: --kv-events-config")
    assert says in errors


def test_a_port_for_kv_events_that_is_taken_is_named(capsys: pytest.CaptureFixture[str], model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = f'{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}"}}'
        flags = ["--tokenizer", str(model_folder), "--kv-events-config", config]
        assert main(["simulate", "--port", "0", *flags]) == 2
    said = f"error: --kv-events-config: cannot publish at tcp://127.0.0.1:{port}: Address already in use"
    assert said in capsys.readouterr().err
