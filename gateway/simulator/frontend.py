"""Drives the engines on a clock and hands each request its tokens as they come to exist."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence

from gateway.simulator.balancing import Balancer
from gateway.simulator.clock import Clock, RealClock
from gateway.simulator.engine import Engine, EngineConfig, EngineRequest, StepResult, TokenOutput

Publish = Callable[[int, Engine, StepResult], None]


class Frontend:
    """``data_parallel_size`` engines behind one door, as vLLM's ``AsyncLLM``.

    ``publish`` is called at the end of every step, and only then: that is the cadence of vLLM's gauges.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        data_parallel_size: int,
        publish: Publish,
        clock: Clock | None = None,
        api_servers: int = 1,
        counts_own: bool = True,
    ) -> None:
        self.clock: Clock = clock or RealClock()
        self.engines = [Engine(config) for _ in range(data_parallel_size)]
        # As if each request came over another connection: the API servers take turns.
        self._balancers = itertools.cycle(
            [
                Balancer(self.engines, counts_own=counts_own, servers=api_servers, server=server)
                for server in range(api_servers)
            ]
        )
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

    async def generate(
        self, requests: Sequence[EngineRequest], rank: int | None = None
    ) -> AsyncGenerator[TokenOutput, None]:
        """Yield the outputs of all ``requests`` as they appear; closing the iterator aborts what is unfinished.

        All go to the engine asked for, or each to one of its own choice, as the sequences of one request do in vLLM.
        """
        queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        balancer = next(self._balancers)
        at: dict[str, int] = {}  # of those that are not over
        try:
            for request in requests:
                chosen = balancer.choose(self.clock.now_s()) if rank is None else rank
                self.engines[chosen].add(request, self.clock.now_s())
                at[request.request_id] = chosen
                balancer.sent(chosen)
                self._queues[request.request_id] = queue
                self._wakes[chosen].set()
            while at:
                output = await queue.get()
                if output.finish_reason is not None:
                    balancer.finished(at.pop(output.request_id))
                yield output
        finally:
            for request in requests:
                self._queues.pop(request.request_id, None)
            for request_id, chosen in at.items():
                balancer.finished(chosen)
                self.engines[chosen].abort(request_id)
                self._wakes[chosen].set()

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
