"""What backends say of themselves, and what is made of it when they talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fleet_server import card, server
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import BackendSettings
from gateway.fleet.discovery import ModelCard, Probe, ProbeFailed, read_cards
from gateway.fleet.metrics_text import Oddity, Reading


def listing(*cards: Any) -> bytes:
    return json.dumps({"object": "list", "data": list(cards)}).encode()


def test_cards_are_read_in_order() -> None:
    assert read_cards(listing(card("b", 4096), card("a", 8192))) == (
        ModelCard("b", "/models/b", None, 4096),
        ModelCard("a", "/models/a", None, 8192),
    )


def test_a_lora_card_has_its_parents_window() -> None:
    cards = read_cards(listing(card("sql", None, "base"), card("base", 8192), card("deep", None, "sql")))
    assert [item.window_tokens for item in cards] == [8192, 8192, 8192]


def test_a_lora_card_of_an_unlisted_parent_has_the_only_window_there_is() -> None:
    assert read_cards(listing(card("base", 8192), card("sql", None, "other-name")))[1].window_tokens == 8192
    two = read_cards(listing(card("a", 8192), card("b", 4096), card("sql", None, "other-name")))
    assert two[2].window_tokens is None


def test_parents_in_a_circle_end() -> None:
    cards = read_cards(listing(card("a", None, "b"), card("b", None, "a")))
    assert [item.window_tokens for item in cards] == [None, None]


@pytest.mark.parametrize("window", [None, 0, -1, True, 1.5, "4096", 10**30])
def test_a_window_that_is_none_is_unknown(window: Any) -> None:
    assert read_cards(listing({"id": "m", "max_model_len": window}))[0].window_tokens is None


def test_cards_without_a_name_and_second_cards_of_a_name_are_left_out() -> None:
    cards = read_cards(listing(card("m", 1), 7, {"id": 5}, {"id": ""}, card("m", 2)))
    assert cards == (ModelCard("m", "/models/m", None, 1),)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"data": 5}', b"null", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_list_of_models_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(ProbeFailed, match="/v1/models"):
        read_cards(body)


@given(st.binary(max_size=100))
def test_any_bytes_are_cards_or_a_failure(noise: bytes) -> None:
    try:
        read_cards(noise)
    except ProbeFailed:
        return


async def test_a_backend_is_asked_with_its_key() -> None:
    async with server() as fake:
        fake.key = "secret"
        for key, message in ((None, "api_key"), ("wrong", "api_key"), ("secret", None)):
            probe = Probe(BackendSettings(url=fake.url, api_key=key), 1.0)
            try:
                if message is None:
                    assert len(await probe.cards()) == 1
                else:
                    with pytest.raises(ProbeFailed, match=message):
                        await probe.cards()
            finally:
                await probe.close()


@pytest.mark.parametrize("version", [{"version": 5}, [], None, {}, "0.32"])
async def test_a_version_that_is_none_is_unknown(version: Any) -> None:
    async with server() as fake:
        fake.version = version
        probe = Probe(BackendSettings(url=fake.url), 1.0)
        try:
            assert await probe.version() is None
        finally:
            await probe.close()


async def test_a_stalling_backend_is_waited_for_no_longer_than_said() -> None:
    async with server() as fake:
        fake.delay_s = 30
        probe = Probe(BackendSettings(url=fake.url), 0.1)
        started = asyncio.get_running_loop().time()
        try:
            with pytest.raises(ProbeFailed, match="within"):
                await probe.reading()
        finally:
            await probe.close()
        assert asyncio.get_running_loop().time() - started < 2


async def test_a_backend_that_drips_bytes_is_waited_for_no_longer_either() -> None:
    hung_up = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                writer.write(b"#")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        hung_up.set()

    listener = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    probe = Probe(BackendSettings(url=f"http://127.0.0.1:{port}"), 0.2)
    try:
        with pytest.raises(ProbeFailed, match="within"):
            await probe.reading()
        await asyncio.wait_for(hung_up.wait(), 2)  # and we did
    finally:
        await probe.close()
        listener.close()


async def test_a_server_without_metrics_is_no_failure_and_all_unknown() -> None:
    async with server() as fake:
        fake.metrics_status = 404
        probe = Probe(BackendSettings(url=fake.url), 1.0)
        try:
            assert await probe.reading() == Reading()
            fake.metrics_status = 500
            with pytest.raises(ProbeFailed, match="500"):
                await probe.reading()
        finally:
            await probe.close()


async def test_a_refused_connection_says_so() -> None:
    async with server() as fake:
        url = fake.url
    probe = Probe(BackendSettings(url=url), 1.0)
    try:
        with pytest.raises(ProbeFailed) as caught:
            await probe.cards()
        assert caught.value.refused
    finally:
        await probe.close()


@contextlib.asynccontextmanager
async def probing(url: str, timeout_s: float = 1.0) -> AsyncIterator[Probe]:
    probe = Probe(BackendSettings(url=url), timeout_s)
    try:
        yield probe
    finally:
        await probe.close()


async def test_only_the_metrics_that_are_needed_are_asked_for() -> None:
    async with server() as fake, probing(fake.url) as probe:
        assert (await probe.reading()).blocks == 1001
        assert (await probe.reading()).blocks == 1001
        assert fake.asked == ["/metrics/", "/metrics/"]


async def test_a_server_that_cannot_choose_is_asked_for_all_until_it_is_another() -> None:
    async with server() as fake, probing(fake.url) as probe:
        fake.chooses = False
        for _ in range(3):
            assert (await probe.reading()).blocks == 1001
        assert fake.asked == ["/metrics/", "/metrics", "/metrics", "/metrics"]
        fake.chooses = True
        probe.forget()
        assert (await probe.reading()).blocks == 1001
        assert fake.asked[4:] == ["/metrics/"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"<!doctype html><title>Welcome</title>", "text/plain"),
        (b'{"data": {}}', "text/plain"),
        (b"all is well", "text/html"),
        (b"this is nobody's metrics page", "text/plain"),
    ],
)
async def test_a_page_that_is_no_metrics_is_known_as_such(body: bytes, kind: str) -> None:
    async with server() as fake, probing(fake.url) as probe:
        fake.metrics_body, fake.metrics_type = body, kind
        assert (await probe.reading()).odd == {Oddity.NOT_METRICS}


async def test_metrics_of_something_else_are_a_page_without_an_engine() -> None:
    async with server() as fake, probing(fake.url) as probe:
        fake.metrics_body = b"# TYPE go_goroutines gauge\ngo_goroutines 7\n"
        assert await probe.reading() == Reading()


@pytest.mark.parametrize("head", [b"<html>", b"# HELP x y\n"])
async def test_of_a_page_without_an_end_no_more_is_read_than_needed(head: bytes) -> None:
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 200000000\r\n\r\n" + head)
        with contextlib.suppress(OSError):
            while sent < 200_000_000:
                writer.write(b"x" * 65535 + b"\n")
                await writer.drain()
                sent += 65536
        writer.close()

    listener = await asyncio.start_server(pour, "127.0.0.1", 0)
    async with probing(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", 10.0) as probe:
        assert (await probe.reading()).odd == {Oddity.NOT_METRICS}
    listener.close()
    assert sent < 40 << 20  # what lay in buffers, twice: chosen metrics were asked for first


async def test_a_server_that_is_not_ready_is_starting_and_one_that_fails_is_not() -> None:
    async with server() as fake, probing(fake.url) as probe:
        for status, starting in ((503, True), (500, False), (404, False)):
            fake.models_status = status
            with pytest.raises(ProbeFailed) as caught:
                await probe.cards()
            assert caught.value.starting is starting
        fake.models_status, fake.cards = 200, []
        with pytest.raises(ProbeFailed) as caught:
            await probe.cards()
        assert caught.value.starting


async def test_only_a_health_page_that_says_503_is_a_dead_engine() -> None:
    async with server() as fake, probing(fake.url) as probe:
        for status, alive in ((200, True), (404, True), (500, True), (503, False)):
            fake.health_status = status
            assert await probe.alive() is alive


async def test_whether_a_server_sleeps_or_is_paused_is_asked_only_where_it_can_be_told() -> None:
    async with server() as fake, probing(fake.url) as probe:
        for _ in range(2):
            assert not await probe.asleep()
            assert not await probe.paused()
        assert fake.asked == ["/is_sleeping", "/is_paused"]
        probe.forget()
        fake.says = {"/is_sleeping": {"is_sleeping": True}, "/is_paused": {"is_paused": True}}
        assert await probe.asleep()
        assert await probe.paused()
        fake.says = {"/is_sleeping": {"is_sleeping": False}, "/is_paused": {"is_paused": 7}}
        assert not await probe.asleep()
        assert not await probe.paused()
