"""What stands between the clients and the servers: nothing, vLLM's Rust router with a policy, or this gateway."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from bench.placing_real.servers import BLOCK_TOKENS, MODEL, Server, model_folder
from bench.targets import ROOT, ROUTER_REQUIREMENT, Missing, free_port, process

READY_TIMEOUT_S = 90.0
ROUTER = ROOT / ".venv-bench" / "bin" / "vllm-router"
ROUTER_POLICIES = ("round_robin", "cache_aware", "kv_aware")

# The gateway's own idea of when it is ready comes before its tokenizer is loaded; a probe is counted until it is.
COUNTED_BY = "x-kvgate-count-source"


@dataclass(frozen=True, slots=True)
class Front:
    """Where the requests of a conversation (by its number) go."""

    url_of: Callable[[int], str]


@contextmanager
def fixed(servers: tuple[Server, Server], _logs: Path) -> Iterator[Front]:
    """Each client has one of the servers in its settings."""
    yield Front(lambda conversation: servers[conversation % 2].url)


@contextmanager
def largest(servers: tuple[Server, Server], _logs: Path) -> Iterator[Front]:
    """Each client has the server with the large window in its settings; the other one is not used."""
    yield Front(lambda _: servers[1].url)


@contextmanager
def router(servers: tuple[Server, Server], logs: Path, policy: str) -> Iterator[Front]:
    """``vllm-router`` with its own defaults; for ``kv_aware`` it listens to the servers' KV events."""
    if not ROUTER.exists():
        raise Missing(f"vLLM's router is not installed: make .venv-bench/.ready (pip install {ROUTER_REQUIREMENT})")
    port = free_port()
    command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--worker-urls", *(server.url for server in servers)]
    command += ["--prometheus-port", str(free_port()), "--log-level", "info"]
    if policy == "kv_aware":
        for server in servers:
            command += ["--kv-event-source", f"{server.url}={server.events}"]
            command += ["--kv-event-replay-source", f"{server.url}={server.replay}"]
        command += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", str(model_folder())]
    with _serving(command, port, logs / f"vllm-router-{policy}.log") as url:
        yield Front(lambda _: url)


@contextmanager
def gateway(servers: tuple[Server, Server], logs: Path, settings: Sequence[str]) -> Iterator[Front]:
    """This gateway with its own defaults, and ``settings`` as of ``--set``."""
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", "--port", str(port)]
    for server in servers:
        command += ["--backend", server.url]
    for setting in settings:
        command += ["--set", setting]
    with _serving(command, port, logs / "kvgate.log", counted=True) as url:
        yield Front(lambda _: url)


@contextmanager
def _serving(command: list[str], port: int, log: Path, *, counted: bool = False) -> Iterator[str]:
    """The address, once a small request is answered (and counted by the gateway itself, where it is one)."""
    url = f"http://127.0.0.1:{port}"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    os.environ.setdefault("PYTHONHASHSEED", "0")  # of the router: hashes of blocks must be the servers'
    with process(command, log) as child:
        end_s = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False)
                if answer.status_code == 200 and (not counted or answer.headers.get(COUNTED_BY) == "local"):
                    break
            except httpx2.TransportError:
                pass
            if child.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{command[0]} does not serve:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.3)
        yield url
