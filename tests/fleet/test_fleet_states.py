"""How backends stand, over real sockets: asleep, starting, dead, full, one server twice, several at one URL."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from fleet_server import Server, card, eventually, server, watching

from gateway.config import FleetSettings, Settings
from gateway.fleet.breaker import BreakerState
from gateway.fleet.fleet import Fleet
from gateway.fleet.hits import Verdict
from gateway.fleet.peers import Peers
from gateway.fleet.standing import Signs, condition
from gateway.fleet.troubles import Trouble
from gateway.types import BackendView, Condition, Health, Need


def view(fleet: Fleet, name: str) -> BackendView:
    return fleet.views(asyncio.get_running_loop().time())[name]


def stands(fleet: Fleet, name: str) -> Condition:
    return view(fleet, name).condition


def troubles(fleet: Fleet) -> set[Trouble]:
    return {trouble.kind for trouble in fleet.records()[0].troubles}


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


class Named(Server):
    """A server whose process has a name: the moment it made its first counter."""

    created_s = 1.7e9 + 12.345678
    more = ""

    def metrics(self) -> str:
        return f'{super().metrics()}vllm:prompt_tokens_created{{engine="0"}} {self.created_s!r}\n{self.more}'


@pytest.fixture
async def named() -> Any:
    fake = Named()
    await fake.start()
    yield fake
    await fake.stop()


async def test_a_server_that_sleeps_gets_nothing_and_has_an_empty_cache_when_it_wakes(named: Named) -> None:
    async with watching(named.url) as fleet:
        epoch = view(fleet, named.name).epoch
        named.more = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
        await eventually(lambda: stands(fleet, named.name) is Condition.ASLEEP)
        assert view(fleet, named.name).health is Health.DOWN
        assert fleet.records()[0].error is None
        named.more = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n'
        await eventually(lambda: view(fleet, named.name).health is Health.UP)
        assert stands(fleet, named.name) is Condition.WARMING
        assert view(fleet, named.name).epoch == epoch + 1
        assert fleet.records()[0].restarts == 0


async def test_an_old_server_is_asked_whether_it_sleeps() -> None:
    async with server() as fake:
        fake.says = {"/is_sleeping": {"is_sleeping": True}}
        async with watching(fake.url, discover_interval_s=0.05) as fleet:
            await eventually(lambda: stands(fleet, fake.name) is Condition.ASLEEP)
            fake.says = {"/is_sleeping": {"is_sleeping": False}}
            await eventually(lambda: view(fleet, fake.name).health is Health.UP)


async def test_a_server_that_was_never_there_may_be_starting_and_one_that_was_is_down() -> None:
    async with server() as fake:
        await fake.stop()
        async with watching(fake.url) as fleet:
            assert stands(fleet, fake.name) is Condition.STARTING
            await fake.start()
            await eventually(lambda: stands(fleet, fake.name) is Condition.UP)
            await fake.stop()
            await eventually(lambda: stands(fleet, fake.name) is Condition.DOWN)


@pytest.mark.parametrize("how", ["503", "no models"])
async def test_a_server_that_says_it_is_not_ready_is_starting(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with server() as fake, watching(fake.url, discover_interval_s=0.05) as fleet:
        if how == "503":
            fake.models_status = 503
        else:
            fake.cards = []
        await eventually(lambda: stands(fleet, fake.name) is Condition.STARTING)
        fake.models_status, fake.cards = 200, [card("qwen3", 32768)]
        await eventually(lambda: view(fleet, fake.name).health is Health.UP)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_dead_engine_takes_its_backend_down(caplog: pytest.LogCaptureFixture) -> None:
    async with server() as fake, watching(fake.url, discover_interval_s=0.05) as fleet:
        fake.health_status = 503
        await eventually(lambda: stands(fleet, fake.name) is Condition.DOWN)
        assert "engine is dead" in (fleet.records()[0].error or "")
        fake.health_status = 200
        await eventually(lambda: view(fleet, fake.name).health is Health.UP)
        assert len(lines(caplog, "engine is dead")) == 1


async def test_a_full_backend_rests_without_a_failure_and_is_taken_again(caplog: pytest.LogCaptureFixture) -> None:
    changes: list[float] = []
    loop = asyncio.get_running_loop()
    async with (
        server() as fake,
        watching(fake.url, on_change=lambda: changes.append(loop.time()), scrape_interval_s=30) as fleet,
    ):
        fleet.changed(loop.time())
        fleet.note_busy(fake.name, loop.time(), True)
        resting = view(fleet, fake.name)
        assert (resting.accepting, resting.health, resting.condition) == (False, Health.UP, Condition.OVERLOADED)
        assert [item.name for item in fleet.changed(loop.time())] == [fake.name]
        noted_s = loop.time()
        await eventually(lambda: view(fleet, fake.name).accepting)
        await eventually(lambda: any(at_s > noted_s for at_s in changes))  # who waits is told, though nobody looked
        assert [item.name for item in fleet.changed(loop.time())] == [fake.name]
        fleet.note_success(fake.name)
        record = fleet.records()[0]
        assert (record.overloads, record.breaker) == (1, BreakerState.CLOSED)
        for _ in range(10):
            fleet.note_busy(fake.name, loop.time(), True)
        assert len(lines(caplog, "takes no more")) == 1


async def test_another_503_has_the_backend_looked_at() -> None:
    async with server() as fake, watching(fake.url, scrape_interval_s=30) as fleet:
        asked = len(fake.asked)
        fleet.note_busy(fake.name, asyncio.get_running_loop().time(), False)
        await eventually(lambda: "/v1/models" in fake.asked[asked:])


async def test_one_server_by_two_urls_is_placed_on_once(named: Named, caplog: pytest.LogCaptureFixture) -> None:
    other = f"0.0.0.0:{named.port}"
    async with watching(named.url, f"http://{other}") as fleet:
        await eventually(lambda: stands(fleet, other) is Condition.STANDBY)
        assert (view(fleet, other).draining, view(fleet, named.name).draining) == (True, False)
        assert {trouble.kind for trouble in fleet.records()[1].troubles} == {Trouble.SAME_SERVER}
        assert troubles(fleet) == set()
        await asyncio.sleep(0.2)
        assert len(lines(caplog, "same_server")) == 1
        assert stands(fleet, other) is Condition.STANDBY


async def test_two_servers_that_started_at_once_are_two() -> None:
    async with server() as one, server() as other, watching(one.url, other.url) as fleet:
        await asyncio.sleep(0.2)
        assert {stands(fleet, one.name), stands(fleet, other.name)} == {Condition.UP}


async def test_several_servers_at_one_url_make_the_cache_unknown_until_one_is_left(
    named: Named, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvgate.fleet")
    async with watching(named.url) as fleet:
        for turn in range(6):
            looks = fleet.records()[0].scrapes
            named.created_s = 1.7e9 + turn % 2 + 0.5
            named.tokens = 1000 + 500 * (turn % 2)
            await eventually(lambda looks=looks: fleet.records()[0].scrapes >= looks + 2)  # type: ignore[misc]
        assert troubles(fleet) == {Trouble.SEVERAL_SERVERS}
        assert view(fleet, named.name).kv is None
        assert view(fleet, named.name).health is Health.UP
        assert fleet.records()[0].restarts <= 2
        await eventually(lambda: troubles(fleet) == set())
        await eventually(lambda: view(fleet, named.name).kv is not None)
        told = lines(caplog, "several_servers")
        assert len(told) == 2
        assert told[1].endswith("is over")


async def test_a_place_listed_twice_is_known_as_that(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(Settings(backends=("http://gpu:8000", "http://GPU:8000/v1/")), lambda: None)  # type: ignore[arg-type]
    assert len(lines(caplog, "listed_twice")) == 1
    assert troubles(fleet) == {Trouble.LISTED_TWICE}


async def test_an_idle_backend_is_looked_at_less_and_at_once_when_a_request_comes() -> None:
    async with server() as fake, watching(fake.url, scrape_interval_s=0.02, scrape_slowest_s=30.0) as fleet:
        looks = -1
        for _ in range(20):
            before, looks = looks, fleet.records()[0].scrapes
            if before == looks:  # it has become slow
                break
            await asyncio.sleep(0.7)
        reservation = fleet.reserve(fake.name, Need(16, 0), None)
        await eventually(lambda: fleet.records()[0].scrapes >= looks + 3)  # and as usual while it runs
        reservation.release()


async def test_a_slow_page_is_asked_for_seldom() -> None:
    async with server() as fake, watching(fake.url, scrape_slowest_s=1.0) as fleet:
        fake.delay_s = 0.1
        reservation = fleet.reserve(fake.name, Need(16, 0), None)
        await asyncio.sleep(0.3)
        looks = fleet.records()[0].scrapes
        await asyncio.sleep(1.1)
        assert fleet.records()[0].scrapes - looks <= 3  # each rests four times as long as it took
        reservation.release()


async def test_what_the_prefix_cache_counted_is_held_against_what_was_expected(named: Named) -> None:
    told: list[tuple[str, Verdict]] = []
    counters = 'vllm:prefix_cache_queries_total{{engine="0"}} {}\nvllm:prefix_cache_hits_total{{engine="0"}} {}\n'
    named.more = counters.format(0, 0)
    fleet = Fleet(
        Settings(backends=(named.url,), fleet=FleetSettings(scrape_interval_s=0.02, scrape_slowest_s=0.02)),  # type: ignore[arg-type]
        lambda: None,
        lambda name, verdict: told.append((name, verdict)),
    )
    await fleet.start()
    await fleet.wait_until_known(5.0)
    for _ in range(4):
        reservation = fleet.reserve(named.name, Need(2000, 10), None, 1500)
        reservation.first_byte()
        reservation.release()
    named.more = counters.format(8000, 2400)
    await eventually(lambda: bool(told))
    assert told == [(named.name, Verdict(6000, 2400, 4))]
    assert fleet.records()[0].prefix_hit_ratio == pytest.approx(0.3)
    await fleet.stop()


async def test_a_backend_far_slower_than_its_peers_rests_and_comes_back_slowly() -> None:
    async with server() as one, server() as two, server() as three:
        servers = (one, two, three)
        async with watching(*(fake.url for fake in servers)) as fleet:
            loop = asyncio.get_running_loop()
            backends = fleet._backends
            for fake in servers:
                for key in range(10):
                    now_s = loop.time()
                    backends[fake.name].availability.recent.placed(key, 100, now_s - (5.0 if fake is three else 0.1))
                    backends[fake.name].availability.recent.began(key, now_s)
            peers = Peers(FleetSettings(outlier_rest_s=0.3))
            peers.compare(backends, loop.time())
            assert stands(fleet, three.name) is Condition.EJECTED
            assert not view(fleet, three.name).accepting
            assert fleet.records()[2].ejections == 1
            await asyncio.sleep(0.35)
            peers.compare(backends, loop.time())
            assert stands(fleet, three.name) is Condition.WARMING
            assert view(fleet, three.name).accepting
            assert {stands(fleet, one.name), stands(fleet, two.name)} == {Condition.UP}


async def test_a_backend_that_answers_errors_while_its_peers_do_not_rests() -> None:
    async with server() as one, server() as two, server() as three:
        servers = (one, two, three)
        async with watching(*(fake.url for fake in servers)) as fleet:
            for fake in servers:
                for _ in range(12):
                    fleet.note_success(fake.name, erred=True)  # a request that is an error anywhere
            peers, now_s = Peers(FleetSettings()), asyncio.get_running_loop().time()
            peers.compare(fleet._backends, now_s)
            assert {stands(fleet, fake.name) for fake in servers} == {Condition.UP}
            for fake in servers:
                for _ in range(64):
                    fleet.note_success(fake.name, erred=fake is two)
            peers.compare(fleet._backends, now_s)
            assert stands(fleet, two.name) is Condition.EJECTED
            assert {stands(fleet, one.name), stands(fleet, three.name)} == {Condition.UP}


async def test_outliers_are_left_alone_where_nobody_wants_them_to_rest() -> None:
    peers = Peers(FleetSettings(outlier_ejection=False))
    peers.compare({}, 0.0)
    assert peers._outliers is None


def test_the_word_is_of_what_weighs_most() -> None:
    everything: dict[str, Any] = {
        "asleep": True, "draining": True, "standby": True, "breaker": BreakerState.OPEN, "ejected": True,
        "overloaded": True, "warming": True,
    }  # fmt: skip
    words = []
    for sign in everything:
        words.append(condition(Signs(True, **everything)))
        everything = everything | {sign: BreakerState.CLOSED if sign == "breaker" else False}
    assert words == [
        Condition.ASLEEP, Condition.DRAINING, Condition.STANDBY, Condition.FAILING, Condition.EJECTED,
        Condition.OVERLOADED, Condition.WARMING,
    ]  # fmt: skip
    assert condition(Signs(True)) is Condition.UP
    assert condition(Signs(None)) is Condition.UNKNOWN
    assert condition(Signs(False, starting=True)) is Condition.STARTING
    assert condition(Signs(False)) is Condition.DOWN
