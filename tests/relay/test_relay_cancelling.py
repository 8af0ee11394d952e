"""One request, cancelled at every await of its way in turn: nothing of it is left in the gateway, ever.

In the manner of httpcore's ``test_cancellations``, over the whole gateway and real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from relay_house import BLOCKS, COMPLETION, HOWS, MODEL, SIZE, House, cancelled_at, completion, house, json_answer
from relay_wires import CHUNKED, DONE, LAST, Answer, Server, event, sends, serving

from gateway.types import Need

MOST_AWAITS = 400

Hold = Callable[[House], None]


def busy_for(seconds: float) -> Hold:
    """All room is taken for so long."""

    def hold(built: House) -> None:
        loop = asyncio.get_running_loop()
        for backend in built.backends:
            held = backend.reserve(Need(BLOCKS * SIZE, 0), None)
            loop.call_later(seconds, held.release)
        loop.call_later(seconds, built.app.gate.wake)

    return hold


def lost_after(seconds: float) -> Hold:
    """The first server is frozen, and known to be after so long."""
    return lambda built: built.lose_later(seconds)


def nothing(_: House) -> None:
    """There is room."""


STREAM = (CHUNKED + event("a"), 0.002, event("b") + LAST + DONE)
OVERFLOW = json_answer(
    {
        "object": "error",
        "message": "This model's maximum context length is 2 tokens. However, you requested 3 tokens in the messages.",
        "type": "BadRequestError",
        "code": 400,
    },
    b"400 Bad Request",
)
CHAT = json_answer(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "b"}, "finish_reason": "stop"}],
    }
)
SUMMARY = json_answer({"choices": [{"message": {"role": "assistant", "content": "It was about words."}}]})
UNAVAILABLE = json_answer({"error": {"message": "busy"}}, b"503 Service Unavailable")

FIXED = {"relay": {"hedge": "fixed", "hedge_after_s": 0.004, "hedge_share": 1.0}}
TOLD = {"relay": {"hold_headers_s": 0.002, "keepalive_s": 0.004}}
KEPT = {"placing": {"keepalive_after_s": 0.002}, "relay": {"keepalive_s": 0.002}}

# What each of two servers does, the settings, whether a stream is asked for, and what stands in the way.
WAYS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any], bool, Hold]] = {
    "at once": ((COMPLETION,), (COMPLETION,), {}, False, nothing),
    "a stream": (STREAM, STREAM, {}, True, nothing),
    "after a wait": ((COMPLETION,), (COMPLETION,), {}, False, busy_for(0.006)),
    "a stream opened while it waits": (STREAM, STREAM, KEPT, True, busy_for(0.012)),
    "a retry": ((), STREAM, {}, True, nothing),
    "a retry of what is not streamed": ((UNAVAILABLE,), (COMPLETION,), {}, False, nothing),
    "a refusal by the server": ((OVERFLOW,), (OVERFLOW,), {}, False, nothing),
    "a server that breaks off": ((CHUNKED + event("a"),), (CHUNKED + event("a"),), {}, True, nothing),
    "a hedge that wins": ((None,), STREAM, FIXED, True, nothing),
    "a hedge that loses": ((0.008, *STREAM), (None,), FIXED, True, nothing),
    "a hedge after the status": ((CHUNKED, None), STREAM, FIXED, True, nothing),
    "a hedge whose first attempt fails": ((0.008,), (0.004, *STREAM), FIXED, True, nothing),
    "a hedge of which both fail": ((0.008,), (0.002,), FIXED, True, nothing),
    "a server lost before the status": ((None,), STREAM, {}, True, lost_after(0.006)),
    "a server lost before the first byte": ((CHUNKED, None), STREAM, {}, True, lost_after(0.006)),
    "a server lost after its status was told": ((CHUNKED, None), STREAM, TOLD, True, lost_after(0.03)),
    "a server lost before a whole answer": ((None,), (COMPLETION,), {}, False, lost_after(0.006)),
    "a server lost in the middle": ((CHUNKED + event("a"), None), STREAM, {}, True, lost_after(0.03)),
    "a server lost while a hedge runs": ((None,), (0.04, *STREAM), FIXED, True, lost_after(0.03)),
}

FAILING = (
    "a refusal by the server",
    "a server that breaks off",
    "a hedge of which both fail",
    "a server lost in the middle",
)


@contextlib.asynccontextmanager
async def built(way: str) -> AsyncIterator[House]:
    """A gateway before two servers; the first is always asked first."""
    one, two, settings, _, _ = WAYS[way]

    def make(parts: tuple[Any, ...]) -> Callable[[Server], Answer]:
        return sends(*parts) if parts else sends(b"")

    async with (
        serving(make(one)) as first,
        serving(make(two)) as second,
        house([first.url, second.url], **settings) as gateway,
    ):
        gateway.backends[1].settings = gateway.backends[1].settings.model_copy(update={"weight": 0.01})
        yield gateway


def conversation(salt: int) -> bytes:
    """A chat of some 5,000 tokens in small turns, no two of them alike: more than the window holds."""
    texts = [" ".join(f"word{salt}x{turn}y{number}" for number in range(40)) for turn in range(20)]
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    messages.append({"role": "user", "content": "Go on."})
    return orjson.dumps({"model": MODEL, "messages": messages, "max_tokens": 64})


@pytest.mark.parametrize("how", HOWS)
async def test_a_request_cancelled_while_it_is_trimmed_and_summed_up_leaves_nothing_behind(
    how: str, model_folder: Path
) -> None:
    """Its middle is dropped, and a summary of that is asked for, which others may wait for, too."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with serving(sends(CHAT)) as server, serving(sends(0.002, SUMMARY)) as writer:
        overflow = {"policy": "trim", "ladder": ("turns",), "summary_model": "s", "summary_url": writer.url}
        models = {MODEL: {"tokenizer": str(model_folder)}}
        async with house([server.url], overflow=overflow, models=models) as gateway:
            app = gateway.app
            await app.counter.warm(app.fitter.served(app.fleet.resolve(MODEL)))  # before that its size is estimated
            at = 0
            while True:
                gateway.revive()
                count, wire = await cancelled_at(gateway, conversation(at), at, how, "/v1/chat/completions")
                held = await gateway.settled()
                assert not held, f"cancelled at await {at} of {count}: {held}"
                assert not gateway.app.summariser._running
                if at >= count:
                    break
                at += 1
                assert at < MOST_AWAITS
            assert wire.status == 200
            assert gateway.total("kvgate_trims_total") > 0
            assert writer.requests
    gc.collect()
    assert not complaints


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_request_cancelled_at_any_await_leaves_nothing_behind(way: str, how: str) -> None:
    _, _, _, stream, hold = WAYS[way]
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with built(way) as gateway:
        at, answered, opened = 0, 0, False
        while True:
            gateway.revive()
            hold(gateway)
            settled = gateway.total("kvgate_requests_total")
            count, wire = await cancelled_at(gateway, completion(stream), at, how)
            held = await gateway.settled()
            assert not held, f"cancelled at await {at} of {count}: {held}"
            assert gateway.total("kvgate_requests_total") == settled + 1
            answered += wire.complete
            opened = opened or b": keep-alive" in wire.body
            if at >= count:
                break
            at += 1
            assert at < MOST_AWAITS
        gc.collect()  # what nobody refers to tells now that it was never awaited, closed or asked for its exception
        assert not complaints
        whole = b"error" not in wire.body
        assert whole == (way not in FAILING)
        if "wait" in way:
            assert gateway.app.gate.stats()["queued_requests"] > 0
        if "opened" in way:
            assert opened
        assert answered  # the last was not cancelled at all
        assert gateway.total("kvgate_queue_requests") == gateway.total("kvgate_requests_in_flight") == 0
        if "hedge" in way:
            assert gateway.total("kvgate_hedges_total") > 0
