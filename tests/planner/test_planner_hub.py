"""Models by hub id from a stand-in hub (HF_ENDPOINT) and from the cache folder; no hub costs seconds, not minutes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
FILES: dict[str, bytes] = {
    "/own/tiny/resolve/main/config.json": json.dumps(CONFIG).encode(),
    "/own/tiny/resolve/main/model.safetensors.index.json": json.dumps({"metadata": {"total_size": 3 << 30}}).encode(),
    "/own/modelopt/resolve/main/config.json": json.dumps(CONFIG).encode(),
    "/own/modelopt/resolve/main/hf_quant_config.json": json.dumps(MODELOPT).encode(),
    "/own/odd/resolve/main/config.json": b"<html>sign in</html>",
}


class Hub(BaseHTTPRequestHandler):
    tokens: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.tokens.append(self.headers["authorization"])
        body = FILES.get(self.path)
        status = 401 if self.path.startswith("/own/gated") else 404 if body is None else 200
        self.send_response(status)
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the test says what went wrong."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    Hub.tokens = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        yield str(tmp_path)
        server.shutdown()
        thread.join()


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    status = main(["plan", *words, "--gpu", "RTX 4090", "--json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if printed.out else None, printed.err


def test_config_and_weights_come_from_the_hub(
    hub: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    status, found, _ = plan(capsys, "own/tiny")
    assert status == 0
    assert found["model"] == "own/tiny"
    assert found["weights_gib"] == {"value": 3.0, "kind": "exact", "low": 3.0, "high": 3.0}
    assert found["kv_bytes_per_token"]["value"] == 4 * 2 * 2 * 64 * 2
    assert set(Hub.tokens) == {"Bearer secret"}


def test_a_quantisation_in_its_own_file_is_read_and_weights_without_an_index_are_estimated(
    hub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found, _ = plan(capsys, "own/modelopt")
    assert found["quantization"] == "fp8"
    assert found["weights_gib"]["kind"] == "estimated"
    assert set(Hub.tokens) == {None}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("own/none", "the hub has no such file"),
        ("own/gated", "wants a token (HF_TOKEN)"),
        ("own/odd", "is not readable JSON"),
        ("own/a b", "no owner/name"),
        ("a/b/c", "no owner/name"),
    ],
)
def test_what_the_hub_does_not_have_is_one_sentence(
    hub: str, capsys: pytest.CaptureFixture[str], model: str, sentence: str
) -> None:
    status, _, err = plan(capsys, model)
    assert status == 2
    assert sentence in err
    assert err.count("\n") == 1


def test_the_cache_is_enough_and_the_hub_is_not_asked(hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(hub) / "hub" / "models--own--cached"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    quantised = {**CONFIG, "quantization_config": {"quant_method": "awq", "bits": 4}}
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(quantised))
    (folder / "snapshots" / "abc" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1 << 30}})
    )
    status, found, _ = plan(capsys, "own/cached")
    assert (status, found["weights_gib"]["value"]) == (0, 1.0)
    assert Hub.tokens == []


def test_without_a_hub_the_answer_comes_at_once(
    hub: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began_s = time.monotonic()
    status, _, err = plan(capsys, "own/tiny")
    assert time.monotonic() - began_s < 5
    assert status == 2
    assert "does not answer" in err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in plan(capsys, "own/tiny")[2]
