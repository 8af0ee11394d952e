"""Clocks an engine can be driven by, and a player that runs one through a list of arrivals in no time at all."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from gateway.simulator.engine import Engine, EngineRequest, StepResult


class Clock(Protocol):
    """Seconds since some fixed moment, and a way to let them pass."""

    def now_s(self) -> float: ...

    async def sleep_until(self, moment_s: float) -> None: ...


class RealClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep_until(self, moment_s: float) -> None:
        await asyncio.sleep(max(0.0, moment_s - time.monotonic()))


class VirtualClock:
    """Time that passes only when somebody sleeps; whoever sleeps is woken at once, others having run first."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    async def sleep_until(self, moment_s: float) -> None:
        await asyncio.sleep(0)
        self._now_s = max(self._now_s, moment_s)


def play(
    engine: Engine, arrivals: Iterable[tuple[float, EngineRequest]], aborts: Iterable[tuple[float, str]] = ()
) -> Iterator[StepResult]:
    """Run an engine in virtual time: requests arrive, aborts take effect at the next step, steps are yielded.

    No event loop, no sleeping. Ends when nothing is left to do, or when what is left can never be scheduled (a prompt
    larger than the pool), as vLLM would then wait for ever.
    """
    script: list[tuple[float, EngineRequest | str]] = [*arrivals, *aborts]
    events = [(moment_s, number, event) for number, (moment_s, event) in enumerate(script)]
    heapq.heapify(events)
    now_s = 0.0
    while events or engine.has_work:
        if not engine.has_work and events:
            now_s = max(now_s, events[0][0])
        while events and events[0][0] <= now_s:
            event = heapq.heappop(events)[2]
            if isinstance(event, str):
                engine.abort(event)
            else:
                engine.add(event, now_s)
        result = engine.step(now_s)
        yield result
        now_s = result.ended_s
        if result.idle and not result.finished and engine.has_work:
            if not events:
                return
            now_s = max(now_s, events[0][0])
