"""Backends that cannot be reached: why, in the log, on the status page, and to who asks for what they might serve."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
from fleet_server import card, eventually, server, watching

from gateway.config import BackendSettings, Settings
from gateway.exceptions import NoBackend, UnknownModel
from gateway.fleet import looking
from gateway.fleet.discovery import Probe, ProbeFailed
from gateway.fleet.fleet import Fleet
from gateway.fleet.looking import Looker, shown_url
from gateway.fleet.unreachable import HOST, LISTENS, NETWORK, SCHEME, SERVER, SILENT, cause_of
from gateway.types import Condition, Health


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.asynccontextmanager
async def hanging_up() -> AsyncIterator[str]:
    """A server that takes connections and says nothing."""

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = await asyncio.start_server(end, "127.0.0.1", 0)
    yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()


async def failure(url: str) -> ProbeFailed:
    probe = Probe(BackendSettings(url=url), timeout_s=0.5)
    try:
        with pytest.raises(ProbeFailed) as caught:
            await probe.cards()
        return caught.value
    finally:
        await probe.close()


async def test_a_failure_says_what_it_is_and_what_to_check() -> None:
    refused = await failure(f"http://localhost:{free_port()}")
    assert (str(refused), refused.check, refused.refused) == ("cannot connect: connection refused", LISTENS, True)
    nameless = await failure("http://gpu.invalid:8000")
    assert str(nameless).startswith("cannot connect: host not found, ")
    assert (nameless.check, nameless.refused) == (HOST, True)
    async with hanging_up() as place:
        plain = await failure(f"http://{place}")
        assert (plain.check, plain.refused) == (SCHEME, False)
        crypted = await failure(f"https://{place}")
        assert str(crypted).startswith("cannot connect: TLS failed")
        assert (crypted.check, crypted.refused) == (SCHEME, False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = await failure(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert (str(mute), mute.check) == ("/v1/models did not answer within 0.5 s", SILENT)
    async with server() as fake:
        fake.models_status = 404
        strange = await failure(fake.url)
        assert (str(strange), strange.check) == ("/v1/models answered 404", SERVER)


def test_the_cause_is_what_lies_under_the_words_of_the_clients() -> None:
    def wrapped(cause: BaseException) -> BaseException:
        error = OSError("All connection attempts failed")
        error.__cause__ = cause
        return error

    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed")
    assert cause_of(wrapped(refused)).words == "connection refused"
    assert cause_of(wrapped(ExceptionGroup("several", [refused, refused]))).words == "connection refused"
    gone = OSError(errno.EHOSTUNREACH, "No route to host")
    assert (cause_of(gone).silent, cause_of(refused).silent) == (True, False)
    assert (cause_of(wrapped(gone)).words, cause_of(wrapped(gone)).check) == ("no route to host", NETWORK)
    odd = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    assert cause_of(wrapped(odd)).may_come is False
    assert cause_of(wrapped(ValueError())).words == "All connection attempts failed"
    assert cause_of(ValueError()).words == "ValueError"
    loop = OSError("round")
    loop.__cause__ = loop.__context__ = wrapped(loop)
    assert cause_of(loop).words == "round"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_the_log_says_at_start_which_backend_is_not_there_and_what_to_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with server() as fake:
        await fake.stop()
        async with watching(fake.url, scrape_interval_s=0.02) as fleet:
            assert warnings(caplog) == [
                f"backend {fake.name}: cannot connect: connection refused ({fake.url}). {LISTENS} "
                "It joins as soon as it answers."
            ]
            await eventually(lambda: len(warnings(caplog)) == 1 and fleet.records()[0].error is not None)
            await fake.start()
            await eventually(fleet.ready)
        assert len(warnings(caplog)) == 1


async def test_another_reason_is_told_too_and_each_but_once(caplog: pytest.LogCaptureFixture) -> None:
    async with server() as fake:
        fake.models_status = 401
        async with watching(fake.url, scrape_interval_s=0.02) as fleet:
            for status in (404, 401, 404, 500):
                fake.models_status = status
                await eventually(lambda: f"answered {fake.models_status}" in (fleet.records()[0].error or ""))
        assert [line.split(": ", 1)[1].split(" (")[0] for line in warnings(caplog)] == [
            "/v1/models answered 401: set the backend's api_key",
            "/v1/models answered 404",
            "/v1/models answered 500",
        ]


async def test_who_was_taken_for_loading_too_long_is_down_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watching(f"http://127.0.0.1:{free_port()}", scrape_interval_s=0.02) as fleet:
        assert fleet.records()[0].condition is Condition.STARTING
        monkeypatch.setattr(looking, "START_S", 0.0)
        await eventually(lambda: fleet.records()[0].condition is Condition.DOWN)
        assert "taken for down" in warnings(caplog)[-1]
        said = len(warnings(caplog))
        await asyncio.sleep(0.1)
        assert len(warnings(caplog)) == said


async def test_a_look_that_breaks_leaves_nobody_waiting_for_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: Looker) -> None:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(Looker, "look", broken)
    async with watching(f"http://127.0.0.1:{free_port()}") as fleet:
        (record,) = fleet.records()
        assert record.health is Health.DOWN
        assert record.error == "looking at it failed: RuntimeError: what nobody thought of"


async def test_who_asks_while_no_backend_has_answered_is_told_why() -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(6)]
    async with watching(*urls) as fleet:
        with pytest.raises(NoBackend) as caught:
            fleet.resolve("m")
    place = urls[0].removeprefix("http://")
    assert f"No backend has said yet what it serves: {place} (cannot connect: connection refused), " in str(
        caught.value
    )
    assert "2 more. Try again" in str(caught.value)


async def test_before_the_first_look_nothing_is_known_of_anybody() -> None:
    fleet = Fleet(Settings(backends=["http://127.0.0.1:9"]), lambda: None)
    with pytest.raises(NoBackend, match=r"127\.0\.0\.1:9 \(not looked at yet\)"):
        fleet.resolve("m")


async def test_a_server_that_states_no_window_is_said_to() -> None:
    async with server() as fake:
        fake.cards = [card("m", None)]
        async with watching(fake.url) as fleet:
            with pytest.raises(NoBackend, match="states no max_model_len"):
                fleet.resolve("m")


async def test_a_model_that_a_loading_backend_may_serve_is_worth_another_try_and_one_of_a_dead_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with server() as fake:
        fake.cards = [card("m", 4096)]
        lost = f"127.0.0.1:{free_port()}"
        async with watching(fake.url, f"http://{lost}", scrape_interval_s=0.02) as fleet:
            with pytest.raises(NoBackend) as caught:
                fleet.resolve("other")
            assert str(caught.value) == (
                f"The model `other` is not among those served now (m). Not heard from yet: {lost} (cannot connect: "
                "connection refused). Try again in a few seconds."
            )
            monkeypatch.setattr(looking, "START_S", 0.0)
            await eventually(lambda: fleet.records()[1].condition is Condition.DOWN)
            with pytest.raises(UnknownModel, match=f"models: m. Not heard from yet: {lost}"):
                fleet.resolve("other")
            assert fleet.resolve("m").backends == (fake.name,)


def test_a_password_in_a_url_is_not_shown() -> None:
    assert shown_url("https://me:secret@gpu1:8000/x") == "https://gpu1:8000/x"
