"""The fleet over real sockets: backends that are late, restart, fall silent, lie, and come back."""

from __future__ import annotations

import asyncio
import json

import pytest
from fleet_server import card, eventually, server, watching

from gateway.config import Settings
from gateway.exceptions import NoBackend, UnknownModel
from gateway.fleet.fleet import Fleet
from gateway.fleet.models import Model
from gateway.fleet.records import KvRecord
from gateway.types import BackendView, Health, KvView, Need


def kv(fleet: Fleet, name: str) -> KvView:
    view = fleet.views(asyncio.get_running_loop().time())[name].kv
    assert view is not None
    return view


def kv_record(fleet: Fleet) -> KvRecord:
    record = fleet.records()[0].kv
    assert record is not None
    return record


def health(fleet: Fleet, name: str) -> Health:
    return fleet.views(asyncio.get_running_loop().time())[name].health


async def test_everything_is_discovered_from_a_url() -> None:
    async with server() as fake:
        fake.cards.append(card("sql", None, parent="qwen3"))
        async with watching(fake.url + "/v1/") as fleet:
            assert fleet.ready()
            assert fleet.models() == [
                Model("qwen3", "/models/qwen3", None, 16000, 32768, (fake.name,)),
                Model("sql", "/models/sql", "qwen3", 16000, 32768, (fake.name,)),
            ]
            assert fleet.backend(fake.name).version == "0.32.0"
            assert (kv(fleet, fake.name).capacity_blocks, kv(fleet, fake.name).block_size_tokens) == (1000, 16)


async def test_a_window_larger_than_the_cache_ends_where_the_cache_does() -> None:
    async with server() as fake:
        fake.blocks = 129
        async with watching(fake.url) as fleet:
            assert fleet.windows("qwen3") == {fake.name: 2048}
            model = fleet.resolve("qwen3")
            assert (model.window_tokens, model.max_model_len_tokens) == (2048, 32768)


async def test_two_backends_of_one_model_show_as_one_model() -> None:
    async with server() as small, server() as large:
        small.cards, large.cards = [card("m", 4096)], [card("m", 16384), card("other", 16384)]
        large.blocks = 4001
        async with watching(small.url, large.url) as fleet:
            assert fleet.resolve("m").backends == (small.name, large.name)
            assert fleet.resolve("m").window_tokens == 16384
            assert fleet.windows("m") == {small.name: 4096, large.name: 16384}
            assert fleet.windows("other") == {large.name: 16384}


async def test_an_unknown_model_is_named_with_those_that_are_known() -> None:
    async with server() as fake:
        fake.cards = [card("b", 4096), card("a", 4096)]
        async with watching(fake.url) as fleet:
            with pytest.raises(UnknownModel) as caught:
                fleet.resolve("c")
            assert caught.value.known == ("a", "b")
            with pytest.raises(UnknownModel):
                fleet.resolve("")


async def test_an_empty_name_means_the_only_base_model() -> None:
    async with server() as fake:
        fake.cards.append(card("sql", None, parent="qwen3"))
        async with watching(fake.url) as fleet:
            assert fleet.resolve("").id == "qwen3"


async def test_a_backend_down_at_start_joins_when_it_comes_up() -> None:
    async with server() as fake:
        await fake.stop()
        async with watching(fake.url) as fleet:
            assert not fleet.ready()
            assert health(fleet, fake.name) is Health.DOWN
            with pytest.raises(NoBackend):
                fleet.resolve("qwen3")
            await fake.start()
            await eventually(fleet.ready)
            assert fleet.resolve("qwen3").backends == (fake.name,)


async def test_before_the_first_look_a_backend_is_unknown_not_down() -> None:
    async with server() as fake:
        fake.delay_s = 30
        async with asyncio.timeout(5):
            fleet = Fleet(Settings(backends=[fake.url]), lambda: None)
            await fleet.start()
            assert not await fleet.wait_until_known(0.05)
            assert health(fleet, fake.name) is Health.UNKNOWN
            await fleet.stop()


async def test_a_backend_that_goes_away_is_down_at_once_and_back_at_once() -> None:
    async with server() as fake, watching(fake.url) as fleet:
        await fake.stop()
        await eventually(lambda: health(fleet, fake.name) is Health.DOWN)
        assert fleet.resolve("qwen3").backends == (fake.name,)  # known, though down
        await fake.start()
        await eventually(lambda: health(fleet, fake.name) is Health.UP)
        await eventually(lambda: fleet.records()[0].error is None, 2)  # cleared by the scrape that follows


async def test_a_restart_with_other_flags_is_seen_by_the_start_time() -> None:
    async with server() as fake, watching(fake.url) as fleet:
        fake.cards = [card("qwen3", 8192), card("new", 8192)]
        fake.blocks, fake.block_size, fake.version = 501, 32, {"version": "0.33.0"}
        fake.started_s += 100
        await eventually(lambda: fleet.records()[0].restarts == 1)
        await eventually(lambda: kv_record(fleet).block_size_tokens == 32)
        assert kv(fleet, fake.name).capacity_blocks == 500
        assert fleet.windows("new") == {fake.name: 8192}
        assert fleet.backend(fake.name).version == "0.33.0"


async def test_a_restart_is_seen_by_a_counter_that_goes_backwards() -> None:
    async with server() as fake, watching(fake.url) as fleet:
        fake.tokens = 10
        fake.cards = [card("renamed", 4096)]
        await eventually(lambda: [model.id for model in fleet.models()] == ["renamed"])
        assert fleet.records()[0].restarts == 1


async def test_other_model_cards_are_noticed_after_the_discover_interval() -> None:
    async with server() as fake, watching(fake.url, discover_interval_s=0.1) as fleet:
        fake.cards = [card("qwen3", 1024)]
        await eventually(lambda: fleet.windows("qwen3") == {fake.name: 1024})
        assert fleet.records()[0].restarts == 0


async def test_a_restart_while_our_requests_run_loses_none_of_them() -> None:
    async with server() as fake, watching(fake.url) as fleet:
        reservation = fleet.reserve(fake.name, Need(160, 160), None)
        fake.blocks, fake.started_s = 501, 1.8e9
        await eventually(lambda: kv_record(fleet).capacity_blocks == 500)
        assert (kv(fleet, fake.name).used_blocks, kv(fleet, fake.name).reserved_blocks) == (10, 20)
        reservation.release()
        reservation.release()
        assert kv(fleet, fake.name).reserved_blocks == 0


async def test_foreign_use_shows_and_goes() -> None:
    async with server() as fake, watching(fake.url) as fleet:
        fake.used_blocks = 400
        await eventually(lambda: kv(fleet, fake.name).used_blocks == 400)
        assert kv_record(fleet).foreign_blocks == 400
        fake.used_blocks = 0
        await eventually(lambda: kv(fleet, fake.name).used_blocks == 0)


async def test_metrics_that_turn_to_garbage_make_the_cache_unknown_and_the_backend_stays_up() -> None:
    async with server() as fake, watching(fake.url) as fleet:
        fake.metrics_body = b"\x00\xffgarbage{{{"
        await eventually(lambda: fleet.records()[0].kv is None)
        view = fleet.views(asyncio.get_running_loop().time())[fake.name]
        assert (view.health, view.kv, view.running) == (Health.UP, None, None)
        assert view.windows == {"qwen3": 32768}  # without a capacity the server's own word counts


async def test_without_any_metrics_placing_still_knows_the_window() -> None:
    async with server() as fake:
        fake.metrics_status = 404
        async with watching(fake.url) as fleet:
            assert health(fleet, fake.name) is Health.UP
            assert fleet.windows("qwen3") == {fake.name: 32768}
            assert fleet.records()[0].kv is None


async def test_failing_metrics_leave_the_backend_up_and_its_numbers_old() -> None:
    async with server() as fake, watching(fake.url, stale_after_s=0.1) as fleet:
        reservation = fleet.reserve(fake.name, Need(1600, 0), None)
        fake.metrics_status = 500
        await eventually(lambda: kv_record(fleet).stale)
        record = fleet.records()[0]
        assert record.health is Health.UP
        assert (record.running, record.waiting) == (None, None)
        assert record.error is not None
        assert "500" in record.error
        assert record.kv is not None
        assert record.kv.used_blocks == 100  # our own footprints need no scrape
        reservation.release()


async def test_a_reading_grown_too_old_is_told_at_the_next_look_though_that_fails() -> None:
    """Who waits for a backend that somebody else kept busy may go there then, and nobody else would say so."""
    changes = asyncio.Event()
    async with server() as fake, watching(fake.url, on_change=changes.set, stale_after_s=0.3) as fleet:
        await eventually(lambda: fleet.records()[0].running is not None)
        fake.metrics_status = 500
        running: int | None = 0
        async with asyncio.timeout(5.0):
            while running is not None:
                await changes.wait()
                changes.clear()
                for view in fleet.changed(asyncio.get_running_loop().time()):
                    assert isinstance(view, BackendView)
                    running = view.running
        assert fleet.records()[0].scrape_failures > 0


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"data": "no"}'])
async def test_a_model_list_that_is_none_brings_a_backend_down_after_a_few_looks(body: bytes) -> None:
    async with server() as fake, watching(fake.url, discover_interval_s=0.02) as fleet:
        fake.models_body = body
        await eventually(lambda: health(fleet, fake.name) is Health.DOWN)
        fake.models_body = None
        await eventually(lambda: health(fleet, fake.name) is Health.UP)


async def test_a_stalled_backend_is_never_asked_twice_at_once() -> None:
    async with server() as fake, watching(fake.url, timeout_s=0.05) as fleet:
        asked = len(fake.asked)
        fake.delay_s = 0.03
        for _ in range(20):
            fleet.note_failure(fake.name)
            await asyncio.sleep(0.02)
        assert len(fake.asked) > asked
        assert fake.most_at_once == 1


async def test_failed_requests_rest_a_backend_that_still_answers_scrapes() -> None:
    async with server() as fake, watching(fake.url, failures_to_open=2, reopen_after_s=0.2) as fleet:
        fleet.note_failure(fake.name)
        assert health(fleet, fake.name) is Health.UP
        fleet.note_failure(fake.name)
        assert health(fleet, fake.name) is Health.DOWN
        await eventually(lambda: health(fleet, fake.name) is Health.UP)
        trial = fleet.views(asyncio.get_running_loop().time())[fake.name]
        assert (trial.accepting, trial.trial) == (True, True)
        reservation = fleet.reserve(fake.name, Need(16, 0), None)
        assert not fleet.views(asyncio.get_running_loop().time())[fake.name].accepting
        reservation.release()
        assert fleet.views(asyncio.get_running_loop().time())[fake.name].accepting
        fleet.note_success(fake.name)
        closed = fleet.views(asyncio.get_running_loop().time())[fake.name]
        assert (closed.accepting, closed.trial) == (True, False)


async def test_a_failed_request_has_the_backend_looked_at_at_once() -> None:
    async with server() as fake, watching(fake.url, scrape_interval_s=30) as fleet:
        asked = len(fake.asked)
        fake.cards = [card("other", 4096)]
        fleet.note_failure(fake.name)
        await eventually(lambda: [model.id for model in fleet.models()] == ["other"])
        assert "/v1/models" in fake.asked[asked:]


async def test_draining_says_so_and_what_runs_runs_on() -> None:
    changes = []
    async with server() as fake, watching(fake.url, on_change=lambda: changes.append(1)) as fleet:
        reservation = fleet.reserve(fake.name, Need(16, 0), None)
        before = len(changes)
        fleet.drain(fake.name)
        view = fleet.views(asyncio.get_running_loop().time())[fake.name]
        assert (view.draining, view.health, view.in_flight) == (True, Health.UP, 1)
        fleet.undrain(fake.name)
        assert not fleet.views(asyncio.get_running_loop().time())[fake.name].draining
        assert len(changes) >= before + 2
        reservation.release()
        with pytest.raises(KeyError):
            fleet.drain("nobody")


async def test_the_description_is_plain_json() -> None:
    async with server() as fake, watching(fake.url) as fleet:
        document = json.loads(json.dumps(fleet.describe()))
        backend = document["backends"][0]
        assert backend["name"] == fake.name
        assert backend["health"] == "up"
        assert backend["kv"]["capacity_tokens"] == 16000
        assert document["models"][0]["id"] == "qwen3"


async def test_stopping_leaves_no_task_and_no_connection() -> None:
    async with server() as fake:
        before = asyncio.all_tasks()
        async with watching(fake.url) as fleet:
            assert fleet.ready()
        ours = {task for task in asyncio.all_tasks() - before if task.get_name().startswith("watch")}
        assert not ours
        asked = len(fake.asked)
        await asyncio.sleep(0.1)
        assert len(fake.asked) == asked
