"""Configs, logs, flags and servers that are not what they should be: a sentence each, no traceback, in bounded time."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.planner import log_text
from gateway.planner.bounded import Asker, Unanswered
from gateway.planner.errors import PlannerError
from gateway.planner.geometry import read_geometry
from gateway.planner.log_text import log_of_file, log_of_stream

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
REFUSED = (
    "(EngineCore pid=1) ERROR ValueError: To serve at least one request with the model's max seq len (40960), "
    "(5.62 GiB KV cache is needed, which is larger than the available KV cache memory (2.4 GiB). Based on the "
    "available memory, the estimated maximum model length is 17472.\n"
)


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = main(list(words))
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 32.5}, "num_hidden_layers is 32.5"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"hidden_size": float("nan")}, "hidden_size is nan"),
        ({"hidden_size": 10**30}, "hidden_size is about 10^30"),
        ({"intermediate_size": float("inf")}, "intermediate_size is inf"),
        ({"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        ({"sliding_window": -5}, "sliding_window is -5"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'"),
        ({"quantization_config": {"config_groups": {"one": 5}}}, "quantization_config has parts"),
        ({"quantization_config": {"quantization": "x"}}, "quantization_config has parts"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "factor"),
        ({"layer_types": [None] * 32}, "layer_types"),
        ({"block_configs": [1, None]}, "block_configs"),
        ({"compress_ratios": ["a", None]}, "compress_ratios"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "no num_heads"),
    ],
)
def test_a_field_no_model_has_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlannerError) as caught:
        read_geometry({**LLAMA, **change}, "mine")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_published_configs_write_for_none_is_taken() -> None:
    plain = read_geometry(LLAMA)
    for change in ({"sliding_window": None}, {"sliding_window": -1}, {"head_dim": None}, {"quantization_config": None}):
        assert read_geometry({**LLAMA, **change}).layers == plain.layers
    assert read_geometry({**LLAMA, "num_hidden_layers": 32}).layers == plain.layers


def test_nested_without_end_and_wild_folders_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text('{"text_config":' * 3000 + "{}" + "}" * 3000)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b'{"a": 1}')
    for model in (str(deep), str(tmp_path), "a" * 5000, "a\0b"):
        status, out, err = say(capsys, "plan", model, "--vram", "24", "--offline")
        assert (status, out) == (2, "")
        assert err.startswith("kvgate plan: ")
        assert err.count("\n") == 1
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["x"]}')
    assert "no weight index" in say(capsys, "plan", str(tmp_path), "--vram", "24", "--offline")[2]


@pytest.mark.parametrize(
    "words",
    [
        ("--context", "infk"),
        ("--context", "1e400k"),
        ("--context", "99999999999999999999"),
        ("--concurrency", "99999999999999999999"),
        ("--max-num-seqs", "99999999999999999999"),
        ("--lora", "²"),
        ("--lora", "4:0"),
        ("--speculative", "ngram:99999999999"),
        ("--matrix", "--kv-dtypes", "fp8,bogus"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    status, out, err = say(capsys, "plan", "Qwen/Qwen3-8B", "--gpu", "RTX 4090", "--offline", *words)
    assert (status, out) == (2, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_log_is_read_in_the_encoding_a_shell_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], encoding: str
) -> None:
    log = tmp_path / "vllm.log"
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    log.write_bytes(mark + REFUSED.replace("\n", "\r\n").encode(encoding))
    status, out, _ = say(capsys, "doctor", str(log))
    assert status == 1
    assert "--max-model-len 17472" in out


def test_a_long_log_is_read_at_both_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_text, "KEPT_BYTES_EACH_END", 64 << 10)
    monkeypatch.setattr(log_text, "_CHUNK", 16 << 10)
    log = tmp_path / "vllm.log"
    start = b"INFO Initializing a V1 LLM engine (v0.31.0) with config: model='m', max_seq_len=40960\n"
    log.write_bytes(start + b"INFO Engine 000: Running: 1 reqs\n" * 300_000 + REFUSED.encode())
    text, left_out = log_of_file(log)
    assert len(text) < 200 << 10
    assert abs(left_out + len(text) - log.stat().st_size) <= 2  # the two ends are joined by a line break
    status, out, err = say(capsys, "doctor", str(log))
    assert (status, "--max-model-len 17472" in out, "of its middle were not read" in err) == (1, True, True)


def test_a_line_without_end_takes_no_time() -> None:
    began_s = time.monotonic()
    text, _ = log_of_stream(io.BytesIO(b"vllm max seq len (" * 200_000))
    assert len(text) == 20_000
    assert time.monotonic() - began_s < 5


def test_what_is_no_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, loop = tmp_path / "log.gz", tmp_path / "loop"
    packed.write_bytes(b"\x1f\x8b" + b"\0" * 50)
    loop.symlink_to(loop)
    for name, said in ((str(packed), "compressed"), ("/dev/zero", "a device"), (str(loop), "cannot read"), ("\0", "")):
        status, out, err = say(capsys, "doctor", name)
        assert (status, out) == (2, "")
        assert said in err
    proxy = tmp_path / "access.log"
    proxy.write_text('10.0.0.1 - - "GET /v1/models HTTP/1.1" 200 5 "-" "vllm-client"\n' * 10)
    assert "None of these lines comes from vLLM" in say(capsys, "doctor", str(proxy))[1]


class Odd(BaseHTTPRequestHandler):
    """Answers by the first part of the path."""

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        kind, _, asked = self.path[1:].partition("/")
        self.send_response(500 if kind == "failing" else 200)
        self.end_headers()
        try:
            if kind == "dripping":
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.05)
            if kind == "endless":
                while True:
                    self.wfile.write(b"x" * 65536)
            self.wfile.write(self._body(kind, asked))
        except OSError:
            pass

    do_POST = do_GET

    def _body(self, kind: str, asked: str) -> bytes:
        odd = {"html": b"<html>It works!</html>", "list": b"[1]", "wild": b'{"data": [null, {"id": 5}]}'}
        if kind == "halfway" and asked == "v1/models":
            return b'{"data": [{"id": "m", "max_model_len": "x"}]}'
        return odd.get(kind, b"\x00\xff{{{")


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("kind", ["html", "list", "wild", "failing", "garbage", "halfway"])
def test_a_server_that_is_none_is_a_finding(odd: str, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    status, out, err = say(capsys, "doctor", "--backend", f"{odd}/{kind}", "--timeout", "5")
    assert (status, err) == (1, "")
    assert "x models" in out or "x request" in out
    status, out, err = say(capsys, "client-config", "cline", "--backend", f"{odd}/{kind}")
    assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(("kind", "said"), [("dripping", "has not finished /x within"), ("endless", "sends more than")])
def test_an_answer_without_end_is_cut(odd: str, kind: str, said: str) -> None:
    began_s = time.monotonic()
    with (
        Asker(f"{odd}/{kind}", timeout_s=0.5, most_bytes=1 << 20) as asker,
        pytest.raises(Unanswered, match=said),
    ):
        asker.get("/x")
    assert time.monotonic() - began_s < 4


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "http://[::1", "ftp://here"])
def test_what_is_no_url_is_said(capsys: pytest.CaptureFixture[str], url: str) -> None:
    status, out, _ = say(capsys, "doctor", "--backend", url)
    assert status == 1
    assert "is no URL a request can go to" in out
