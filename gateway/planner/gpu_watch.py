"""A thread that reads the GPUs every few seconds, so that no scrape waits for the driver."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gateway.planner.gpus import GpuReading, read_gpus

INTERVAL_S = 5.0

# A driver can hang (a GPU fallen off the bus): after so many missed readings the last one is no longer the truth.
_STALE_AFTER_READINGS = 4

log = logging.getLogger("kvgate")


class GpuWatch:
    """The newest reading. The thread is a daemon: a hanging driver delays neither a scrape nor the end of the process.

    ``read`` and ``clock`` stand in for NVML and ``time.monotonic`` in tests.
    """

    def __init__(
        self,
        read: Callable[[], GpuReading] = read_gpus,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._interval_s = interval_s
        self._clock = clock
        self._stop = threading.Event()
        self._latest: tuple[float, GpuReading] | None = None
        self._problem = ""

    def start(self) -> None:
        """Read now, in the thread, and again every interval."""
        threading.Thread(target=self._run, name="kvgate-gpus", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end after its reading; does not wait for it."""
        self._stop.set()

    def latest(self) -> GpuReading | None:
        """The newest reading; None before the first and when the driver has not answered for several intervals."""
        if self._latest is None:
            return None
        at_s, reading = self._latest
        return reading if self._clock() - at_s <= _STALE_AFTER_READINGS * self._interval_s else None

    def _run(self) -> None:
        while True:
            reading = self._read()
            self._latest = (self._clock(), reading)
            if reading.problem and reading.problem != self._problem:
                log.warning("no GPU metrics: %s", reading.problem)
            self._problem = reading.problem
            if self._stop.wait(self._interval_s):
                return
