"""A gateway in front of a scripted model, for the clients."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from agents import NODE
from e2e_gateway import Gateway, eventually, serving
from scripted import MODEL, Script, ScriptedBackend

Serve = Callable[..., AbstractContextManager[tuple[Gateway, Script]]]


@pytest.fixture(scope="session")
def scripted(model_folder: Path) -> Serve:
    """Serves a script behind the gateway; ``settings`` are the gateway's, as in the environment."""

    @contextmanager
    def serve(
        window_tokens: int, turns: int = 0, settings: dict[str, str] | None = None
    ) -> Iterator[tuple[Gateway, Script]]:
        script = Script(window_tokens, turns, model_folder)
        backend = ScriptedBackend(script)
        backend.start()
        try:
            with serving([backend.url], MODEL, settings, seen=0) as gateway:
                # An overflow is only refused for sure once the tokenizer is loaded.
                eventually(lambda: _is_exact(gateway), 60)
                script.asked.clear()
                yield gateway, script
        finally:
            backend.stop()

    return serve


@pytest.fixture
def busy(model_folder: Path) -> Iterator[ScriptedBackend]:
    """A server that has no room the first time a text is asked for."""
    backend = ScriptedBackend(Script(4096, 0, model_folder, busy=True))
    backend.start()
    yield backend
    backend.stop()


@pytest.fixture(scope="session")
def node() -> Path:
    """The folder with the installed SDKs and agents of Node."""
    if shutil.which("node") is None:
        pytest.skip("needs Node.js 20 or newer on the PATH (Debian: apt-get install nodejs npm)")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").split(".")[0]) < 20:
        pytest.skip(f"needs Node.js 20 or newer; this is {version.strip()}")
    if not (NODE / "node_modules" / ".bin" / "cline").exists():
        pytest.skip(f"the clients are not installed in {os.path.relpath(NODE)}: run make test-clients")
    return NODE


def _is_exact(gateway: Gateway) -> bool:
    answer = gateway.chat(messages=[{"role": "user", "content": "Hello."}])
    return answer.headers.get("x-kvgate-count-source") == "local"
