"""A server that freezes, over a real socket: it takes connections and says nothing. And those that only look so."""

from __future__ import annotations

import asyncio
import time

import pytest
from fleet_server import Server, eventually, server, watching

from gateway.fleet.backend import WatchedBackend
from gateway.fleet.discovery import ProbeFailed
from gateway.fleet.fleet import Fleet
from gateway.types import BackendView, Condition, Health

# Looks are given up after 0.3 s, so that three are lost after 0.9 s.
QUICK = {"timeout_s": 0.3, "scrape_fastest_s": 0.02}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.looking.DOUBT_AFTER_S", 0.2)


def view(fleet: Fleet, fake: Server) -> BackendView:
    return fleet.views(asyncio.get_running_loop().time())[fake.name]


def watched(fleet: Fleet) -> WatchedBackend:
    return fleet.watched()[0]


async def test_it_is_lost_after_three_looks_and_back_at_the_next_that_is_answered() -> None:
    async with server() as fake, watching(fake.url, **QUICK) as fleet:
        told = asyncio.Event()
        fleet.pulse(fake.name).listen(told, told.set)
        fake.delay_s, started_s = 30.0, time.monotonic()
        await asyncio.wait_for(told.wait(), 5)
        assert 0.9 <= time.monotonic() - started_s < 3.0  # 0.95 s where nothing else runs
        assert view(fleet, fake).health is Health.DOWN
        assert fleet.records()[0].condition is Condition.DOWN
        assert not fleet.ready()
        fake.delay_s = 0.0
        await eventually(fleet.ready)
        assert not fleet.pulse(fake.name).lost


async def test_while_it_is_in_doubt_it_takes_requests_at_a_price() -> None:
    async with server() as fake, watching(fake.url, **QUICK | {"timeout_s": 1.0}) as fleet:
        assert view(fleet, fake).first_s is None
        fake.delay_s = 30.0
        await eventually(lambda: fleet.pulse(fake.name).doubtful)
        doubted = view(fleet, fake)
        assert (doubted.health, doubted.accepting, doubted.first_s) == (Health.UP, True, 3.0)
        fake.delay_s = 0.0
        await eventually(lambda: not fleet.pulse(fake.name).doubtful)
        assert view(fleet, fake).first_s is None


async def test_one_slow_page_of_metrics_takes_no_backend_out() -> None:
    async with server() as fake, watching(fake.url, **QUICK) as fleet:
        failures = fleet.records()[0].scrape_failures
        fake.delay_s = 30.0
        await eventually(lambda: fleet.records()[0].scrape_failures > failures)
        fake.delay_s = 0.0
        await eventually(lambda: not watched(fleet).pulse.misses)
        assert fleet.ready()
        assert not fleet.pulse(fake.name).lost


async def test_metrics_that_are_never_answered_are_no_doubt_about_the_rest() -> None:
    async with server() as fake, watching(fake.url, **QUICK) as fleet:
        fake.hangs = ("/metrics", "/metrics/")
        await eventually(lambda: fleet.records()[0].scrape_failures > 3)
        for _ in range(10):
            await asyncio.sleep(0.05)
            assert not fleet.pulse(fake.name).doubtful
        assert fleet.ready()


async def test_a_server_too_busy_for_looks_stays_up_while_its_streams_go_on() -> None:
    async with server() as fake, watching(fake.url, **QUICK) as fleet:
        fake.delay_s = 30.0
        for _ in range(80):
            fleet.pulse(fake.name).heard()
            await asyncio.sleep(0.02)
        assert fleet.ready()
        assert not fleet.pulse(fake.name).lost
        await eventually(lambda: not fleet.ready())


async def test_a_host_without_a_route_is_down_at_once_and_lost_when_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route may flap: new requests go elsewhere, those that run there have a moment."""

    async def unreachable(*_: object) -> None:
        raise ProbeFailed("cannot connect: no route to host", refused=True, silent=True)

    async with server() as fake, watching(fake.url, **QUICK) as fleet:
        monkeypatch.setattr("gateway.fleet.discovery.Probe._get", unreachable)
        started_s = time.monotonic()
        await eventually(lambda: not fleet.ready())
        assert not fleet.pulse(fake.name).lost
        await eventually(lambda: fleet.pulse(fake.name).lost)
        assert time.monotonic() - started_s >= 0.9


async def test_a_server_that_shuts_its_door_is_down_but_not_lost() -> None:
    """vLLM that is told to stop listens no more, and still answers who is with it."""
    async with server() as fake, watching(fake.url, **QUICK) as fleet:
        await fake.stop()
        await eventually(lambda: not fleet.ready())
        await asyncio.sleep(1.2)
        assert not fleet.pulse(fake.name).lost
