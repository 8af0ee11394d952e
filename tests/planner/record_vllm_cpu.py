"""What a real vLLM on CPU exports for a tiny model: ``python tests/planner/record_vllm_cpu.py [NAME ...]``.

Starts one server after the other for the configs in ``vllm_cpu.jsonl`` (all, or those named; about a minute each, needs
``make .venv-vllm/.ready``) and writes what each exports back into that file.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))

from vllm_server import ENVIRONMENT, VllmServer

RECORDS = Path(__file__).with_name("vllm_cpu.jsonl")
KV_BYTES, WINDOW_TOKENS, BATCHED_TOKENS = 64 << 20, 4096, 1024
NUMBERS = {"num_gpu_blocks": int, "block_size": int, "kv_cache_size_tokens": int, "kv_cache_max_concurrency": float}


def server_of(record: dict[str, Any], folder: Path, port: int) -> VllmServer:
    """A server of the record's config with random weights and no tokenizer."""
    (folder / "config.json").write_text(json.dumps(record["config"]))
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--max-num-seqs", "8"]
    flags += ["--max-model-len", str(WINDOW_TOKENS), "--max-num-batched-tokens", str(BATCHED_TOKENS)]
    flags += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    for name, value in record["flags"].items():
        flags += [f"--{name}", str(value)]
    return VllmServer(name=f"plan-{record['name']}", model=folder, port=port, served_model_name="m", flags=flags)


def exported(server: VllmServer) -> dict[str, float]:
    """The labels of ``vllm:cache_config_info`` that a plan predicts."""
    page = httpx2.get(f"{server.url}/metrics", timeout=10, trust_env=False).text
    line = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info{"))
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    return {name: convert(labels[name]) for name, convert in NUMBERS.items()}


def record(name: str, records: Sequence[dict[str, Any]], port: int) -> tuple[dict[str, float], str]:
    """Start the server of that record; what it exports, and its start-up log."""
    wanted = next(one for one in records if one["name"] == name)
    with tempfile.TemporaryDirectory() as folder:
        server = server_of(wanted, Path(folder), port)
        with patch.dict(ENVIRONMENT):
            ENVIRONMENT.pop("VLLM_CPU_KVCACHE_SPACE")  # whole GiB, and they would win over the flag
            server.start()
        try:
            server.wait_ready()
            return exported(server), server.log.read_text(errors="replace")
        finally:
            server.stop()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(names: Sequence[str]) -> None:
    """Record the named configs, or all, and write the file."""
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    for one in records:
        if not names or one["name"] in names:
            one["seen"], _ = record(one["name"], records, free_port())
            sys.stderr.write(f"{one['name']}: {one['seen']}\n")
    RECORDS.write_text("".join(json.dumps(one) + "\n" for one in records))


if __name__ == "__main__":
    main(sys.argv[1:])
