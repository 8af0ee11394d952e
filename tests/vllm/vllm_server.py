"""Start, watch and end real vLLM servers on CPU, for the end-to-end suite and ``make run-vllm``.

They live in an environment of their own (``.venv-vllm``, see ``make .venv-vllm/.ready``). A server is a process group
that this module started and that it ends; nothing else is touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LOGS = ROOT / ".cache" / "vllm"

# One server takes 15-30 s from start to ready on an idle core; two at once on a busy machine have taken 90 s.
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0

# One OpenMP thread a server and no pinning, so that two servers and a gateway share two cores. Nothing may be fetched.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class ServerFailed(RuntimeError):
    """A server died or was not ready in time; the message ends with the tail of its log."""


@dataclass(slots=True)
class VllmServer:
    """One ``vllm serve`` on loopback. ``flags`` go to vLLM as they are; ``name`` names the log file."""

    name: str
    model: Path
    port: int
    served_model_name: str
    flags: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    def start(self) -> None:
        """Start the process and return at once. Raises ``ServerFailed`` when vLLM is not installed."""
        if not PYTHON.exists():
            raise ServerFailed(f"{PYTHON} does not exist: run `make test-vllm`, which installs vLLM first")
        # `vllm serve` asks for the metadata of a package named vllm, which vllm-cpu 0.32.0 does not have.
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", self.served_model_name]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self.flags]
        LOGS.mkdir(parents=True, exist_ok=True)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("KVGATE_", "VLLM_"))}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=inherited | ENVIRONMENT | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once ``/health`` answers 200. Raises ``ServerFailed`` if the process ends or the time is up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise ServerFailed(f"vLLM server {self.name} ended before it was ready:\n{self.tail()}")
            if is_healthy(self.url):
                return
            time.sleep(0.25)
        raise ServerFailed(f"vLLM server {self.name} was not ready after {timeout_s:.0f} s:\n{self.tail()}")

    def stop(self) -> None:
        """End the server and its engine processes. Safe to call twice, or before ``start``."""
        if self._process is None:
            return
        group = self._process.pid  # its own session: the group holds what it started and nothing else
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)  # an engine process that outlived its parent
        self._process = None

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"


def is_healthy(url: str) -> bool:
    """Whether ``/health`` answers 200 within a second."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
