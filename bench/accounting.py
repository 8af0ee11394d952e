"""What a proxy's processes have used, from the kernel, and the arithmetic on repeated samples."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """``pid`` and all its living descendants."""
    parents: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                parents.setdefault(_parent(entry), []).append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile
    tree = [pid]
    for member in tree:
        tree += parents.get(member, [])
    return tree


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, user and system, all its threads, ended ones too.

    The process's CPU clock (clock_getcpuclockid(3)): the run time behind utime + stime of /proc/PID/stat,
    in nanoseconds where those are rounded to 10 ms.
    """
    return time.clock_gettime((~pid << 3) | 2)


def stat_cpu_s(pid: int) -> float:
    """utime + stime of /proc/PID/stat, in seconds."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def tree_cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of several processes together."""
    return sum(cpu_s(pid) for pid in pids)


def rss_bytes(pids: Sequence[int]) -> int:
    """Resident memory of several processes; pages they share count for each."""
    pages = sum(int((_PROC / str(pid) / "statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of repeated samples."""

    median: float
    least: float
    most: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0…1) of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -(-round(share * 1e6) * len(ordered) // 1_000_000)
    return ordered[max(0, rank - 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of y over x, of at least two different x."""
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def ratio(value: float | None, reference: float | None) -> float | None:
    """``value / reference``; ``None`` where either is unknown or there is nothing to divide by."""
    return None if value is None or reference is None or reference <= 0 else value / reference
