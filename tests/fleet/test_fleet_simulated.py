"""The fleet against simulated vLLM servers: their metrics page as vLLM writes it, their end, and their faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fleet_server import eventually, watching

from gateway.fleet.fleet import Fleet
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.server import serve
from gateway.types import BackendView, Health


def only(fleet: Fleet) -> BackendView:
    (view,) = fleet.views(asyncio.get_running_loop().time()).values()
    return view


async def test_two_urls_are_enough(model_folder: Path) -> None:
    small = SimulatorOptions(models=("m",), tokenizer=model_folder, max_model_len=4096, num_gpu_blocks=257)
    large = SimulatorOptions(models=("m",), tokenizer=model_folder, max_model_len=16384, num_gpu_blocks=2049)
    async with serve(small) as one, serve(large) as two, watching(one, two) as fleet:
        assert sorted(fleet.windows("m").values()) == [4096, 16384]
        views = fleet.views(asyncio.get_running_loop().time()).values()
        assert sorted(view.kv.capacity_blocks for view in views if view.kv is not None) == [256, 2048]


@pytest.mark.parametrize("fault", ["no-metrics", "garbage-metrics"])
async def test_a_metrics_page_that_says_nothing_leaves_the_cache_unknown(model_folder: Path, fault: str) -> None:
    options = SimulatorOptions(models=("m",), tokenizer=model_folder, fault=fault)
    async with serve(options) as url, watching(url) as fleet:
        assert fleet.ready()
        assert fleet.windows("m") == {url.removeprefix("http://"): 32768}
        view = only(fleet)
        assert (view.health, view.kv, view.running) == (Health.UP, None, None)
        assert fleet.records()[0].kv is None


async def test_a_server_that_ends_is_down(model_folder: Path) -> None:
    options = SimulatorOptions(models=("m",), tokenizer=model_folder)
    async with serve(options) as url:
        watched = watching(url)
        fleet = await watched.__aenter__()
        assert only(fleet).health is Health.UP
    try:
        await eventually(lambda: only(fleet).health is Health.DOWN)
        assert not fleet.ready()
    finally:
        await watched.__aexit__(None, None, None)
