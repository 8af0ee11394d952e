"""``make run-vllm``: SmolLM2-135M-Instruct on two real vLLM servers (windows of 2k and 8k) and the gateway in front.

Starts both servers, hands their addresses to ``kvgate demo`` and ends them when it ends (Ctrl-C).
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from types import FrameType

from vllm_server import PYTHON, ROOT, ServerFailed, VllmServer

from gateway.cli.listening import CannotListen, listen

MODEL = "smollm2-135m-instruct"
FOLDER = ROOT / ".cache" / "models" / "smollm2-135m"
WINDOWS_TOKENS = (2048, 8192)
DEMO_STOP_TIMEOUT_S = 60

# float32: on some CPUs vLLM 0.32 answers wrongly in bfloat16.
FLAGS = ("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "16")


def main() -> int:
    """Run until the gateway ends; its exit status is ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address the gateway listens on")
    parser.add_argument("--port", default="8080", help="port the gateway listens on")
    options, further = parser.parse_known_args()

    try:
        listen(options.host, int(options.port), "make run-vllm PORT=N").close()  # vLLM takes a minute to start
        with listen("127.0.0.1", 0) as small, listen("127.0.0.1", 0) as large:
            ports = [listener.getsockname()[1] for listener in (small, large)]
    except CannotListen as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    subprocess.run([str(PYTHON), str(ROOT / "tests/vllm/smollm2.py"), str(FOLDER)], check=True)
    servers = [
        VllmServer(
            name=f"run-{window // 1024}k",
            model=FOLDER,
            port=port,
            served_model_name=MODEL,
            flags=(*FLAGS, "--max-model-len", str(window)),
        )
        for port, window in zip(ports, WINDOWS_TOKENS, strict=True)
    ]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        started = time.monotonic()
        print(
            f"kvgate: starting vLLM twice on CPU (logs in {servers[0].log.parent}); this takes a minute ...", flush=True
        )
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        print(f"kvgate: both vLLM servers are ready after {time.monotonic() - started:.0f} s.", flush=True)
        command = [sys.executable, "-m", "gateway", "demo", "--host", options.host, "--port", options.port]
        for server in servers:
            command += ["--backend", server.url]
        return _run([*command, *further])
    except ServerFailed as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for server in servers:
            server.stop()


def _run(command: list[str]) -> int:
    """Run the demo to its end, and let it end its own processes when we are told to end."""
    demo = subprocess.Popen(command, cwd=ROOT)
    try:
        return demo.wait()
    finally:
        if demo.poll() is None:
            demo.terminate()  # not run() nor kill(): its gateway would live on
            demo.wait(DEMO_STOP_TIMEOUT_S)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
