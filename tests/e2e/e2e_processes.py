"""Processes under test: the gateway and simulated servers, each a real subprocess on a free loopback port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".cache" / "e2e"
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0

# For requests to loopback: no proxy of the environment, and no certificates read at each call (20 ms).
PLAIN: dict[str, Any] = {"trust_env": False, "verify": False}


class ProcessFailed(RuntimeError):
    """The process ended, or was not ready in time; the message ends with the tail of its log."""


def free_port() -> int:
    """A port nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class KvgateProcess:
    """``python -m gateway COMMAND … --port PORT``, started by ``start`` and ended by ``stop``."""

    def __init__(
        self, name: str, arguments: Sequence[str], environment: dict[str, str] | None = None, port: int | None = None
    ) -> None:
        self.name = name
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = LOGS / f"{name}-{self.port}.log"
        self._arguments = [*arguments, "--port", str(self.port)]
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return at once."""
        LOGS.mkdir(parents=True, exist_ok=True)
        # The settings of the person who runs the tests are not the tests' settings.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVGATE_")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway", *self._arguments],
                cwd=ROOT,
                env=inherited | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self, path: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once ``path`` answers 200. Raises ``ProcessFailed``."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise ProcessFailed(f"{self.name} ended before it was ready:\n{self.tail()}")
            try:
                if httpx2.get(self.url + path, timeout=2, **PLAIN).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.05)
        raise ProcessFailed(f"{self.name} was not ready after {timeout_s:.0f} s:\n{self.tail()}")

    def stop(self) -> int:
        """End it as Ctrl-C in a service manager does (SIGTERM) and return its exit status."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.terminate()
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise ProcessFailed(f"{self.name} did not end within {STOP_TIMEOUT_S:.0f} s:\n{self.tail()}") from None
        finally:
            self._process = None
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until it has ended by itself; its exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def tail(self, lines: int = 40) -> str:
        """The last lines of what it wrote."""
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else "(no log)"
        )
