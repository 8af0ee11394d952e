"""The GPU metrics over HTTP, for a GPU machine on which no gateway runs: ``/metrics`` and ``/health``."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gateway.planner.gpu_watch import GpuWatch
from gateway.planner.gpus import exposition

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class GpuSidecar(ThreadingHTTPServer):
    """Serves the newest reading of ``watch``. ``port`` 0 takes a free one; ``server_port`` says which."""

    daemon_threads = True

    def __init__(self, host: str, port: int, watch: GpuWatch) -> None:
        self.watch = watch
        super().__init__((host, port), _Handler)

    def page(self) -> bytes:
        """The exposition; empty while nothing is known."""
        reading = self.watch.latest()
        return exposition(reading).encode() if reading else b""


class _Handler(BaseHTTPRequestHandler):
    server: GpuSidecar
    timeout = 10.0
    server_version = "kvgate"
    sys_version = ""

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(200, self.server.page())
            case "/health":
                self._answer(200, b"")
            case _:
                self._answer(404, b"kvgate gpus serves /metrics and /health.\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", _TEXT)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is not worth a line."""
