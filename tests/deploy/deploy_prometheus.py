"""A real Prometheus for tests: started on a free loopback port, asked through its HTTP API."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import yaml
from e2e_processes import PLAIN, free_port

READY_TIMEOUT_S = 30.0


class Prometheus:
    """A running server at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples ``expr`` has now. Fails the test if Prometheus refuses it."""
        return self._result("query", query=expr)

    def query_range(self, expr: str, span_s: float) -> list[dict[str, Any]]:
        """The series ``expr`` has had in the last ``span_s`` seconds, as a panel of Grafana asks for them."""
        now = time.time()
        return self._result("query_range", query=expr, start=str(now - span_s), end=str(now), step="1")

    def targets(self) -> list[dict[str, Any]]:
        """What is scraped, and how it goes."""
        answer = httpx2.get(f"{self.url}/api/v1/targets", timeout=5, **PLAIN).json()
        targets: list[dict[str, Any]] = answer["data"]["activeTargets"]
        return targets

    def _result(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        answer = httpx2.post(f"{self.url}/api/v1/{path}", data=parameters, timeout=10, **PLAIN).json()
        assert answer["status"] == "success", f"{parameters['query']}: {answer.get('error')}"
        assert not answer.get("warnings"), f"{parameters['query']}: {answer['warnings']}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@contextlib.contextmanager
def prometheus(config: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """Prometheus with ``config``, its data under ``folder``. Ended with the block."""
    program = shutil.which("prometheus")
    assert program is not None, "the prometheus program is not on the PATH (Debian: apt-get install prometheus)"
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    url = f"http://127.0.0.1:{free_port()}"
    flags = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={url[7:]}"]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen([program, *flags], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _ready(url):
            assert process.poll() is None, f"Prometheus ended:\n{log.read_text(errors='replace')[-2000:]}"
            assert time.monotonic() < deadline, f"Prometheus is not ready:\n{log.read_text(errors='replace')[-2000:]}"
            time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/-/ready", timeout=2, **PLAIN).status_code == 200
    except httpx2.TransportError:
        return False
