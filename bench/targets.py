"""What is measured: processes of our own in front of the canned backend, each on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.accounting import process_tree
from bench.load import LoadError, Request, connections, request_head, settled

ROOT = Path(__file__).resolve().parents[1]
ROUTER_REQUIREMENT = "vllm-router==0.1.17"
START_TIMEOUT_S = 45.0
STOP_TIMEOUT_S = 5.0

# One worker process. Buffering is off as it has to be for tokens; the client's body stays in memory, since nginx would
# otherwise write the large ones to disk; connections to the backend are kept, as by every other proxy here.
_NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_max_body_size 64m;
  client_body_buffer_size 2m;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream backend {{ server 127.0.0.1:{backend}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://backend;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


class Missing(Exception):
    """A peer is not installed. The message says how to get it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers on ``port``; ``pids`` are its processes, none for the backend itself.

    ``count_source`` is what a gateway must say of each of its counts.
    """

    name: str
    port: int
    pids: tuple[int, ...]
    count_source: str | None = None


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(command: list[str], log: Path, folder: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own, stopped at the end; what it says goes to the file ``log``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVGATE_")}
    environment["PYTHONPATH"] = str(ROOT)
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, env=environment
        )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Bench:
    """Starts backends and targets; use as a context manager, which stops them all."""

    def __init__(self, model_folder: Path, step_ms: float) -> None:
        self._model_folder = model_folder
        self._step_ms = step_ms
        self._stack = ExitStack()
        self._folder = Path()
        self._backend: int | None = None

    def __enter__(self) -> Bench:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-bench-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def backend(self) -> int:
        """The port of the canned backend."""
        if self._backend is None:
            command = [sys.executable, "-m", "bench.canned_backend", "--root", str(self._model_folder)]
            command += ["--step-ms", str(self._step_ms)]
            log = self._folder / "backend.log"
            child = self._stack.enter_context(process(command, log))
            self._backend = _announced(child, log)
        return self._backend

    async def direct(self, probe: Request) -> Target:
        """No proxy at all: what client and backend take by themselves."""
        return await self._ready("direct", self.backend(), None, probe)

    async def nginx(self, probe: Request) -> Target:
        """Debian's nginx, passing everything through."""
        binary = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
        if binary is None:
            raise Missing("nginx is not installed: apt-get install nginx (or your system's package)")
        port, folder = free_port(), self._folder / "nginx"
        folder.mkdir()
        config = folder / "nginx.conf"
        config.write_text(_NGINX.format(folder=folder, port=port, backend=self.backend()), encoding="utf-8")
        command = [binary, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
        return await self._start("nginx", command, port, probe)

    async def router(self, probe: Request) -> Target:
        """vLLM's own Rust router."""
        binary = ROOT / ".venv-bench" / "bin" / "vllm-router"
        if not binary.exists():
            raise Missing(
                f"vLLM's router is not installed: python3 -m venv .venv-bench && "
                f".venv-bench/bin/pip install {ROUTER_REQUIREMENT}"
            )
        port = free_port()
        command = [str(binary), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        command += ["--worker-urls", f"http://127.0.0.1:{self.backend()}", "--prometheus-port", str(free_port())]
        command += ["--log-level", "error"]
        return await self._start("vllm-router", command, port, probe)

    async def gateway(self, probe: Request, *, tokenizer: bool) -> Target:
        """The gateway. Counting cannot be switched off: without a tokenizer it asks the backend, and then estimates.

        The canned backend has no ``/tokenize``, so each request pays for a question that is answered with 404.
        """
        port = free_port()
        command = [sys.executable, "-m", "gateway", "serve", "--port", str(port)]
        command += ["--backend", f"http://127.0.0.1:{self.backend()}", "--set", "log_level=warning"]
        if not tokenizer:
            command += ["--set", "counting.local=false"]
        name, source = ("gateway", "local") if tokenizer else ("gateway, no tokenizer", "estimate")
        return await self._start(name, command, port, probe, source)

    async def _start(
        self, name: str, command: list[str], port: int, probe: Request, count_source: str | None = None
    ) -> Target:
        log = self._folder / f"{name}.log"
        child = self._stack.enter_context(process(command, log, self._folder))
        return await self._ready(name, port, (child, log), probe, count_source)

    async def _ready(
        self,
        name: str,
        port: int,
        started: tuple[subprocess.Popen[bytes], Path] | None,
        probe: Request,
        count_source: str | None = None,
    ) -> Target:
        """Wait until ``probe`` is answered as it must be."""

        async def check() -> None:
            if started is not None and started[0].poll() is not None:
                raise SystemExit(f"{name} ended with status {started[0].returncode}:\n{_tail(started[1])}")
            async with asyncio.timeout(10), connections(port, 1) as opened:
                await opened[0].fetch(request_head(port, len(probe.body)), probe, count_source)

        try:
            await settled(check, START_TIMEOUT_S, f"{name} does not serve")
        except LoadError as error:
            raise SystemExit(f"{error}\n{_tail(started[1]) if started else ''}") from None
        return Target(name, port, tuple(process_tree(started[0].pid)) if started else (), count_source)


def _announced(child: subprocess.Popen[bytes], log: Path) -> int:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s and child.poll() is None:
        said = log.read_bytes()
        if said.startswith(b"listening ") and said.endswith(b"\n"):
            return int(said.split()[1])
        time.sleep(0.02)
    raise SystemExit(f"the canned backend did not start:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
