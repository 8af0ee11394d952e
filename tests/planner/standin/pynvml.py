"""A stand-in for nvidia-ml-py with one card, for processes of their own: put this folder on PYTHONPATH."""

from __future__ import annotations

from types import SimpleNamespace

GIB = 1 << 30


def nvmlInit() -> None:
    return None


def nvmlShutdown() -> None:
    return None


def nvmlDeviceGetCount() -> int:
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(total=24 * GIB, used=22 * GIB, free=2 * GIB)


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=37, memory=12)


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    return 8, 9


def nvmlDeviceGetTemperature(handle: int, kind: int) -> int:
    return 61


def nvmlDeviceGetUUID(handle: int) -> str:
    return "GPU-0000"


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA GeForce RTX 4090"


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=4242, usedGpuMemory=21 * GIB)]


def nvmlSystemGetProcessName(pid: int) -> str:
    return "VLLM::EngineCore"
