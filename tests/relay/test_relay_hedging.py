"""Hedging: who is sent twice and when, who wins, and that only one of two attempts shows in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_house import BLOCKS, COMPLETION, SIZE, House, asking, completion, house, wire_of
from relay_wires import CHUNKED, DONE, LAST, Server, Wire, chunk, event, sends, serving

from gateway.config import RelaySettings
from gateway.relay.hedge import LEAST_REMEMBERED, FirstBytes, HedgePolicy, may_be_sent_twice
from gateway.types import Ask, ChatPrompt, Dialect, Need, TextPrompts, TokenPrompts

USAGE = chunk(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n')


def says(text: str) -> tuple[bytes, ...]:
    """A stream that says who it comes from."""
    return (CHUNKED + event(text) + LAST + USAGE + DONE,)


async def send(gateway: House, **more: Any) -> Wire:
    """A stream's request, to its end."""
    wire = wire_of(completion(True, stream_options={"include_usage": True}, **more))
    async with asyncio.timeout(10):
        await asking(gateway, wire)
    return wire


@contextlib.asynccontextmanager
async def two(
    first: tuple[Any, ...], second: tuple[Any, ...], **relay: Any
) -> AsyncIterator[tuple[House, Server, Server]]:
    """A gateway that hedges after 20 ms, before two servers, the first of which is asked first."""
    settings = {"hedge": "fixed", "hedge_after_s": 0.02, "hedge_share": 1.0} | relay
    async with (
        serving(sends(*first)) as one,
        serving(sends(*second)) as other,
        house([one.url, other.url], relay=settings) as gateway,
    ):
        gateway.backends[1].settings = gateway.backends[1].settings.model_copy(update={"weight": 0.01})
        gateway.revive()
        yield gateway, one, other
        assert not await gateway.settled()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def header_of(wire: Wire, name: str) -> str | None:
    return next((value.decode() for key, value in wire.sent[0]["headers"] if key == name.encode()), None)


def outcomes(gateway: House) -> dict[str, float]:
    samples = [s for family in gateway.app.metrics.hedges.collect() for s in family.samples]
    return {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total") and s.value}


def denied(gateway: House) -> dict[str, float]:
    samples = [s for family in gateway.app.metrics.hedges_denied.collect() for s in family.samples]
    return {s.labels["reason"]: s.value for s in samples if s.name.endswith("_total") and s.value}


async def test_a_second_backend_that_begins_first_is_relayed_and_the_first_is_broken_off() -> None:
    async with two((None,), says("second")) as (gateway, first, second):
        wire = await send(gateway)
        async with asyncio.timeout(2):
            await first.closed.wait()
        assert wire.body.count(b'"content":"second"') == 1
        assert wire.body.endswith(b"data: [DONE]\n\n")
        assert header_of(wire, "x-kvgate-backend") == gateway.backends[1].name
        assert header_of(wire, "x-kvgate-hedge") == "won"
        assert outcomes(gateway) == {"won": 1}
        assert (len(first.requests), len(second.requests)) == (1, 1)
        assert first.requests[0].partition(b"\r\n\r\n")[2] == second.requests[0].partition(b"\r\n\r\n")[2]


async def test_a_first_backend_that_begins_after_all_is_relayed_and_the_second_is_broken_off() -> None:
    asked = asyncio.Event()
    async with two((asked, *says("first")), (asked.set, None)) as (gateway, _, second):
        wire = await send(gateway)
        async with asyncio.timeout(2):
            await second.closed.wait()
        assert b'"content":"first"' in wire.body
        assert header_of(wire, "x-kvgate-hedge") == "lost"
        assert outcomes(gateway) == {"lost": 1}


async def test_an_answer_in_time_is_not_hedged() -> None:
    async with two(says("first"), says("second"), hedge_after_s=5.0) as (gateway, _, second):
        wire = await send(gateway)
        assert header_of(wire, "x-kvgate-hedge") is None
        assert not second.requests
        assert outcomes(gateway) == denied(gateway) == {}


async def test_usage_is_counted_once_and_of_who_was_relayed() -> None:
    """The other answers as well, at the same time."""
    asked = asyncio.Event()
    async with two((asked, *says("first")), (asked.set, *says("second"))) as (gateway, _, _):
        await send(gateway)
        assert gateway.total("kvgate_prompt_tokens_total") == 3
        assert gateway.total("kvgate_output_tokens_total") == 2
        assert gateway.total("kvgate_count_checks_total") == 1
        assert gateway.total("kvgate_requests_total") == 1


async def test_what_the_loser_held_is_free_while_the_winner_still_streams() -> None:
    go_on = asyncio.Event()
    async with two((None,), (CHUNKED + event("second"), go_on, LAST + DONE)) as (gateway, first, _):
        task = asyncio.create_task(send(gateway))
        async with asyncio.timeout(5):
            await first.closed.wait()
        assert [backend.engines.in_flight for backend in gateway.backends] == [0, 1]
        assert gateway.app.gate.stats()["leases"] == 1
        go_on.set()
        assert (await task).body.endswith(b"data: [DONE]\n\n")


async def test_a_status_without_a_byte_is_not_yet_an_answer() -> None:
    """vLLM sends the status of a stream before it has begun to work on it."""
    async with two((CHUNKED, None), says("second")) as (gateway, _, _):
        assert b'"content":"second"' in (await send(gateway)).body


async def test_nobody_waits_for_a_second_place() -> None:
    refused = asyncio.Event()
    async with two((refused, *says("first")), says("second")) as (gateway, _, second):
        held = gateway.backends[1].reserve(Need(BLOCKS * SIZE, 0), None)
        task = asyncio.create_task(send(gateway))
        await until(lambda: denied(gateway) == {"no_room": 1})
        refused.set()
        assert b'"content":"first"' in (await task).body
        held.release()
        assert not second.requests
        assert gateway.app.gate.stats()["queued_requests"] == 0


async def test_no_backend_that_is_being_tried_gets_a_second_attempt() -> None:
    refused = asyncio.Event()
    async with two((refused, *says("first")), says("second")) as (gateway, _, second):
        breaker = gateway.backends[1].availability.breaker
        for _ in range(3):
            breaker.failed(-100.0)
        gateway.backends[1].touched()
        task = asyncio.create_task(send(gateway))
        await until(lambda: denied(gateway) == {"no_room": 1})
        refused.set()
        await task
        assert not second.requests


async def test_no_more_than_a_share_of_the_requests_is_sent_twice() -> None:
    async with two((None,), says("second"), hedge_share=0.01) as (gateway, _, _):
        for _ in range(10):
            await send(gateway)
        waiting = asyncio.create_task(send(gateway))
        await until(lambda: denied(gateway) == {"budget": 1})
        assert outcomes(gateway) == {"won": 10}
        waiting.cancel()
        await waiting


async def test_a_first_attempt_that_fails_leaves_the_second_running() -> None:
    asked, failed = asyncio.Event(), asyncio.Event()
    async with two((asked,), (asked.set, failed, *says("second"))) as (gateway, _, second):
        task = asyncio.create_task(send(gateway))
        await until(lambda: gateway.backends[0].availability.breaker.failures == 1)
        failed.set()
        wire = await task
        assert b'"content":"second"' in wire.body
        assert len(second.requests) == 1  # it is no retry
        assert gateway.backends[1].availability.breaker.failures == 0
        assert gateway.total("kvgate_retries_total") == 0


async def test_a_second_attempt_that_fails_leaves_the_first_running() -> None:
    failed = asyncio.Event()
    async with two((failed, *says("first")), ()) as (gateway, _, second):
        task = asyncio.create_task(send(gateway))
        await until(lambda: gateway.backends[1].availability.breaker.failures == 1)
        failed.set()
        assert b'"content":"first"' in (await task).body
        assert len(second.requests) == 1
        assert outcomes(gateway) == {"lost": 1}


async def test_a_refusal_of_the_second_is_not_believed() -> None:
    refusal = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    asked = asyncio.Event()
    async with two((asked, 0.1, *says("first")), (refusal, asked.set)) as (gateway, _, _):
        wire = await send(gateway)
        assert wire.status == 200
        assert b'"content":"first"' in wire.body


async def test_if_both_fail_the_request_has_failed_on_both() -> None:
    asked = asyncio.Event()
    async with two((asked,), (asked.set, 0.05)) as (gateway, first, second):
        wire = await send(gateway)
        assert wire.status == 502
        assert outcomes(gateway) == {"failed": 1}
        assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_without_a_second_place_the_status_is_told_as_ever() -> None:
    """It is held for a first byte no longer than without hedging, and told with the backend's name."""
    go_on = asyncio.Event()
    async with two((CHUNKED, go_on, event("a") + LAST + DONE), (), hold_headers_s=0.1) as (gateway, _, _):
        held = gateway.backends[1].reserve(Need(BLOCKS * SIZE, 0), None)
        wire = wire_of(completion(True))
        task = asyncio.create_task(asking(gateway, wire))
        await until(lambda: wire.status == 200)
        assert header_of(wire, "x-kvgate-backend") == gateway.backends[0].name
        go_on.set()
        await task
        held.release()
        assert wire.body.endswith(b"data: [DONE]\n\n")


async def test_a_whole_answer_is_never_hedged() -> None:
    async with two((0.06, COMPLETION), (COMPLETION,)) as (gateway, _, second):
        wire = wire_of(completion(False))
        await asking(gateway, wire)
        assert wire.status == 200
        assert not second.requests


async def test_the_learned_wait_follows_what_the_backend_lets_expect() -> None:
    """Streams of a few milliseconds teach it; then one that takes far longer is sent to the second backend."""
    relay = {"hedge": "learned", "hedge_after_s": 0.01}
    async with two(says("first"), says("second"), **relay) as (gateway, _, second):
        for number in range(LEAST_REMEMBERED + 10):
            await send(gateway, prompt=[number] * 200)
        assert not second.requests
        policy = gateway.app.serving._hedger.policy
        first = gateway.backends[0].reserve(Need(200, 8), None, timed=True)
        wait_s = policy.delay_s(ask(), first.expected_first_byte_s)
        first.release()
        assert wait_s is not None
        assert 0.01 <= wait_s < 5.0


def ask(**more: Any) -> Ask:
    fields: dict[str, Any] = {
        "dialect": Dialect.CHAT, "path": "/v1/chat/completions", "model": "m", "prompt": ChatPrompt([]), "body": b"",
        "document": {}, "stream": True,
    }  # fmt: skip
    return Ask(**(fields | more))


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.MESSAGES])
def test_a_plain_stream_may_be_sent_twice(dialect: Dialect) -> None:
    assert may_be_sent_twice(ask(dialect=dialect))


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"n": 2},
        {"counted": False},
        {"dialect": Dialect.POOLING},
        {"dialect": Dialect.OTHER},
        {"prompt": TextPrompts(("a", "b"))},
        {"prompt": TokenPrompts((3, 4))},
        {"document": {"kv_transfer_params": {"do_remote_decode": True}}},
        {"dialect": Dialect.RESPONSES, "document": {}},  # stored unless told otherwise
        {"dialect": Dialect.RESPONSES, "document": {"store": True}},
        {"dialect": Dialect.RESPONSES, "document": {"store": False, "background": True}},
        {"dialect": Dialect.RESPONSES, "document": {"store": False, "previous_response_id": "resp_1"}},
    ],
)
def test_what_costs_more_or_leaves_something_behind_may_not(fields: dict[str, Any]) -> None:
    assert not may_be_sent_twice(ask(**fields))


def test_a_response_that_is_not_stored_may() -> None:
    assert may_be_sent_twice(ask(dialect=Dialect.RESPONSES, document={"store": False}))


def test_nothing_is_overdue_before_enough_was_seen() -> None:
    policy = HedgePolicy(RelaySettings(hedge="learned", hedge_after_s=0.1))
    for _ in range(LEAST_REMEMBERED - 1):
        policy.note(1.0, 1.1)
    assert policy.delay_s(ask(), 1.0) is None
    policy.note(1.0, 1.1)
    assert policy.delay_s(ask(), 1.0) == pytest.approx(1.1)
    assert policy.delay_s(ask(), 4.0) == pytest.approx(4.4)  # a prompt four times as long
    assert policy.delay_s(ask(), None) is None
    assert policy.delay_s(ask(), 0.0) == pytest.approx(0.1)  # never sooner than hedge_after_s


def test_too_late_is_never() -> None:
    policy = HedgePolicy(RelaySettings(hedge="fixed", hedge_after_s=2.0, hold_headers_s=2.0))
    assert policy.delay_s(ask(), 1.0) is None
    assert HedgePolicy(RelaySettings(hedge="fixed", hedge_after_s=1.9, hold_headers_s=2.0)).delay_s(ask(), None) == 1.9


def test_switched_off_it_never_is() -> None:
    policy = HedgePolicy(RelaySettings())
    assert not policy.on
    assert policy.delay_s(ask(), 1.0) is None


@given(st.integers(), st.sampled_from([0.5, 0.9, 0.95]))
def test_about_as_many_as_the_quantile_says_begin_in_time(seed: int, quantile: float) -> None:
    random = Random(seed)
    ratios = [random.lognormvariate(0.0, 1.0) for _ in range(700)]
    first_bytes = FirstBytes(quantile)
    for ratio in ratios:
        first_bytes.note(1.0, ratio)
    longest_s = first_bytes.longest_s(1.0)
    assert longest_s is not None
    recent = ratios[-544:]  # what was remembered when the quantile was last taken is among these
    late = sum(ratio > longest_s for ratio in recent)
    assert late <= (1 - quantile) * 512 + 33
