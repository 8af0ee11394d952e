"""The driver around the engines: on a virtual clock it is instant, and whoever leaves takes nothing along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from gateway.simulator.clock import VirtualClock
from gateway.simulator.engine import Engine, EngineConfig, EngineRequest, StepResult
from gateway.simulator.frontend import Frontend


@asynccontextmanager
async def running(config: EngineConfig, engines: int = 1) -> AsyncIterator[tuple[Frontend, list[StepResult]]]:
    published: list[StepResult] = []

    def publish(rank: int, engine: Engine, result: StepResult) -> None:
        published.append(result)

    frontend = Frontend(config, data_parallel_size=engines, publish=publish, clock=VirtualClock())
    frontend.start()
    try:
        yield frontend, published
    finally:
        await frontend.stop()


async def test_an_hour_of_decoding_is_instant_on_a_virtual_clock() -> None:
    async with running(EngineConfig(decode_tokens_per_s=1.0)) as (frontend, published):
        request = EngineRequest("a", range(10), range(3600))
        async with aclosing(frontend.generate([request], 0)) as outputs:
            tokens = [output.token_id async for output in outputs]
        assert tokens == list(range(3600))
        assert frontend.clock.now_s() == pytest.approx(3599, abs=1)
        assert published[-1].gauges.used_blocks == 0


async def test_leaving_at_any_moment_frees_everything() -> None:
    for turns in range(12):
        async with running(EngineConfig()) as (frontend, published):

            async def consume(front: Frontend = frontend) -> None:
                requests = [EngineRequest(f"r{index}", range(50), range(9999)) for index in range(3)]
                async with aclosing(front.generate(requests, 0)) as outputs:
                    async for _ in outputs:
                        pass

            task = asyncio.create_task(consume())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not frontend.engines[0].has_work
            assert frontend.engines[0].pool.used_blocks == 0
            assert not frontend._queues
            assert not published or published[-1].gauges.running == 0


async def test_a_request_goes_to_the_engine_asked_for_or_to_the_one_with_the_least_to_do() -> None:
    async with running(EngineConfig(), engines=3) as (frontend, _):
        for name in "ab":
            frontend.engines[0].add(EngineRequest(name, range(5), range(5)), 0.0)
        asked = frontend.generate([EngineRequest("c", range(5), range(900))], 2)
        await anext(asked)
        each_by_itself = frontend.generate([EngineRequest(name, range(5), range(900)) for name in "def"])
        await anext(each_by_itself)
        assert [engine.running + engine.waiting for engine in frontend.engines][1:] == [2, 2]
        await asked.aclose()
        await each_by_itself.aclose()
