"""Drives the engines on a clock and hands each request its tokens as they come to exist."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from gateway.simulator.clock import Clock, RealClock
from gateway.simulator.engine import Engine, EngineConfig, EngineRequest, StepResult, TokenOutput

Publish = Callable[[int, Engine, StepResult], None]


class Frontend:
    """``data_parallel_size`` engines behind one door, as vLLM's ``AsyncLLM``.

    ``publish`` is called at the end of every step, and only then: that is the cadence of vLLM's gauges.
    """

    def __init__(
        self, config: EngineConfig, *, data_parallel_size: int, publish: Publish, clock: Clock | None = None
    ) -> None:
        self.clock: Clock = clock or RealClock()
        self.engines = [Engine(config) for _ in range(data_parallel_size)]
        self._publish = publish
        self._queues: dict[str, asyncio.Queue[TokenOutput]] = {}
        self._wakes = [asyncio.Event() for _ in self.engines]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin stepping. Needs a running loop."""
        self._tasks = [asyncio.create_task(self._drive(rank)) for rank in range(len(self.engines))]

    async def stop(self) -> None:
        """Stop stepping; requests still inside get no more tokens."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def choose(self, rank: int | None) -> int:
        """The engine asked for, or the one with the least to do (vLLM weighs waiting requests fourfold)."""
        if rank is not None:
            return rank
        return min(range(len(self.engines)), key=lambda i: self.engines[i].waiting * 4 + self.engines[i].running)

    async def generate(self, requests: Sequence[EngineRequest], rank: int) -> AsyncGenerator[TokenOutput, None]:
        """Yield the outputs of all ``requests`` as they appear; closing the iterator aborts what is unfinished."""
        queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        engine = self.engines[rank]
        open_ids = {request.request_id for request in requests}
        try:
            for request in requests:
                engine.add(request, self.clock.now_s())
                self._queues[request.request_id] = queue
            self._wakes[rank].set()
            while open_ids:
                output = await queue.get()
                if output.finish_reason is not None:
                    open_ids.discard(output.request_id)
                yield output
        finally:
            for request in requests:
                self._queues.pop(request.request_id, None)
            for request_id in open_ids:
                engine.abort(request_id)
            if open_ids:
                self._wakes[rank].set()

    async def _drive(self, rank: int) -> None:
        engine, wake, ended_s = self.engines[rank], self._wakes[rank], 0.0
        while True:
            if not engine.has_work:
                wake.clear()
                await wake.wait()
                ended_s = self.clock.now_s()
            result = engine.step(max(ended_s, self.clock.now_s() - _CATCH_UP_S))
            ended_s = result.ended_s
            await self.clock.sleep_until(ended_s)
            self._publish(rank, engine, result)
            for output in result.outputs:
                if queue := self._queues.get(output.request_id):
                    queue.put_nowait(output)
            if result.idle and not result.finished and engine.has_work:
                # The head of the queue does not fit an empty pool: vLLM spins, we look again when something changes.
                wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), _STUCK_RETRY_S)


_CATCH_UP_S = 0.05
_STUCK_RETRY_S = 0.2
