"""The GPUs of this machine through NVML (or a saved ``nvidia-smi`` page): memory, processes, load, temperature.

Everything that cannot be read is None, never zero: without a driver there are no GPUs and a reason.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gateway.planner.cards import Card, find_card
from gateway.planner.errors import UnknownCard
from gateway.planner.figures import GIB, MIB

_UNEXPLAINED_BYTES = 600 * MIB
_SMI_QUERY = "index,uuid,name,memory.total,memory.used,memory.free,utilization.gpu,temperature.gpu,compute_cap"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process with a context on a GPU; ``used_bytes`` is None where the driver hides it (WSL, containers)."""

    pid: int
    used_bytes: int | None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``utilization`` is 0..1, ``temperature_c`` in Celsius."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    utilization: float | None
    temperature_c: float | None
    capability: str | None
    processes: tuple[GpuProcess, ...] | None

    @property
    def unexplained_bytes(self) -> int | None:
        """Memory in use that no listed process holds: a zombie, another container, or the desktop."""
        if self.used_bytes is None or self.processes is None:
            return None
        known = [process.used_bytes for process in self.processes]
        if any(used is None for used in known):
            return None
        return max(self.used_bytes - sum(used for used in known if used is not None), 0)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What was found, or why nothing was."""

    gpus: tuple[Gpu, ...]
    source: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One Prometheus sample for the sidecar."""

    name: str
    labels: dict[str, str]
    value: float


METRICS: dict[str, str] = {
    "kvgate_gpu_memory_total_bytes": "Memory of the GPU.",
    "kvgate_gpu_memory_used_bytes": "Memory in use on the GPU, by anyone.",
    "kvgate_gpu_memory_free_bytes": "Memory free on the GPU.",
    "kvgate_gpu_memory_process_bytes": "Memory the processes of one name hold on the GPU.",
    "kvgate_gpu_processes": "Processes with a context on the GPU.",
    "kvgate_gpu_utilization_ratio": "Share of time a kernel was running, 0 to 1.",
    "kvgate_gpu_temperature_celsius": "Temperature of the GPU.",
}


def read_gpus(nvml: Any | None = None) -> GpuReading:
    """Ask NVML. ``nvml`` stands in for the module in tests; without it nvidia-ml-py is imported."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return GpuReading((), "nvml", "nvidia-ml-py is not installed: pip install 'kvgate[gpu]'")
    library: Any = nvml
    return _ask_library(library)


def _ask_library(nvml: Any) -> GpuReading:
    try:
        nvml.nvmlInit()
    except Exception as error:
        return GpuReading((), "nvml", f"no NVIDIA driver here ({error})")
    try:
        count = int(nvml.nvmlDeviceGetCount())
        return GpuReading(tuple(_read_one(nvml, index) for index in range(count)), "nvml")
    except Exception as error:
        return GpuReading((), "nvml", f"the NVIDIA driver answered with an error ({error})")
    finally:
        _quietly(nvml.nvmlShutdown)


def from_nvidia_smi(text: str) -> GpuReading:
    """GPUs from saved output: ``--query-gpu`` CSV (see ``smi_command``) or the page plain ``nvidia-smi`` prints."""
    rows = [line for line in text.splitlines() if re.match(r"\s*\d+, (GPU|MIG)-", line)]
    if rows:
        return GpuReading(tuple(_from_csv(line) for line in rows), "nvidia-smi")
    gpus = _from_page(text)
    if not gpus:
        return GpuReading((), "nvidia-smi", f"this is not nvidia-smi output; run: {smi_command()}")
    return GpuReading(tuple(gpus), "nvidia-smi")


def smi_command() -> str:
    """The command whose output ``from_nvidia_smi`` reads best."""
    return f"nvidia-smi --query-gpu={_SMI_QUERY} --format=csv,noheader,nounits"


def samples(reading: GpuReading) -> list[GpuSample]:
    """The reading as metrics by UUID. What is unknown has no sample, so it cannot be mistaken for zero."""
    found: list[GpuSample] = []
    for gpu in reading.gpus:
        labels = {"uuid": gpu.uuid, "gpu": str(gpu.index), "name": gpu.name}
        values: tuple[tuple[str, float | None], ...] = (
            ("kvgate_gpu_memory_total_bytes", gpu.total_bytes),
            ("kvgate_gpu_memory_used_bytes", gpu.used_bytes),
            ("kvgate_gpu_memory_free_bytes", gpu.free_bytes),
            ("kvgate_gpu_processes", None if gpu.processes is None else len(gpu.processes)),
            ("kvgate_gpu_utilization_ratio", gpu.utilization),
            ("kvgate_gpu_temperature_celsius", gpu.temperature_c),
        )
        found += [GpuSample(name, labels, float(value)) for name, value in values if value is not None]
        found += [
            GpuSample("kvgate_gpu_memory_process_bytes", {**labels, "process": process}, float(used))
            for process, used in _by_program(gpu.processes or ()).items()
        ]
    return found


def _by_program(processes: Iterable[GpuProcess]) -> dict[str, int]:
    """Bytes by program, not by pid: pids would make a new series at every restart. ``kvgate gpus`` lists them."""
    held: dict[str, int] = {}
    for process in processes:
        if process.used_bytes is not None:
            program = (process.name or "unknown").rsplit("/", 1)[-1]
            held[program] = held.get(program, 0) + process.used_bytes
    return held


def exposition(reading: GpuReading) -> str:
    """The samples in Prometheus text format, with HELP and TYPE for every metric that has one."""
    lines: list[str] = []
    by_name: dict[str, list[GpuSample]] = {}
    for sample in samples(reading):
        by_name.setdefault(sample.name, []).append(sample)
    for name, found in by_name.items():
        lines += [f"# HELP {name} {METRICS[name]}", f"# TYPE {name} gauge"]
        for sample in found:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
            lines.append(
                f"{name}{{{labels}}} {sample.value:g}"
                if sample.value < 1e6
                else f"{name}{{{labels}}} {int(sample.value)}"
            )
    return "\n".join(lines) + ("\n" if lines else "")


def findings(gpus: Sequence[Gpu], utilization: float) -> list[str]:
    """What will disturb a start at this utilisation: memory held by others, uneven cards, hidden processes."""
    found: list[str] = []
    for gpu in gpus:
        if (
            gpu.total_bytes is not None
            and gpu.free_bytes is not None
            and gpu.free_bytes < gpu.total_bytes * utilization
        ):
            share = int(gpu.free_bytes / gpu.total_bytes * 100) / 100
            found.append(
                f"GPU {gpu.index}: {gpu.free_bytes / GIB:.2f} GiB free of {gpu.total_bytes / GIB:.2f}, but "
                f"--gpu-memory-utilization {utilization:g} asks for {gpu.total_bytes * utilization / GIB:.2f}: "
                f"vLLM refuses "
                f"to start. Stop the processes below or use --gpu-memory-utilization {share:g}."
            )
        hidden = gpu.unexplained_bytes
        if hidden is not None and hidden > _UNEXPLAINED_BYTES:
            found.append(
                f"GPU {gpu.index}: {hidden / GIB:.2f} GiB are in use by no process listed: a killed server's leftover, "
                "another container, or a desktop. `sudo fuser -v /dev/nvidia*` finds holders on the host."
            )
    totals = [gpu.free_bytes for gpu in gpus if gpu.free_bytes is not None]
    if len(totals) > 1 and max(totals) - min(totals) > 256 * MIB:
        found.append(
            f"Free memory differs between the cards by {(max(totals) - min(totals)) / GIB:.2f} GiB; with tensor "
            "parallelism the smallest decides for all."
        )
    return found


def planned_card(needed: int = 1) -> Card | None:
    """The card a plan should assume here: the smallest of the first ``needed``; None without any."""
    reading = read_gpus()
    usable = [gpu for gpu in reading.gpus if gpu.total_bytes is not None][: max(needed, 1)]
    if not usable:
        return None
    smallest = min(usable, key=lambda gpu: gpu.total_bytes or 0)
    return card_of(smallest)


def card_of(gpu: Gpu) -> Card:
    """The table's card for a GPU, with the memory really there."""
    gib = (gpu.total_bytes or 0) / GIB
    try:
        known = find_card(gpu.name)
    except UnknownCard:
        return Card(gpu.name, round(gib, 2), gpu.capability or "unknown", 0, kind="unknown", measured=True)
    # NVML's total includes what the driver reserves; torch sees the table's figure, a little less.
    seen = known.memory_gib if abs(known.memory_gib - gib) < 0.06 * gib else gib
    return Card(
        known.name,
        round(seen, 2),
        gpu.capability or known.capability,
        known.bandwidth_gbps,
        known.kind,
        known.vendor,
        known.note,
        known.aliases,
        measured=True,
    )


def _read_one(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _quietly(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _quietly(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    capability = _quietly(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    temperature = _quietly(lambda: nvml.nvmlDeviceGetTemperature(handle, 0))
    return Gpu(
        index=index,
        uuid=_word(_quietly(lambda: nvml.nvmlDeviceGetUUID(handle))) or f"index-{index}",
        name=_word(_quietly(lambda: nvml.nvmlDeviceGetName(handle))) or "unknown",
        total_bytes=_whole(getattr(memory, "total", None)),
        used_bytes=_whole(getattr(memory, "used", None)),
        free_bytes=_whole(getattr(memory, "free", None)),
        utilization=None if rates is None else int(rates.gpu) / 100,
        temperature_c=None if temperature is None else float(temperature),
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        processes=_processes(nvml, handle),
    )


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | None:
    found: dict[int, GpuProcess] = {}
    answered = False
    for ask in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        listed = _quietly(partial(getattr(nvml, ask), handle)) if hasattr(nvml, ask) else None
        if listed is None:
            continue
        answered = True
        for process in listed:
            pid = int(process.pid)
            name = _word(_quietly(partial(nvml.nvmlSystemGetProcessName, pid)))
            found[pid] = GpuProcess(pid, _whole(getattr(process, "usedGpuMemory", None)), name)
    return tuple(found.values()) if answered else None


def _from_csv(line: str) -> Gpu:
    cells = [cell.strip() for cell in line.split(",")]
    cells += [""] * (9 - len(cells))
    total, used, free, load, heat = (_number(cell) for cell in cells[3:8])
    return Gpu(
        int(cells[0]),
        cells[1],
        cells[2],
        _mib(total),
        _mib(used),
        _mib(free),
        None if load is None else load / 100,
        heat,
        cells[8] or None,
        None,
    )


def _from_page(text: str) -> list[Gpu]:
    """The boxed table: a name line, then a line with temperature, ``used MiB / total MiB`` and load."""
    gpus: list[Gpu] = []
    names: list[tuple[int, str]] = []
    for line in text.splitlines():
        name = re.match(r"\|\s+(\d+)\s+(\S.*?)\s+(?:On|Off|N/A)\s*\|", line)
        if name:
            names.append((int(name[1]), name[2].strip()))
        memory = re.search(r"(\d+)MiB\s*/\s*(\d+)MiB", line)
        if memory and names:
            heat = re.search(r"(\d+)C\b", line)
            load = re.search(r"\|\s*(\d+)%", line)
            index, label = names[-1]
            used, total = int(memory[1]) * MIB, int(memory[2]) * MIB
            gpus.append(
                Gpu(
                    index,
                    f"index-{index}",
                    label,
                    total,
                    used,
                    total - used,
                    int(load[1]) / 100 if load else None,
                    float(heat[1]) if heat else None,
                    None,
                    (),
                )
            )
    return [_with_processes(gpu, text) for gpu in gpus]


def _with_processes(gpu: Gpu, text: str) -> Gpu:
    found: list[GpuProcess] = []
    pattern = re.compile(r"\|\s+(\d+)\s+\S+\s+\S+\s+(\d+)\s+(\S+)\s+(.+?)\s+(\d+|N/A)(?:MiB)?\s*\|")
    for match in pattern.finditer(text):
        if int(match[1]) == gpu.index:
            used = None if match[5] == "N/A" else int(match[5]) * MIB
            found.append(GpuProcess(int(match[2]), used, match[4].strip()))
    listed = "Processes:" in text
    return replace(gpu, processes=tuple(found) if listed else None)


def _quietly(ask: Callable[[], Any]) -> Any | None:
    """The answer, or None for anything this card or driver does not tell."""
    try:
        return ask()
    except Exception:
        return None


def _word(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value) if value is not None else None


def _whole(value: Any) -> int | None:
    return int(value) if value is not None else None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _mib(number: float | None) -> int | None:
    return None if number is None else int(number) * MIB


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def names_of(gpus: Iterable[Gpu]) -> str:
    """``2 x RTX 3090``: the cards in words."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.name] = counts.get(gpu.name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
