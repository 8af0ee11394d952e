"""KV events over real sockets: gaps are filled or owned up to, another publisher is noticed, nonsense does no harm."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from kv_publisher import SIZE, listening, publishing, removed, stored

from gateway.fleet.kvevents import subscriber as module
from gateway.fleet.kvevents.wire import MOST_PAYLOAD_BYTES
from gateway.routing.feeds import Knowledge


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.3)
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    monkeypatch.setattr(module, "REPLAY_PAUSE_S", 0.3)
    monkeypatch.setattr(module, "LOST_S", 0.2)


async def test_events_are_taken_in_as_they_come() -> None:
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1), stored(2))
        publisher.send(removed(1))
        await heard.until(lambda: heard.has(2) and heard.feed.knowledge is Knowledge.EXACT)
        assert (heard.tally.messages, heard.tally.events, heard.tally.gaps) == (2, 3, 0)
        assert heard.subscriber.lag_s is not None and heard.subscriber.lag_s < 5


async def test_who_comes_late_asks_for_all_that_is_kept() -> None:
    async with publishing() as publisher:
        for number in range(20):
            publisher.send(stored(number))
        async with listening(publisher.source) as heard:
            await heard.until(lambda: heard.has(*range(20)) and heard.feed.knowledge is Knowledge.EXACT)
            assert publisher.asked[0] == 0


async def test_who_comes_too_late_knows_a_part() -> None:
    async with publishing(keep=3) as publisher:
        for number in range(20):
            publisher.send(stored(number))
        async with listening(publisher.source) as heard:
            await heard.until(lambda: heard.has(17, 18, 19))
            assert heard.feed.knowledge is Knowledge.PARTIAL
            publisher.send({"type": "AllBlocksCleared"})
            await heard.until(lambda: heard.feed.knowledge is Knowledge.EXACT)
            assert heard.has()


async def test_without_replays_only_a_first_message_tells_all() -> None:
    async with publishing(replays=False) as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        await heard.until(lambda: heard.has(1) and heard.feed.knowledge is Knowledge.EXACT)
    async with publishing(replays=False) as publisher:
        publisher.send(stored(1))
        async with listening(publisher.source) as heard:
            publisher.send(stored(2))
            await heard.until(lambda: heard.has(2))
            assert heard.feed.knowledge is Knowledge.PARTIAL


async def test_a_gap_is_filled_by_a_replay() -> None:
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        publisher.send(stored(2), heard=False)
        publisher.send(removed(1), heard=False)
        publisher.send(stored(3))
        await heard.until(lambda: heard.has(2, 3))
        assert (heard.tally.gaps, heard.tally.lost) == (1, 0)
        assert heard.feed.knowledge is Knowledge.EXACT


async def test_a_replay_with_holes_is_asked_on() -> None:
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        for number in range(2, 30):
            publisher.send(stored(number), heard=False)
        publisher.skip = {9, 20}
        publisher.send(stored(30))
        await heard.until(lambda: heard.has(*range(1, 31)) and heard.feed.knowledge is Knowledge.EXACT)
        assert heard.tally.lost == 0


async def test_a_gap_that_is_not_kept_any_more_is_owned_up_to(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing(keep=2) as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        await heard.until(lambda: heard.has(1))
        with caplog.at_level(logging.INFO):
            for number in range(2, 9):
                publisher.send(stored(number), heard=number == 8)
            await heard.until(lambda: heard.has(7, 8))
        assert heard.tally.lost == 1
        assert heard.feed.knowledge is Knowledge.PARTIAL
        assert "messages 1 to 5 are lost" in caplog.text


async def test_a_gap_without_replays_is_owned_up_to() -> None:
    async with publishing(replays=False) as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        publisher.send(stored(2), heard=False)
        publisher.send(stored(3))
        await heard.until(lambda: heard.has(3))
        assert (heard.tally.gaps, heard.tally.lost) == (1, 1)
        assert heard.feed.knowledge is Knowledge.PARTIAL


async def test_gaps_that_follow_each_other_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvgate.fleet.kvevents")
    async with publishing(replays=False) as publisher, listening(publisher.source) as heard:
        publisher.send(stored(0))
        for number in range(1, 21):
            publisher.send(stored(100 + number), heard=False)
            publisher.send(stored(number))
        await heard.until(lambda: heard.tally.lost == 20)
    assert len([line for line in caplog.messages if "forgotten" in line]) == 1


async def test_a_lost_end_is_found_when_nothing_comes() -> None:
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        publisher.send(stored(2), heard=False)
        await heard.until(lambda: heard.has(1, 2))


@pytest.mark.parametrize("replays", [True, False])
async def test_another_publisher_is_noticed_by_its_numbers(replays: bool) -> None:
    async with publishing(replays) as publisher, listening(publisher.source) as heard:
        for number in range(1, 6):
            publisher.send(stored(number))
        await heard.until(lambda: heard.has(1, 2, 3, 4, 5))
        publisher.restart()
        publisher.send(stored(6))
        await heard.until(lambda: heard.has(6) and heard.feed.knowledge is Knowledge.EXACT)
        assert heard.tally.restarts == 1


async def test_another_publisher_is_noticed_though_its_numbers_are_higher() -> None:
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        await heard.until(lambda: heard.has(1))
        publisher.restart()
        for number in range(2, 9):
            publisher.send(stored(number), heard=False)
        await heard.until(lambda: heard.has(*range(2, 9)))
        assert heard.tally.restarts == 1


async def test_another_publisher_that_has_said_nothing_is_noticed() -> None:
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        await heard.until(lambda: heard.has(1))
        publisher.restart()
        await heard.until(lambda: heard.has() and heard.feed.knowledge is Knowledge.EXACT)
        assert heard.tally.restarts == 1


async def test_nonsense_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    nonsense: list[list[bytes]] = [
        [b""],
        [b"", b"12", b""],
        [b"", (1).to_bytes(8, "big"), b"\xc1\x00garbage"],
        [b"", (-7).to_bytes(8, "big", signed=True), b"\x93"],
        [b"topic", b"x" * 8, b"y" * 1000, b"z"],
    ]
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        for frames in nonsense * 3:
            publisher.raw(frames)
        publisher.send(stored(2))
        await heard.until(lambda: heard.has(1, 2))
        assert heard.tally.garbled == 15
        assert caplog.text.count("garbled") == 1


async def test_events_of_no_known_kind_are_left_out() -> None:
    odd: list[Any] = [{"type": "BlockMoved"}, 7, ["BlockStored"], {"type": "BlockStored", "block_hashes": [b"x"]}]
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(*odd, stored(1), {"type": "BlockRemoved", "block_hashes": [b"y"], "medium": "CPU"})
        await heard.until(lambda: heard.has(1))
        assert (heard.tally.odd, heard.tally.ignored, heard.tally.events) == (4, 1, 1)


async def test_a_message_beyond_all_measure_is_lost_and_owned_up_to() -> None:
    async with publishing(keep=1) as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        await heard.until(lambda: heard.has(1))
        publisher.send(payload=b"\x00" * (MOST_PAYLOAD_BYTES + 1))
        await heard.until(lambda: not heard.subscriber.connected)  # ZeroMQ hangs up on it
        await heard.until(lambda: heard.subscriber.connected)
        publisher.send(stored(2))
        await heard.until(lambda: heard.has(2))
        assert heard.tally.lost == 1


async def test_a_publisher_that_falls_silent_leaves_nothing_known() -> None:
    async with publishing() as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        await heard.until(lambda: heard.has(1))
        publisher.mute = True
        await heard.until(lambda: heard.feed.knowledge is Knowledge.NONE)
        assert heard.has()
        publisher.mute = False
        await heard.until(lambda: heard.has(1) and heard.feed.knowledge is Knowledge.EXACT)


async def test_without_replays_a_lost_connection_leaves_nothing_known() -> None:
    async with publishing(replays=False) as publisher, listening(publisher.source) as heard:
        publisher.send(stored(1))
        await heard.until(lambda: heard.has(1))
        publisher.pub.close(0)
        await heard.until(lambda: heard.feed.knowledge is Knowledge.NONE)
        assert heard.has()


async def test_nobody_there_is_no_error() -> None:
    async with publishing() as publisher:
        source = publisher.source
    async with listening(source, connected=False) as heard:
        await asyncio.sleep(0.8)
        assert heard.feed.knowledge is not Knowledge.EXACT or heard.has()
        assert not heard.subscriber.connected


async def test_a_flood_does_not_hold_up_the_loop() -> None:
    """Four thousand messages of 16 blocks each, while something else wants its turn every millisecond."""
    async with publishing() as publisher:
        many = [[{**stored(9), "block_hashes": [bytes([2]) * 24 + (16 * n + k).to_bytes(8, "big") for k in range(16)],
                  "token_ids": [n] * SIZE * 16}] for n in range(4000)]  # fmt: skip
        for events in many:
            publisher.send(*events, heard=False)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        async with listening(publisher.source, connected=False) as heard:
            task = asyncio.create_task(others())
            await heard.until(lambda: heard.feed.blocks == 64_000)
            task.cancel()
        assert turns > 10


async def test_leaving_forgets_what_was_heard() -> None:
    async with publishing() as publisher:
        async with listening(publisher.source) as heard:
            publisher.send(stored(1))
            await heard.until(lambda: heard.has(1))
        assert heard.has() and heard.feed.knowledge is Knowledge.NONE
