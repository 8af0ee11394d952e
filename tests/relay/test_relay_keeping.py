"""At the gate a prompt is kept out while conversations are about to return, and time alone lets it in. Virtual time."""

from __future__ import annotations

import asyncio
from math import inf

import pytest
from relay_clock import run
from relay_fleet import MODEL, Grounds

from gateway.config import FleetSettings, PlacingSettings
from gateway.fleet.fleet import Backend
from gateway.relay.gate import Gate
from gateway.relay.lease import Lease
from gateway.types import Wish

TALKED = 3200  # 200 of 1,000 blocks
COLD = 3200


def chain(number: int) -> tuple[tuple[int, int], ...]:
    return ((100 * number + 1, TALKED // 2), (100 * number + 2, TALKED))


class Village:
    """A gate before one backend, where four conversations were until just now and something else runs still."""

    def __init__(self) -> None:
        # No reading ever grows old: nothing but time and the gate's own alarm moves anything.
        self.fleet = Grounds({"a": 1000}, FleetSettings(stale_after_s=1e6))
        self.gate = Gate(self.fleet, PlacingSettings(headroom_ratio=0.0, queue_timeout_s=1000.0))
        self.fleet.gate = self.gate
        self.held: Lease | None = None

    async def enter(self, tokens: int, conversation: int | None = None) -> Lease:
        wish = Wish() if conversation is None else Wish(chain=chain(conversation), streamed=True)
        lease = await self.gate.enter(self.fleet.offers(), tokens, model=MODEL, wish=wish)
        lease.first_byte()
        return lease

    def over(self, lease: Lease) -> None:
        lease.finished(0, None)
        lease.release()

    async def fill(self, tokens: int) -> None:
        """All conversations have their turns; then one prompt of so many tokens stays."""
        for _ in range(8):
            for conversation in range(4):
                self.over(await self.enter(TALKED, conversation))
        self.held = await self.enter(tokens)
        self.gate._placer._rooms["a"].pass_s = inf  # as if one had just been let in all the same

    def kept_out(self) -> int:
        return int(self.gate.stats()["kept_out_requests"])

    def assert_empty(self) -> None:
        stats = self.gate.stats()
        assert [stats[name] for name in ("waiting_requests", "kept_out_requests", "leases")] == [0, 0, 0]
        assert self.gate._alarm is None
        assert self.fleet.in_flight() == 0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_is_kept_out_is_let_in_by_time_alone() -> None:
    async def scenario() -> None:
        village = Village()
        await village.fill(600 * 16)
        assert village.gate.kept_blocks() == {"a": 300}
        cold = asyncio.create_task(village.enter(COLD))
        await settle()
        assert (village.kept_out(), village.gate.stats()["waiting_requests"]) == (1, 1)
        lease = await cold
        assert 30 < lease.waited_s < 40
        assert village.held is not None
        for each in (lease, village.held):
            village.over(each)
        village.assert_empty()

    run(scenario())


def test_who_returns_meanwhile_does_not_wait() -> None:
    async def scenario() -> None:
        village = Village()
        await village.fill(501 * 16)
        cold = asyncio.create_task(village.enter(COLD))
        await settle()
        back = await village.enter(TALKED, 0)
        assert (back.waited_s, village.kept_out()) == (0.0, 1)
        village.over(back)
        assert not (await asyncio.wait({cold}, timeout=5.0))[0]
        assert village.held is not None
        village.over(village.held)  # nobody is there any more: it is let in at once
        await settle()
        village.over(cold.result())
        village.assert_empty()

    run(scenario())


def test_who_is_kept_out_and_hangs_up_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        village = Village()
        await village.fill(600 * 16)
        cold = asyncio.create_task(village.enter(COLD))
        await asyncio.sleep(2.5)
        assert village.kept_out() == 1
        cold.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cold
        await settle()
        assert village.held is not None
        village.over(village.held)
        village.assert_empty()
        assert village.gate._placer.next_deadline_s() is None

    run(scenario())


def test_what_an_answer_leaves_is_as_fresh_as_its_end_however_long_nobody_asked_anything() -> None:
    async def scenario() -> None:
        village = Village()
        await village.fill(16)
        lease = await village.enter(TALKED, 0)
        await asyncio.sleep(400.0)
        assert village.gate.kept_blocks() == {"a": 0}
        village.over(lease)
        assert village.gate.kept_blocks()["a"] > 150  # most of its 200
        await asyncio.sleep(20.0)
        assert 75 < village.gate.kept_blocks()["a"] < 100

    run(scenario())


def test_people_are_told_of_backends_and_not_of_their_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        village = Village()
        places = {"a#0": 100.4, "a#1": 20.3, "b": 0.0}
        monkeypatch.setattr(village.gate._placer, "kept_blocks", lambda now_s: places)
        monkeypatch.setattr(village.fleet, "backend", lambda name: Backend(name.split("#")[0], "", None, None, 0.0))
        assert village.gate.kept_blocks() == {"a": 121, "b": 0}

    run(scenario())


def test_what_was_never_answered_is_not_there_for_anybody() -> None:
    async def scenario() -> None:
        village = Village()
        await village.fill(16)
        await asyncio.sleep(400.0)
        wish = Wish(chain=chain(9), streamed=True)
        lease = await village.gate.enter(village.fleet.offers(), TALKED, model=MODEL, wish=wish)
        lease.release()
        assert village.gate.kept_blocks() == {"a": 0}
        assert village.gate._placer.prefixes.seen(chain(9)) == 0

    run(scenario())


def test_who_returns_and_hangs_up_again_and_again_before_an_answer_takes_nothing_from_the_others() -> None:
    async def scenario() -> None:
        village = Village()
        await village.fill(16)
        assert village.gate.kept_blocks() == {"a": 300}
        for _ in range(10):
            wish = Wish(chain=chain(0), streamed=True)
            lease = await village.gate.enter(village.fleet.offers(), TALKED, model=MODEL, wish=wish)
            lease.release()
        assert village.gate.kept_blocks() == {"a": 300}

    run(scenario())


def test_nor_is_what_others_hold_left_twice() -> None:
    async def scenario() -> None:
        village = Village()
        await village.fill(16)
        await asyncio.sleep(400.0)
        holder = await village.enter(TALKED, 0)
        for _ in range(10):
            wish = Wish(chain=chain(0), streamed=True)
            lease = await village.gate.enter(village.fleet.offers(), TALKED, model=MODEL, wish=wish)
            lease.release()
        assert village.gate.kept_blocks() == {"a": 0}
        village.over(holder)

    run(scenario())
