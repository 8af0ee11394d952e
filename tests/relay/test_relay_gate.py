"""The gate: places at once or in turn, bounds the queue, and whoever leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import FleetSettings, PlacingSettings
from gateway.exceptions import Busy, ContextOverflow, NoBackend
from gateway.fleet.availability import Availability
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.fleet import Backend
from gateway.fleet.ledger import Ledger
from gateway.fleet.rates import Rates
from gateway.fleet.reservation import Reservation
from gateway.fleet.witness import Witness
from gateway.relay.gate import Gate
from gateway.relay.lease import Lease
from gateway.routing.placer import Placer
from gateway.types import BackendView, Decision, Health, Need, Offer, Wish

BLOCKS = 100  # of 16 tokens; a request of FULL tokens fills them all
PLAIN: dict[str, Any] = {"headroom_ratio": 0.0, "expected_output_tokens": 0, "short_first_s": 0.0}
FULL = BLOCKS * 16


class Place:
    """A backend that is only a ledger. ``running`` is what its vLLM says, None as long as nobody asked."""

    def __init__(self) -> None:
        self.ledger = self.engines = Ledger()  # a reservation sees no difference
        self.ledger.set_capacity(KvCapacity(1, BLOCKS, 16))
        self.ledger.begin_scrape()
        self.ledger.reconcile(0, 0.0)
        self.availability = Availability("place", FleetSettings(), lambda: 0.0, lambda: None, lambda: None)
        self.witness = Witness()
        self.rates = Rates()
        self.health = Health.UP
        self.draining = False

    def touched(self) -> None:
        """Nobody is to be told: views are built anew each time."""


class Places:
    """A fleet of places, without sockets or time."""

    def __init__(self, *names: str) -> None:
        self.at = {name: Place() for name in names}
        self.keys = 0

    def views(self, now_s: float) -> Mapping[str, BackendView]:
        return {
            name: BackendView(
                name,
                f"http://{name}",
                place.health,
                {"m": 32768},
                place.ledger.in_flight,
                place.ledger.view(now_s),
                running=place.ledger.in_flight,
                waiting=0,
                draining=place.draining,
            )
            for name, place in self.at.items()
        }

    def changed(self, now_s: float) -> list[BackendView]:
        return list(self.views(now_s).values())

    def reserve(
        self,
        name: str,
        need: Need,
        budget_tokens: int | None,
        cached_tokens: int = 0,
        timed: bool = False,
        chain: tuple[tuple[int, int], ...] = (),
        rank: int | None = None,
        heeded: bool = True,
    ) -> Reservation:
        self.keys += 1
        place: Any = self.at[name]
        place.ledger.reserve(
            self.keys, need.prompt_tokens, need.output_tokens, need.n, budget_tokens, cached_tokens, chain
        )
        return Reservation(place, self.keys)

    def backend(self, name: str) -> Backend:
        return Backend(name, f"http://{name}", None, None, 0.0)

    def empty(self) -> bool:
        return all(
            (place.ledger.in_flight, place.ledger.used_blocks, place.ledger.reserved_blocks) == (0, 0, 0)
            for place in self.at.values()
        )


def gate_of(*names: str, **fields: Any) -> tuple[Gate, Places]:
    places = Places(*(names or ("a",)))
    return Gate(places, PlacingSettings(**(PLAIN | fields))), places


def offers(*names: str) -> tuple[Offer, ...]:
    return tuple(Offer(name, 32768, None, False) for name in names or ("a",))


def chain_of(tokens: int) -> tuple[tuple[int, int], ...]:
    """A prompt that begins as those of seven others do. A hash stands for everything up to its place, so for a length,
    too."""
    shared = 16 * (tokens % 7)
    return tuple((hash((tokens % 7, end)), end) for end in sorted({shared, tokens}) if 0 < end <= tokens)


async def enter(gate: Gate, *names: str, tokens: int = FULL, **fields: Any) -> Lease:
    return await gate.enter(offers(*names), tokens, **fields)


def waiting(gate: Gate) -> int:
    return int(gate.stats()["waiting_requests"])


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def assert_clean(gate: Gate, places: Places) -> None:
    stats = gate.stats()
    assert (stats["waiting_requests"], stats["waiting_bytes"], stats["leases"]) == (0, 0, 0), gate
    assert places.empty()


async def test_with_room_a_request_goes_on_without_a_task_switch() -> None:
    gate, places = gate_of()
    coroutine = enter(gate, tokens=160)
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    lease = stopped.value.value
    assert (lease.backend.name, lease.offer.backend, lease.waited_s) == ("a", "a", 0.0)
    assert places.at["a"].ledger.used_blocks == 10
    lease.first_byte()
    lease.grow(17)
    assert places.at["a"].ledger.used_blocks == 12
    lease.release()
    lease.release()
    assert_clean(gate, places)


async def test_a_full_cache_makes_wait_and_a_release_lets_go_in_order() -> None:
    gate, places = gate_of()
    first = await enter(gate)
    later = [asyncio.create_task(enter(gate, body_bytes=100)) for _ in range(3)]
    await turns()
    stats = gate.stats()
    assert (stats["waiting_requests"], stats["waiting_bytes"]) == (3, 300)
    assert stats["oldest_wait_s"] >= 0
    first.release()
    for task in later:
        lease = await task
        assert lease.waited_s > 0
        assert sum(not other.done() for other in later) == len(later) - later.index(task) - 1
        lease.release()
    assert gate.stats()["queued_requests"] == 3
    assert_clean(gate, places)


async def test_a_small_request_does_not_pass_a_large_one_that_waits() -> None:
    gate, places = gate_of()
    holder = await enter(gate, tokens=800)
    large = asyncio.create_task(enter(gate, tokens=FULL))
    await turns()
    small = asyncio.create_task(enter(gate, tokens=16))
    await turns()
    assert not small.done()
    holder.release()
    (await large).release()
    (await small).release()
    assert_clean(gate, places)


async def test_a_large_request_that_gives_up_lets_the_small_ones_behind_it_pass() -> None:
    gate, places = gate_of()
    holder = await enter(gate, tokens=800)
    large = asyncio.create_task(enter(gate, tokens=FULL))
    await turns()
    small = asyncio.create_task(enter(gate, tokens=16))
    await turns()
    large.cancel()
    (await small).release()
    holder.release()
    assert_clean(gate, places)


async def test_too_many_requests_are_told_to_come_back() -> None:
    gate, places = gate_of(queue_max_requests=2)
    holder = await enter(gate)
    tasks = [asyncio.create_task(enter(gate)) for _ in range(2)]
    await turns()
    with pytest.raises(Busy) as caught:
        await enter(gate)
    assert 1 <= caught.value.retry_after_s <= 59
    assert waiting(gate) == 2
    for task in tasks:
        task.cancel()
    holder.release()
    await turns()
    assert_clean(gate, places)


async def test_too_many_bytes_are_told_to_come_back() -> None:
    gate, places = gate_of(queue_max_bytes=1000)
    holder = await enter(gate, body_bytes=5000)  # placed at once: nothing waits, nothing is bounded
    task = asyncio.create_task(enter(gate, body_bytes=900))
    await turns()
    with pytest.raises(Busy):
        await enter(gate, body_bytes=101)
    assert gate.stats()["waiting_bytes"] == 900
    holder.release()
    (await task).release()
    assert_clean(gate, places)


@pytest.mark.parametrize(
    "bound", [{"queue_max_requests": 10}, {"queue_max_bytes": 1000}, {"queue_max_tokens": 10 * FULL}]
)
async def test_a_key_that_fills_the_queue_keeps_nobody_else_out(bound: dict[str, int]) -> None:
    gate, places = gate_of(**bound)
    held = await enter(gate)

    def sent(key: str, count: int) -> list[asyncio.Task[Lease]]:
        return [asyncio.create_task(enter(gate, wish=Wish(flow=key), body_bytes=100)) for _ in range(count)]

    flood = sent("flood", 12)
    await turns()
    assert [task.done() for task in flood] == [False] * 10 + [True] * 2
    others = sent("one", 8) + sent("two", 8)
    await turns()
    left = [sum(not task.done() for task in tasks) for tasks in (flood, others[:8], others[8:])]
    assert sum(left) == waiting(gate) == 10
    assert max(left) - min(left) <= 1  # as much for each
    assert not any(task.done() for task in flood[: left[0]])  # the first stay
    refused = [task for task in flood + others if task.done()]
    for task in refused:
        with pytest.raises(Busy):
            task.result()
    assert gate.stats()["refused_requests"] == len(refused)
    held.release()
    for done in asyncio.as_completed([task for task in flood + others if task not in refused]):
        (await done).release()
    assert_clean(gate, places)


async def test_a_full_queue_of_one_backend_does_not_keep_others_out() -> None:
    gate, places = gate_of("a", "b", queue_max_requests=1)
    holder = await enter(gate, "a")
    task = asyncio.create_task(enter(gate, "a"))
    await turns()
    (await enter(gate, "b")).release()
    holder.release()
    (await task).release()
    assert_clean(gate, places)


async def test_a_queue_of_none_refuses_what_cannot_go_at_once() -> None:
    gate, places = gate_of(queue_max_requests=0)
    holder = await enter(gate)
    with pytest.raises(Busy):
        await enter(gate)
    holder.release()
    assert_clean(gate, places)


async def test_the_hint_when_to_come_back_follows_the_drain_rate() -> None:
    gate, places = gate_of(queue_max_requests=20)
    lease = await enter(gate)
    tasks = [asyncio.create_task(enter(gate)) for _ in range(20)]
    await turns()
    for task in tasks[:10]:
        await asyncio.sleep(0.02)
        lease.release()
        lease = await task
    rate = gate.stats()["drain_rate"]
    assert 10 < rate < 60
    tasks += [asyncio.create_task(enter(gate)) for _ in range(10)]
    await turns()
    with pytest.raises(Busy) as caught:
        await enter(gate)
    assert caught.value.retry_after_s == pytest.approx(max(1.0, 20 / rate))
    for task in tasks:
        task.cancel()
    lease.release()
    await turns()
    assert_clean(gate, places)


async def test_a_wait_ends_at_its_deadline() -> None:
    gate, places = gate_of(queue_timeout_s=0.05)
    holder = await enter(gate)
    results = await asyncio.gather(*(enter(gate) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [Busy] * 3
    assert gate.stats()["refused_requests"] == 3
    holder.release()
    assert_clean(gate, places)


async def test_deadlines_of_those_behind_are_kept_when_the_first_was_placed() -> None:
    gate, places = gate_of(queue_timeout_s=0.1)
    holder = await enter(gate)
    first = asyncio.create_task(enter(gate))
    await asyncio.sleep(0.03)
    second = asyncio.create_task(enter(gate))
    await turns()
    holder.release()
    lease = await first
    with pytest.raises(Busy):
        await second
    lease.release()
    assert_clean(gate, places)


async def test_when_the_last_backend_goes_down_all_who_wait_are_told() -> None:
    gate, places = gate_of()
    holder = await enter(gate)
    task = asyncio.create_task(enter(gate))
    await turns()
    places.at["a"].health = Health.DOWN
    gate.wake()
    with pytest.raises(NoBackend):
        await task
    with pytest.raises(NoBackend):
        await enter(gate)
    holder.release()
    assert_clean(gate, places)


async def test_a_retry_goes_elsewhere_or_is_refused() -> None:
    gate, places = gate_of("a", "b")
    lease = await enter(gate, "a", "b", tokens=16)
    failed = lease.backend.name
    lease.release()
    again = await enter(gate, "a", "b", tokens=16, excluded=frozenset({failed}))
    assert again.backend.name != failed
    again.release()
    with pytest.raises(NoBackend, match="failed"):
        await enter(gate, "a", "b", excluded=frozenset({"a", "b"}))
    with pytest.raises(NoBackend):
        await gate.enter((), 16)
    assert_clean(gate, places)


async def test_a_prompt_no_cache_can_hold_is_an_overflow_with_its_numbers() -> None:
    gate, places = gate_of()
    with pytest.raises(ContextOverflow) as caught:
        await enter(gate, tokens=FULL + 1)
    assert caught.value.overflow.prompt_tokens == FULL + 1
    assert caught.value.overflow.window_tokens == FULL
    assert_clean(gate, places)


async def test_many_wakes_in_one_turn_cost_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, places = gate_of()
    holder = await enter(gate)
    task = asyncio.create_task(enter(gate))
    await turns()
    looks = []
    changed = places.changed
    monkeypatch.setattr(places, "changed", lambda now_s: looks.append(now_s) or changed(now_s))
    for _ in range(100):
        gate.wake()
    await turns()
    assert len(looks) == 1
    holder.release()
    (await task).release()
    assert_clean(gate, places)


async def test_a_failure_inside_a_decision_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, places = gate_of()

    def broken(now_s: float) -> list[BackendView]:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(places, "changed", broken)
        with pytest.raises(RuntimeError, match="broken"):
            await enter(gate)
    assert_clean(gate, places)


async def test_a_request_placed_before_a_decision_on_another_fails_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``b`` vanishes from the fleet after the views were taken: the arrival on ``a`` has its place by then."""
    gate, places = gate_of("a", "b")
    holder = await enter(gate, "b")
    behind = asyncio.create_task(enter(gate, "b"))
    await turns()

    add = Placer.add

    def late_first(placer: Placer, *what: Any) -> list[Decision]:
        return sorted(add(placer, *what), key=lambda decision: -decision.sequence)

    def without_b(name: str) -> Backend:
        if name == "b":
            raise KeyError(name)
        return Backend(name, f"http://{name}", None, None, 0.0)

    places.at["b"].ledger.release(places.keys)  # there is room on b, and nobody has told the gate
    with monkeypatch.context() as patch:
        patch.setattr(Placer, "add", late_first)
        patch.setattr(places, "backend", without_b)
        with pytest.raises(KeyError):
            await enter(gate, "a")
    assert places.at["a"].ledger.in_flight == 0
    holder.release()
    (await behind).release()
    assert_clean(gate, places)


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("how", ["cancelled", "released then cancelled", "cancelled then released"])
async def test_a_request_cancelled_at_any_await_leaves_nothing_behind(turn: int, how: str) -> None:
    """One holds the place, one waits, one waits behind it. The middle one is cancelled in every turn of the loop."""
    gate, places = gate_of()
    holder = await enter(gate)
    outcome: list[Lease] = []

    async def use() -> None:
        lease = await enter(gate, body_bytes=10)
        try:
            outcome.append(lease)
            lease.first_byte()
            await asyncio.sleep(0)
            lease.grow(5)
            await asyncio.sleep(0)
        finally:
            lease.release()

    task = asyncio.create_task(use())
    behind = asyncio.create_task(use())
    await turns(turn)
    if how == "released then cancelled":
        holder.release()
        task.cancel()
    elif how == "cancelled then released":
        task.cancel()
        holder.release()
    else:
        holder.release()
        await turns(turn)
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    async with asyncio.timeout(2):
        await behind
    assert_clean(gate, places)
    assert all(lease.released for lease in outcome)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nothing_is_left_after_any_interleaving(data: st.DataObject) -> None:
    """Requests of all sizes come, wait, run, fail over, are cancelled; backends go down and come back."""

    async def scenario() -> None:
        gate, places = gate_of("a", "b", queue_max_requests=4, queue_timeout_s=30.0)
        tasks: list[asyncio.Task[None]] = []
        done = asyncio.Event()

        async def use(names: list[str], tokens: int, excluded: frozenset[str], pauses: int) -> None:
            wish = Wish(rank=tokens % 3, flow=str(pauses), session=str(tokens % 5), chain=chain_of(tokens))
            with contextlib.suppress(Busy, NoBackend, ContextOverflow):
                lease = await gate.enter(offers(*names), tokens, 1, 7, excluded, "m", wish)
                try:
                    for _ in range(pauses):
                        lease.first_byte()
                        lease.grow(9)
                        await asyncio.sleep(0)
                    await done.wait()
                    lease.finished(9 * pauses, tokens // 2)
                finally:
                    lease.release()

        for _ in range(data.draw(st.integers(1, 25))):
            step = data.draw(
                st.sampled_from(["arrive", "arrive", "cancel", "health", "turn", "wake", "scrape", "restart"])
            )
            if step == "arrive":
                names = data.draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=2, unique=True))
                excluded = frozenset(data.draw(st.sets(st.sampled_from("ab"), max_size=1)))
                tokens = data.draw(st.integers(0, FULL + 20))
                tasks.append(asyncio.create_task(use(names, tokens, excluded, data.draw(st.integers(0, 3)))))
            elif step == "cancel" and tasks:
                tasks[data.draw(st.integers(0, len(tasks) - 1))].cancel()
            elif step == "health":
                place = places.at[data.draw(st.sampled_from("ab"))]
                place.health = data.draw(st.sampled_from(Health))
                gate.wake()
            elif step == "wake":
                gate.wake()
            elif step == "scrape":
                for place in places.at.values():
                    place.ledger.begin_scrape()
                    place.ledger.reconcile(place.ledger.used_blocks, 0.0)
            elif step == "restart":
                ledger = places.at[data.draw(st.sampled_from("ab"))].ledger
                assert ledger.capacity is not None
                ledger.set_capacity(KvCapacity(1, 2 * BLOCKS - ledger.capacity.engine_blocks + 1, 16))
                ledger.begin_scrape()
                ledger.reconcile(ledger.used_blocks, 0.0)
            else:
                await turns(data.draw(st.integers(1, 4)))
            for place in places.at.values():
                assert place.ledger.in_flight == 0 or place.ledger.used_blocks <= BLOCKS + 2 * len(tasks)
        for place in places.at.values():
            place.health = Health.UP
        done.set()
        gate.wake()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
        for place in places.at.values():
            place.ledger.begin_scrape()
            place.ledger.reconcile(0, 0.0)
        assert_clean(gate, places)

    asyncio.run(scenario())
