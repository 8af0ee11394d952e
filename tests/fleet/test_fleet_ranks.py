"""A server with several engines over a real socket: a target for each where ranks are pinned, else its next engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from fleet_server import Server, eventually, server, watching

from gateway.configuring import ConfigError, load
from gateway.fleet.fleet import Fleet
from gateway.types import BackendView, Health, LoadView, Need

BLOCKS, SIZE = 100, 16


def page(used: Iterable[int], requests: Iterable[int] = (), started_s: float = 1.7e9) -> bytes:
    """The metrics of a server whose engines use so many blocks each, and have so many requests."""
    used = list(used)
    running = [*requests] or [0] * len(used)
    lines = [f"process_start_time_seconds {started_s!r}"]
    for rank, blocks in enumerate(used):
        lines += [
            f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {blocks / (BLOCKS - 1)!r}',
            f'vllm:num_requests_running{{engine="{rank}"}} {running[rank]}.0',
            f'vllm:num_requests_waiting{{engine="{rank}"}} 0.0',
            f'vllm:cache_config_info{{block_size="{SIZE}",engine="{rank}",num_gpu_blocks="{BLOCKS * len(used)}",'
            f'num_gpu_blocks_override="{BLOCKS}"}} 1.0',
        ]
    return ("\n".join(lines) + "\n").encode()


def views(fleet: Fleet) -> dict[str, BackendView]:
    return dict(fleet.views(asyncio.get_running_loop().time()))


def told(fleet: Fleet) -> dict[str, BackendView | LoadView]:
    return {item.name: item for item in fleet.changed(asyncio.get_running_loop().time())}


def used(view: BackendView) -> int | None:
    return None if view.kv is None else view.kv.used_blocks


def pinned(fake: Server) -> dict[str, object]:
    return {"url": fake.url, "name": "gpu", "pin_ranks": True}


async def test_each_engine_of_a_pinned_server_is_a_target_of_its_own() -> None:
    async with server() as fake:
        fake.metrics_body = page([10, 90], [1, 3])
        async with watching(pinned(fake)) as fleet:
            seen = views(fleet)
            assert list(seen) == ["gpu#0", "gpu#1"] == list(fleet.windows("qwen3"))
            assert [(used(view), view.running, view.waiting) for view in seen.values()] == [(10, 1, 0), (90, 3, 0)]
            assert all(view.kv is not None and view.kv.capacity_blocks == BLOCKS - 1 for view in seen.values())
            assert [fleet.backend(name).rank for name in seen] == [0, 1]
            assert {fleet.backend(name).name for name in seen} == {"gpu"}
            assert fleet.siblings("gpu#1") == {"gpu#0", "gpu#1"}
            assert fleet.resolve("qwen3").backends == ("gpu",)
            (record,) = fleet.records()
            assert record.kv is not None
            assert (record.kv.engines, record.kv.used_blocks, record.kv.capacity_blocks) == (2, 100, 2 * (BLOCKS - 1))
            assert [(item.engine, item.running, item.kv and item.kv.used_blocks) for item in record.engines] == [
                ("0", 1, 10),
                ("1", 3, 90),
            ]


async def test_a_request_is_booked_at_its_target_and_no_other_is_told_of() -> None:
    async with server() as fake:
        fake.metrics_body = page([0, 0])
        async with watching(pinned(fake), scrape_interval_s=60.0) as fleet:
            told(fleet)
            reservation = fleet.reserve("gpu#1", Need(160, 0), None)
            assert list(told(fleet)) == ["gpu#1"]
            assert [used(view) for view in views(fleet).values()] == [0, 10]
            assert [view.in_flight for view in views(fleet).values()] == [0, 1]
            reservation.release()
            assert [used(view) for view in views(fleet).values()] == [0, 0]


async def test_a_server_that_chooses_looks_like_the_engine_it_will_choose() -> None:
    async with server() as fake:
        fake.metrics_body = page([95, 40], [1, 2])
        woken: list[None] = []
        async with watching(
            {"url": fake.url, "name": "gpu"}, on_change=lambda: woken.append(None), scrape_interval_s=60.0
        ) as fleet:
            (view,) = views(fleet).values()
            assert (view.name, view.engines, view.trial, used(view), view.running) == ("gpu", 2, True, 95, 1)
            assert view.kv is not None
            assert view.kv.capacity_blocks == BLOCKS - 1  # though both together have twice as many
            woken.clear()
            first = fleet.reserve("gpu", Need(16, 0), None)
            assert woken  # who waits may go to another engine now
            (view,) = views(fleet).values()
            assert used(view) == 96  # as many requests at both: either may be next, so the fuller one counts
            second = fleet.reserve("gpu", Need(16, 0), None, rank=0)
            (view,) = views(fleet).values()
            assert used(view) == 40
            unheeded = fleet.reserve("gpu", Need(16, 0), None, rank=0, heeded=False)
            (record,) = fleet.records()
            assert [item.kv and item.kv.used_blocks for item in record.engines] == [97, 41]
            for reservation in (first, second, unheeded):
                reservation.release()


async def test_engines_come_and_go_with_a_restart() -> None:
    async with server() as fake:
        fake.metrics_body = page([1, 2])
        async with watching(pinned(fake)) as fleet:
            told(fleet)
            fake.metrics_body = page([1, 2, 3, 4], started_s=1.8e9)
            await eventually(lambda: len(fleet.windows("qwen3")) == 4)
            assert {"gpu#2", "gpu#3"} <= told(fleet).keys()
            await eventually(lambda: [used(view) for view in views(fleet).values()] == [1, 2, 3, 4])
            held = fleet.reserve("gpu#3", Need(160, 0), None)
            fake.metrics_body = page([0], started_s=1.9e9)
            await eventually(lambda: list(fleet.windows("qwen3")) == ["gpu#0"])
            gone = views(fleet)["gpu#3"]
            assert (gone.health, gone.windows) == (Health.DOWN, {})
            assert fleet.records()[0].in_flight == 1  # until it has failed
            held.release()
            await eventually(lambda: used(views(fleet)["gpu#0"]) == 0)
            assert fleet.records()[0].in_flight == 0


async def test_a_server_that_says_nothing_of_engines_keeps_those_it_had() -> None:
    async with server() as fake:
        fake.metrics_body = page([1, 2])
        async with watching(pinned(fake)) as fleet:
            fake.metrics_status = 404
            await eventually(lambda: all(view.kv is None for view in views(fleet).values()))
            assert list(fleet.windows("qwen3")) == ["gpu#0", "gpu#1"]


async def test_a_server_with_one_engine_may_be_pinned_too() -> None:
    async with server() as fake, watching(pinned(fake)) as fleet:
        assert list(fleet.windows("qwen3")) == ["gpu#0"]
        assert fleet.backend("gpu#0").rank == 0
        assert fleet.backend("gpu").rank is None
        with pytest.raises(KeyError):
            fleet.backend("gpu#1")


async def test_one_request_tries_a_recovering_server_whatever_it_has_engines() -> None:
    async with server() as fake:
        fake.metrics_body = page([0, 0])
        async with watching(pinned(fake), failures_to_open=1, reopen_after_s=0.05) as fleet:
            fleet.note_failure("gpu")
            assert {view.health for view in views(fleet).values()} == {Health.DOWN}
            await eventually(lambda: all(view.health is Health.UP for view in views(fleet).values()))
            assert [view.accepting for view in views(fleet).values()] == [True, False]
            fleet.note_success("gpu")
            assert [view.accepting for view in views(fleet).values()] == [True, True]


def test_no_backend_may_be_named_like_an_engine_of_another() -> None:
    backends = [{"url": "http://a:1", "name": "gpu", "pin_ranks": True}, {"url": "http://b:1", "name": "gpu#1"}]
    with pytest.raises(ConfigError, match="gpu#1"):
        load(None, {"backends": backends})
    backends[0]["pin_ranks"] = False
    assert len(load(None, {"backends": backends}).backends) == 2
