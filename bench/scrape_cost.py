"""What it costs to read a backend's metrics: CPU of parsing, and of a whole look over a socket, on real pages.

    python -m bench.scrape_cost [PAGE]

The page of a real vLLM 0.32 with one engine (``tests/fleet/vllm_0.32.0_metrics.txt``), and one made of it with eight
engines and 64 sets of LoRA adapters. CPU time of this process; the server is another one.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gateway.config import BackendSettings
from gateway.fleet.discovery import Probe
from gateway.fleet.metrics_text import FAMILIES, parse

PAGE = Path(__file__).resolve().parents[1] / "tests" / "fleet" / "vllm_0.32.0_metrics.txt"
ENGINES, ADAPTERS = 8, 64
ROUNDS, REPEATS = 7, 50

# Serves a file at /metrics, and the families asked for at /metrics/, as prometheus_client's application does.
SERVER = """
import sys
from aiohttp import web
page = open(sys.argv[1], "rb").read()
def of(line):
    words = line.split(b" ")
    return (words[2] if line.startswith(b"#") and len(words) > 2 else line.partition(b"{")[0].split(b" ")[0]).decode()
made = {}
async def metrics(request):
    names = tuple(request.query.getall("name[]", ())) if request.path.endswith("/") else ()
    if names not in made:
        made[names] = b"\\n".join(line for line in page.split(b"\\n") if not names or of(line) in names) + b"\\n"
    return web.Response(body=made[names], content_type="text/plain")
app = web.Application()
app.router.add_get("/metrics", metrics)
app.router.add_get("/metrics/", metrics)
async def main():
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    import asyncio
    await asyncio.Event().wait()
import asyncio
asyncio.run(main())
"""


def large(page: bytes) -> bytes:
    """The page of a server with many engines and adapters."""
    lines: list[bytes] = []
    for line in page.split(b"\n"):
        own = b'engine="0"' in line and line.startswith(b"vllm:")
        lines += [line.replace(b'engine="0"', b'engine="%d"' % rank) for rank in range(ENGINES)] if own else [line]
    for number in range(ADAPTERS):
        names = b",".join(b"adapter-%03d" % each for each in range(number + 1))
        labels = b'max_lora="8",running_lora_adapters="%s",waiting_lora_adapters=""' % names
        lines.append(b"vllm:lora_requests_info{%s} %d.0" % (labels, 1_700_000_000 + number))
    return b"\n".join(lines) + b"\n"


def cpu_us(work: Callable[[], object]) -> float:
    """Least CPU time of ``work`` in µs."""
    work()
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(REPEATS):
            work()
        times.append((time.process_time() - started) / REPEATS * 1e6)
    return min(times)


async def look_us(page: Path) -> float:
    """The same of a look over a socket."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(page)], stdout=subprocess.PIPE)  # noqa: ASYNC220
    try:
        assert server.stdout is not None
        port = int(await asyncio.to_thread(server.stdout.readline))
        probe = Probe(BackendSettings(url=f"http://127.0.0.1:{port}"), 5.0)
        await probe.reading()
        times = []
        for _ in range(ROUNDS):
            started = time.process_time()
            for _ in range(REPEATS):
                await probe.reading()
            times.append((time.process_time() - started) / REPEATS * 1e6)
        await probe.close()
        return min(times)
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Print a line a page."""
    import tempfile

    page = Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).read_bytes()
    print(f"{'page':<24}{'bytes':>9}{'parse all':>12}{'parse chosen':>14}{'whole look':>12}   µs of CPU")
    for name, body in (("one engine", page), (f"{ENGINES} engines, LoRA", large(page))):
        chosen = b"\n".join(
            family.encode() + rest for family, lines in FAMILIES.find(body).items() for rest in lines
        )  # fmt: skip
        with tempfile.NamedTemporaryFile() as file:
            file.write(body)
            file.flush()
            whole = asyncio.run(look_us(Path(file.name)))
        print(
            f"{name:<24}{len(body):>9,}{cpu_us(lambda body=body: parse(body)):>12.0f}"  # type: ignore[misc]
            f"{cpu_us(lambda chosen=chosen: parse(chosen)):>14.0f}{whole:>12.0f}"  # type: ignore[misc]
        )


if __name__ == "__main__":
    main()
