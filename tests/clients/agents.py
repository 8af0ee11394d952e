"""Coding agents as people run them without a screen, against a gateway on loopback, in an empty home of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripted import MODEL

ROOT = Path(__file__).resolve().parents[2]
NODE = ROOT / ".cache" / "clients-node"
BIN = NODE / "node_modules" / ".bin"

TASK = "Run the shell commands one after another, as many as it takes, and say so when all of them have been run."


@dataclass(frozen=True)
class Ended:
    """How an agent ended: its status (negative: killed by that signal), what it wrote, and for how long it ran."""

    status: int
    output: str
    seconds: float


@dataclass(frozen=True)
class Agent:
    """``command`` takes the gateway's base URL (with /v1) and the agent's home; ``set_up`` prepares both."""

    name: str
    command: Callable[[str, Path], list[str]]
    environment: Callable[[str, Path], dict[str, str]] = field(default=lambda url, home: {})
    set_up: Callable[[str, Path], list[list[str]]] = field(default=lambda url, home: [])

    def run(self, url: str, folder: Path, timeout_s: float) -> Ended:
        """Give it the task. It is ended with all that it started, however it goes."""
        home, work = folder / "home", folder / "work"
        home.mkdir(parents=True)
        work.mkdir()
        environment = base_environment(home) | self.environment(url, home)
        try:
            for command in self.set_up(url, home):
                _run(command, work, environment, folder / "setup.log", 60)
            return _run(self.command(url, home), work, environment, folder / "agent.log", timeout_s)
        finally:
            _end_daemons(home)


def _end_daemons(home: Path) -> None:
    """End what an agent left behind in sessions of its own (Cline's hub): processes whose home is this one."""
    mark = f"HOME={home}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def base_environment(home: Path) -> dict[str, str]:
    """Nothing of the person who runs the tests: a home of its own, no keys, no proxies."""
    node = shutil.which("node")
    path = os.pathsep.join([str(Path(node).parent) if node else "", "/usr/local/bin", "/usr/bin", "/bin"])
    return {
        "HOME": str(home),
        "PATH": path,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "CI": "1",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local/share"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_STATE_HOME": str(home / ".local/state"),
    }


def _run(command: list[str], work: Path, environment: Mapping[str, str], log: Path, timeout_s: float) -> Ended:
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its own session: the group holds what it started and nothing else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(process.returncode, log.read_text(errors="replace"), time.monotonic() - started_s)


def _cline(url: str, home: Path) -> list[str]:
    return [str(BIN / "cline"), "--json", "-P", "openai-compatible", "-m", MODEL, TASK]


def _cline_auth(url: str, home: Path) -> list[list[str]]:
    return [[str(BIN / "cline"), "auth", "-p", "openai-compatible", "-k", "dummy", "-m", MODEL, "-b", url]]


def _opencode(url: str, home: Path) -> list[str]:
    return [str(BIN / "opencode"), "run", "-m", f"gw/{MODEL}", TASK]


def _opencode_environment(url: str, home: Path) -> dict[str, str]:
    model = {"limit": {"context": 131072, "output": 4096}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": "dummy"},
        "models": {MODEL: model},
    }
    settings = {"provider": {"gw": provider}, "permission": {"*": "allow"}, "share": "disabled", "autoupdate": False}
    return {
        "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def _codex(url: str, home: Path) -> list[str]:
    provider = f'{{name="gw",base_url="{url}",wire_api="responses",env_key="GW_KEY"}}'
    return [
        str(BIN / "codex"),
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        *("-m", MODEL),
        *("-c", "model_provider=gw"),
        *("-c", f"model_providers.gw={provider}"),
        *("-c", 'web_search="disabled"'),
        TASK,
    ]


def _qwen(url: str, home: Path) -> list[str]:
    flags = ["--auth-type", "openai", "--openai-api-key", "dummy", "--openai-base-url", url, "-m", MODEL]
    return [str(BIN / "qwen"), "-p", TASK, *flags, "-y", "-o", "json"]


AGENTS = {
    agent.name: agent
    for agent in (
        Agent("cline", _cline, lambda url, home: {"CLINE_DATA_DIR": str(home / "cline")}, _cline_auth),
        Agent("opencode", _opencode, _opencode_environment),
        Agent("codex", _codex, lambda url, home: {"CODEX_HOME": str(home), "GW_KEY": "dummy"}),
        Agent("qwen", _qwen, lambda url, home: {"QWEN_TELEMETRY_ENABLED": "false"}),
    )
}
