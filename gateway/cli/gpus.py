"""``kvgate gpus``: the GPUs of this machine, and what would disturb a vLLM start on them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.planner.gpus import Gpu, GpuReading

_GIB = 1 << 30


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="everything that could be read; null is unknown")
    parser.add_argument("--metrics", action="store_true", help="print Prometheus text and stop")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve /metrics until Ctrl-C, for Prometheus")
    parser.add_argument("--host", default="127.0.0.1", help="address for --serve (127.0.0.1)")
    parser.add_argument(
        "--nvidia-smi", metavar="FILE", help="read saved nvidia-smi output (- for stdin) instead of NVML"
    )
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.92, metavar="SHARE", help="what vLLM will ask for (0.92)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the cards. 0 when any was found, 1 when not."""
    from gateway.planner import gpus

    if options.serve is not None:
        return _serve(options)
    reading = _read(options)
    if options.metrics:
        print(gpus.exposition(reading), end="")
    elif options.json:
        print(json.dumps(_as_json(reading, options.gpu_memory_utilization), indent=2))
    else:
        _print(reading, options.gpu_memory_utilization)
    return 0 if reading.gpus else 1


def _read(options: argparse.Namespace) -> GpuReading:
    from gateway.planner import gpus

    if not options.nvidia_smi:
        return gpus.read_gpus()
    if options.nvidia_smi == "-":
        return gpus.from_nvidia_smi(sys.stdin.read())
    try:
        return gpus.from_nvidia_smi(Path(options.nvidia_smi).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return gpus.GpuReading((), "nvidia-smi", f"cannot read {options.nvidia_smi}: {error.strerror}")


def _serve(options: argparse.Namespace) -> int:
    """The sidecar of a GPU machine. NVML only: a saved page does not change."""
    from gateway.cli.listening import told
    from gateway.planner.gpu_sidecar import GpuSidecar
    from gateway.planner.gpu_watch import GpuWatch

    if options.nvidia_smi or not 0 <= options.serve <= 65535:
        wrong = "--serve reads NVML, not --nvidia-smi" if options.nvidia_smi else "--serve needs a port, 0 to 65535"
        print(f"kvgate gpus: {wrong}.", file=sys.stderr)
        return 2
    watch = GpuWatch()
    try:
        server = GpuSidecar(options.host, options.serve, watch)
    except OSError as error:
        print(f"kvgate gpus: {told(error, options.host, options.serve, '--serve')}", file=sys.stderr)
        return 1
    watch.start()
    with server:
        print(f"GPU metrics on http://{options.host}:{server.server_port}/metrics", flush=True)
        server.serve_forever()
    return 0


def _as_json(reading: GpuReading, utilization: float) -> dict[str, object]:
    from gateway.planner.gpus import findings

    return {
        "source": reading.source,
        "problem": reading.problem or None,
        "gpus": [{**asdict(gpu), "unexplained_bytes": gpu.unexplained_bytes} for gpu in reading.gpus],
        "findings": findings(reading.gpus, utilization),
    }


def _print(reading: GpuReading, utilization: float) -> None:
    from gateway.planner.gpus import findings

    if not reading.gpus:
        print(f"No GPU known: {reading.problem}.")
        return
    for gpu in reading.gpus:
        print(
            f"GPU {gpu.index}  {gpu.name}  ({gpu.capability or 'capability unknown'})  {gpu.uuid}\n"
            f"  memory {_gib(gpu.used_bytes)} used, {_gib(gpu.free_bytes)} free of {_gib(gpu.total_bytes)}   "
            f"load {_percent(gpu.utilization)}   "
            f"{'unknown' if gpu.temperature_c is None else f'{gpu.temperature_c:.0f} C'}"
        )
        _print_processes(gpu)
    for finding in findings(reading.gpus, utilization):
        print(f"! {finding}")


def _print_processes(gpu: Gpu) -> None:
    if gpu.processes is None:
        print("  processes unknown")
    for process in gpu.processes or ():
        print(f"  pid {process.pid:<9}{_gib(process.used_bytes):>14}  {process.name or ''}".rstrip())


def _gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / _GIB:.2f} GiB"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"
