"""The two vLLM servers: one model of random weights, two windows, caches for little more than one window each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from bench.targets import free_port
from gateway.simulator.model import default_folder, ensure_model
from tests.vllm.vllm_server import VllmServer

MODEL = "agent-model"
BLOCK_TOKENS = 32  # vLLM's CPU attention takes multiples of 32 only
TOPIC = "kv"
IDLE_TIMEOUT_S = 60.0

# Of a size at which a CPU core does some 5,000 prompt tokens a second and an answer's token in some 20 ms: the ratio
# of a model and a GPU that fit each other.
GEOMETRY = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A server's window and cache in tokens."""

    window_tokens: int
    cache_tokens: int


SHAPES = (Shape(4096, 6144), Shape(12288, 16384))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready. ``events`` and ``replay`` are addresses of its KV events."""

    url: str
    shape: Shape
    events: str
    replay: str


def model_folder() -> Path:
    """Tokenizer and template of the model that is served, made at the first use."""
    return ensure_model(default_folder())


def end_token() -> int:
    """The token that ends an answer."""
    config: dict[str, int] = json.loads((model_folder() / "config.json").read_text(encoding="utf-8"))
    return config["eos_token_id"]


@contextmanager
def two_servers() -> Iterator[tuple[Server, Server]]:
    """Both, started at the same time. Raises ``ServerFailed`` with the end of the log."""
    with ExitStack() as stack:
        processes, servers = [], []
        for number, shape in enumerate(SHAPES):
            events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            process = _process(f"placing-{number}", shape, events, replay)
            stack.callback(process.stop)
            process.start()
            processes.append(process)
            servers.append(Server(process.url, shape, events, replay))
        for process in processes:
            process.wait_ready()
        yield servers[0], servers[1]


def _process(name: str, shape: Shape, events: str, replay: str) -> VllmServer:
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": TOPIC}
    publish |= {"endpoint": events, "replay_endpoint": replay}
    flags = ["--load-format", "dummy", "--enforce-eager", "--dtype", "float32"]
    flags += ["--hf-overrides", json.dumps(GEOMETRY), "--max-model-len", str(shape.window_tokens)]
    flags += ["--num-gpu-blocks-override", str(shape.cache_tokens // BLOCK_TOKENS + 1)]
    flags += ["--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "16", "--max-num-batched-tokens", "1024"]
    flags += ["--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--kv-events-config", json.dumps(publish)]
    # The prefix cache can be emptied between runs, and hashes of blocks are those that the router computes.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0"}
    return VllmServer(name, model_folder(), free_port(), MODEL, flags, environment)


def empty_caches(servers: tuple[Server, Server]) -> None:
    """Forget all prefixes. Raises ``RuntimeError`` if a server stays at work."""
    for server in servers:
        end_s = time.monotonic() + IDLE_TIMEOUT_S
        while not httpx2.post(f"{server.url}/reset_prefix_cache", timeout=30, trust_env=False).json().get("success"):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{server.url} cannot empty its prefix cache: requests are running")
            time.sleep(0.2)
