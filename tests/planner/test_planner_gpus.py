"""GPUs through a stand-in for NVML, and from saved nvidia-smi pages: unknown is never zero."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.cli import main
from gateway.planner import gpus
from gateway.planner.gpus import GIB, exposition, findings, from_nvidia_smi, read_gpus, samples


class StandInNvml:
    """The few calls of nvidia-ml-py that the planner makes, for two cards."""

    def __init__(self, *, broken: bool = False, hidden: bool = False, driver: bool = True) -> None:
        self.broken, self.hidden, self.driver = broken, hidden, driver
        self.shut_down = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise OSError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.broken:
            raise RuntimeError("Not Supported")
        used = (3 if handle == 0 else 1) * GIB
        return SimpleNamespace(total=24 * GIB, used=used, free=24 * GIB - used)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if self.broken:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 8, 9

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 61

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle:04d}".encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA GeForce RTX 4090"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        used = None if self.hidden else 2 * GIB
        return [SimpleNamespace(pid=4242, usedGpuMemory=used)] if handle == 0 else []

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        return []

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        return b"/usr/bin/python3"


def test_cards_are_read_with_their_processes() -> None:
    library = StandInNvml()
    reading = read_gpus(library)
    first = reading.gpus[0]
    assert (first.uuid, first.capability, first.utilization, first.temperature_c) == ("GPU-0000", "8.9", 0.37, 61.0)
    assert first.processes is not None
    assert first.processes[0].name == "/usr/bin/python3"
    assert first.unexplained_bytes == GIB
    assert library.shut_down == 1


def test_what_a_card_does_not_tell_stays_unknown_and_has_no_sample() -> None:
    reading = read_gpus(StandInNvml(broken=True))
    assert reading.gpus[0].total_bytes is None
    assert reading.gpus[0].utilization is None
    names = {sample.name for sample in samples(reading)}
    assert "kvgate_gpu_memory_used_bytes" not in names
    assert "kvgate_gpu_temperature_celsius" in names


def test_hidden_process_memory_is_not_taken_for_a_zombie() -> None:
    reading = read_gpus(StandInNvml(hidden=True))
    assert reading.gpus[0].unexplained_bytes is None


def test_without_a_driver_there_is_a_reason_and_no_zero() -> None:
    reading = read_gpus(StandInNvml(driver=False))
    assert reading.gpus == ()
    assert "Driver Not Loaded" in reading.problem
    assert exposition(reading) == ""


def test_metrics_carry_the_uuid_and_whole_bytes() -> None:
    text = exposition(read_gpus(StandInNvml()))
    assert 'kvgate_gpu_memory_total_bytes{uuid="GPU-0000",gpu="0",name="NVIDIA GeForce RTX 4090"} 25769803776' in text
    assert 'kvgate_gpu_memory_process_bytes{uuid="GPU-0000"' in text
    assert text.count("# TYPE kvgate_gpu_memory_used_bytes gauge") == 1
    assert {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")} <= set(gpus.METRICS)


def test_leftovers_uneven_cards_and_too_little_free_memory_are_found() -> None:
    found = " ".join(findings(read_gpus(StandInNvml()).gpus, 0.92))
    assert "use --gpu-memory-utilization 0.87" in found
    assert "in use by no process listed" in found
    assert "differs between the cards by 2.00 GiB" in found


def test_the_smallest_card_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "read_gpus", lambda: read_gpus(StandInNvml()))
    card = gpus.planned_card(2)
    assert card is not None
    assert (card.name, card.memory_gib, card.measured) == ("RTX 4090", 23.52, True)


SMI_CSV = (
    "0, GPU-aa, NVIDIA GeForce RTX 3090, 24576, 1200, 23376, 5, 44, 8.6\n"
    "1, GPU-bb, NVIDIA GeForce RTX 3090, 24576, [N/A], [N/A], [N/A], 40, 8.6\n"
)
SMI_PAGE = """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.00      Driver Version: 570.00      CUDA Version: 12.8                   |
|   0  NVIDIA GeForce RTX 4090        Off |   00000000:01:00.0  On |                  Off |
| 30%   45C    P8             20W /  450W |    2048MiB /  24564MiB |      3%      Default |
| Processes:                                                                              |
|    0   N/A  N/A            1201      G   /usr/lib/xorg/Xorg                     350MiB |
|    0   N/A  N/A            9001      C   VLLM::EngineCore                       900MiB |
+-----------------------------------------------------------------------------------------+
"""


def test_nvidia_smi_query_output_is_read() -> None:
    reading = from_nvidia_smi(SMI_CSV)
    assert [gpu.uuid for gpu in reading.gpus] == ["GPU-aa", "GPU-bb"]
    assert reading.gpus[0].free_bytes == 23376 << 20
    assert reading.gpus[1].used_bytes is None


def test_the_nvidia_smi_page_is_read_with_its_leftovers() -> None:
    (gpu,) = from_nvidia_smi(SMI_PAGE).gpus
    assert gpu.name == "NVIDIA GeForce RTX 4090"
    assert gpu.temperature_c == 45.0
    assert gpu.processes is not None
    assert [process.pid for process in gpu.processes] == [1201, 9001]
    assert gpu.unexplained_bytes == (2048 - 1250) << 20


def test_something_else_is_not_taken_for_nvidia_smi() -> None:
    assert "not nvidia-smi" in from_nvidia_smi("command not found").problem


def test_the_command_prints_json_metrics_and_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "smi.csv"
    saved.write_text(SMI_CSV)
    assert main(["gpus", "--nvidia-smi", str(saved), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["gpus"][1]["used_bytes"] is None
    assert main(["gpus", "--nvidia-smi", str(saved)]) == 0
    assert "unknown used" in capsys.readouterr().out
    assert main(["gpus", "--nvidia-smi", str(saved), "--metrics"]) == 0
    assert "kvgate_gpu_memory_free_bytes" in capsys.readouterr().out
    assert main(["gpus", "--nvidia-smi", str(tmp_path / "none")]) == 1
    assert "No GPU known" in capsys.readouterr().out
