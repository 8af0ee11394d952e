"""The gate's life in virtual time: whatever comes, waits, runs, fails, is read, restarted or drained, and in whatever
order, each request is settled once, the books agree, nobody is passed who must not be, and in the end all is zero."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_clock import run
from relay_fleet import MODEL, SIZE, Grounds

from gateway.config import PlacingSettings
from gateway.exceptions import Busy, ContextOverflow, NoBackend, ShuttingDown
from gateway.fleet.reservation import Reservation
from gateway.relay.gate import Gate
from gateway.relay.lease import Lease
from gateway.types import Need, Wish

BLOCKS = {"a": 40, "b": 100}
NAMES = st.sampled_from(sorted(BLOCKS))
MOST = BLOCKS["b"] * SIZE


class Life:
    """A gate, its fleet, and requests as tasks that do what they are told. ``ended``: how each did, by its number."""

    def __init__(self, **fields: Any) -> None:
        self.fleet = Grounds(BLOCKS)
        self.gate = Gate(self.fleet, PlacingSettings(**({"headroom_ratio": 0.0, "queue_timeout_s": 100.0} | fields)))
        self.fleet.gate = self.gate
        self.tasks: list[asyncio.Task[None]] = []
        self.orders: list[asyncio.Queue[tuple[str, int]]] = []
        self.holding: dict[int, Lease] = {}
        self.ended: Counter[int] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.placed: list[tuple[int, str, int]] = []  # class, backend, prompt tokens
        self._watch_placements()

    def arrive(self, tokens: int, n: int, rank: int, flow: str, budget: int, shared: int) -> None:
        orders: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.orders.append(orders)
        number = len(self.tasks)
        chain = tuple((hash((shared, end)), end) for end in sorted({16 * shared, tokens}) if 0 < end <= tokens)
        wish = Wish(rank=rank, flow=flow, session=str(shared), chain=chain, streamed=bool(shared % 2))
        self.tasks.append(asyncio.create_task(self._request(number, orders, tokens, n, wish, budget)))

    async def _request(
        self, number: int, orders: asyncio.Queue[tuple[str, int]], tokens: int, n: int, wish: Wish, retries: int
    ) -> None:
        outcome = "cancelled"
        excluded: frozenset[str] = frozenset()
        lease: Lease | None = None
        try:
            while True:
                lease = await self.gate.enter(self.fleet.offers(), tokens, n, tokens, excluded, MODEL, wish, lease)
                assert number not in self.holding
                self.holding[number] = lease
                try:
                    if await self._use(lease, orders):
                        outcome = "served"
                        return
                finally:
                    del self.holding[number]
                    lease.release()
                excluded |= {lease.backend.name}
        except Busy as error:
            assert 1.0 <= error.retry_after_s <= 59.0
            outcome = "busy"
        except NoBackend:
            outcome = "no backend"
        except ContextOverflow as error:
            assert error.overflow.prompt_tokens == tokens
            outcome = "overflow"
        except ShuttingDown:
            outcome = "shutting down"
        finally:
            self.ended[number] += 1
            self.outcomes[outcome] += 1

    async def _use(self, lease: Lease, orders: asyncio.Queue[tuple[str, int]]) -> bool:
        """Do as told at the backend. Whether the answer came to its end, and not the backend's."""
        grown = 0
        while True:
            order, tokens = await orders.get()
            if order == "first byte":
                lease.first_byte()
            elif order == "grow":
                grown += tokens
                lease.grow(tokens)
            elif order == "finish":
                lease.finished(grown, None)
                self.fleet.at[lease.backend.name].backend.availability.note_success()
                return True
            else:
                self.fleet.at[lease.backend.name].backend.availability.note_failure(lease.placed_s)
                return False

    def tell(self, which: int, order: str, tokens: int = 0) -> None:
        """Tell one of those that hold a lease."""
        if self.holding:
            numbers = sorted(self.holding)
            self.orders[numbers[which % len(numbers)]].put_nowait((order, tokens))

    def _watch_placements(self) -> None:
        """At each placement, look for somebody of a better class who waits for that very backend."""
        reserve = self.fleet.reserve

        def watched(name: str, *more: Any, **named: Any) -> Reservation:
            placer = self.gate._placer
            room = placer._rooms[name]
            sequences = {lease.sequence for lease in self.holding.values()}
            current = self._current_rank()
            for entry in placer._entries.values():
                if entry.waiter.sequence not in sequences and current is not None and entry.lane is not None:
                    assert not (entry.waiter.rank < current and entry.lane.mask & room.bit), (
                        f"class {current} was placed on {name} before {entry} of {entry.waiter.rank}"
                    )
            return reserve(name, *more, **named)

        self.fleet.reserve = watched  # type: ignore[method-assign]
        place = self.gate._place

        def placing(entry: Any, placed: Any, now_s: float) -> None:
            self._rank = entry.waiter.rank
            try:
                place(entry, placed, now_s)
            finally:
                self._rank = None

        self._rank: int | None = None
        self.gate._place = placing  # type: ignore[method-assign]

    def _current_rank(self) -> int | None:
        return self._rank

    def check(self) -> None:
        """What must hold whenever nobody has anything left to do."""
        gate, fleet = self.gate, self.fleet
        now_s = asyncio.get_running_loop().time()
        stats = gate.stats()
        assert stats["leases"] == len(self.holding) == fleet.in_flight()
        for name, target in fleet.at.items():
            engines = target.backend.engines
            here = [lease for lease in self.holding.values() if lease.backend.name == name]
            assert engines.in_flight == len(here)
            assert engines.used_blocks <= engines.reserved_blocks
            assert all(ledger.pending_prompt_tokens >= 0 for ledger in engines)
            if not here:
                assert sum(ledger.pending_prompt_tokens for ledger in engines) == 0
        waiting = [entry.waiter for entry in gate._queue.all()]
        assert stats["waiting_requests"] == len(waiting) == len(gate._placer)
        assert stats["waiting_bytes"] == stats["waiting_tokens"] == sum(w.groups[0].need.prompt_tokens for w in waiting)
        assert len(waiting) + len(self.holding) + sum(self.ended.values()) == len(self.tasks)
        assert set(self.ended.values()) <= {1}, "settled twice"
        assert all(now_s <= waiter.deadline_s for waiter in waiting), "somebody waits beyond its deadline"
        assert 0 <= stats["oldest_wait_s"] <= 200
        for name in fleet.at:
            if fleet.is_idle_and_open(name, now_s):
                wanted = [
                    e for e in gate._placer._entries.values() if e.lane and e.lane.mask & gate._placer._rooms[name].bit
                ]
                assert not wanted, f"{name} idles while {wanted} wait for it"

    async def settle(self) -> None:
        """Let everybody do what there is to do now; no time passes."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """All backends are well, all requests are told to finish, until nobody is left."""
        for name, target in self.fleet.at.items():
            target.backend.availability.drain(False)
            target.backend.availability.breaker.succeeded()
            self.fleet.find(name)
        for _ in range(4 * len(self.tasks) + 20):
            await self.settle()
            if all(task.done() for task in self.tasks):
                break
            for number in self.holding:
                self.orders[number].put_nowait(("finish", 0))
            await asyncio.sleep(10.0)
        assert all(task.done() for task in self.tasks), f"{self.gate} never ends"
        for task in self.tasks:
            if not task.cancelled():
                task.result()
        assert len(self.ended) + self.unborn() == len(self.tasks)
        for name in self.fleet.at:
            self.fleet.scrape(name)
        stats = self.gate.stats()
        assert (stats["waiting_requests"], stats["waiting_bytes"], stats["waiting_tokens"], stats["leases"]) == (0,) * 4
        assert self.gate._alarm is None
        for target in self.fleet.at.values():
            engines = target.backend.engines
            assert (engines.in_flight, engines.used_blocks, engines.reserved_blocks) == (0, 0, 0)
            assert target.backend.availability.breaker._trial is None

    def unborn(self) -> int:
        """Tasks that were cancelled before their first step."""
        return sum(task.cancelled() and number not in self.ended for number, task in enumerate(self.tasks))


number = st.integers(0, 30)
STEPS = st.one_of(
    st.tuples(
        st.just("arrive"), st.integers(0, MOST + 20), st.sampled_from([1, 1, 1, 3]), st.integers(0, 2),
        st.sampled_from("xyz"), st.integers(0, 4),
    ),
    st.tuples(
        st.just("arrive"), st.integers(1, 300), st.just(1), st.integers(0, 2), st.sampled_from("xyz"), st.integers(0, 4)
    ),
    st.tuples(st.just("tell"), number, st.sampled_from(["first byte", "grow", "finish", "fail"]), st.integers(1, 400)),
    st.tuples(st.just("tell"), number, st.sampled_from(["finish", "fail"]), st.just(0)),
    st.tuples(st.just("cancel"), number),
    st.tuples(st.just("pass"), st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0, 120.0])),
    st.tuples(st.just("scrape"), NAMES, st.sampled_from([0, 0, 10, 60])),
    st.tuples(st.just("lose"), NAMES),
    st.tuples(st.just("find"), NAMES, st.sampled_from([0, 30, 80])),
    st.tuples(st.just("drain"), NAMES, st.booleans()),
    st.tuples(st.just("turn"), st.integers(0, 3)),
    st.tuples(st.just("close")),
)  # fmt: skip


async def live(script: list[tuple[Any, ...]], closes: bool) -> None:
    life = Life(queue_max_requests=12)
    for step in script:
        name, *what = step
        if name == "arrive":
            tokens, n, rank, flow, shared = what
            life.arrive(tokens, n, rank, flow, 0, shared)
        elif name == "tell":
            life.tell(*what)
        elif name == "cancel" and life.tasks:
            life.tasks[what[0] % len(life.tasks)].cancel()
        elif name == "pass":
            await asyncio.sleep(what[0])
        elif name == "scrape":
            life.fleet.scrape(*what)
        elif name == "lose":
            life.fleet.lose(what[0])
        elif name == "find":
            life.fleet.find(what[0], what[1] or None)
        elif name == "drain":
            life.fleet.at[what[0]].backend.availability.drain(what[1])
        elif name == "turn":
            for _ in range(what[0]):
                await asyncio.sleep(0)
            continue  # in the middle of things the books need not agree
        elif name == "close" and closes:
            life.gate.close()
        await life.settle()
        with contextlib.suppress(asyncio.CancelledError):
            life.check()
    await life.end()


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=60), st.booleans())
def test_each_request_is_settled_once_and_all_is_zero_in_the_end(script: list[tuple[Any, ...]], closes: bool) -> None:
    run(live(script, closes))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_request_of_the_largest_size_is_served_however_many_small_ones_keep_coming(rank: int) -> None:
    """In its own class and from seven other keys, each prompt a new one; as soon as one of them ends, two more come.

    For its size it is held back no longer than ``short_first_s``; after that it is its key's turn.
    """
    small, keys = 100, 7
    most = 100 + 20 * getattr(PlacingSettings(), "short_first_s", 0.0)  # each second no more than 20 find room

    async def scenario() -> None:
        life = Life(queue_max_requests=1_000_000, queue_max_tokens=1 << 40, queue_timeout_s=1e9)
        for prompt in range(20):
            life.arrive(small, 1, rank, f"small {prompt % keys}", 0, 10 + prompt)
        await life.settle()
        large = len(life.tasks)
        life.arrive(MOST, 1, rank, "large", 0, 1)
        await life.settle()
        releases = 0
        while large not in life.holding:
            assert releases < most, "it starves"
            for item in sorted(life.holding):
                life.orders[item].put_nowait(("finish", 0))
                releases += 1
            for _ in range(2 * len(life.holding)):
                life.arrive(small, 1, rank, f"small {len(life.tasks) % keys}", 0, len(life.tasks) + 100)
            await asyncio.sleep(1.0)
            await life.settle()
        for task in life.tasks:
            task.cancel()
        await life.settle()
        await life.end()

    run(scenario())


def test_every_key_is_served_in_its_turn_while_one_floods() -> None:
    async def scenario() -> None:
        life = Life(queue_max_requests=100_000, queue_timeout_s=1e9)
        for prompt in range(300):
            life.arrive(500, 1, 1, "flood", 0, 100 + prompt)
        await life.settle()
        quiet = []
        for key in range(10):
            quiet.append(len(life.tasks))
            life.arrive(500, 1, 1, f"quiet {key}", 0, key)
        await life.settle()
        floods = 0
        while not all(life.ended[item] for item in quiet):
            for item in sorted(life.holding):
                floods += item not in quiet
                life.orders[item].put_nowait(("finish", 0))
            await asyncio.sleep(1.0)
            await life.settle()
        assert floods < 30  # those that ran, and about one for each of the others
        for task in life.tasks:
            task.cancel()
        await life.settle()
        await life.end()

    run(scenario())


def test_retry_after_a_long_time_at_a_backend_still_has_its_time_to_wait() -> None:
    """It failed after ten minutes at a backend: what it waited for a place was nothing, so nothing is spent."""

    async def scenario() -> None:
        life = Life(queue_timeout_s=100.0)
        life.arrive(100, 1, 1, "x", 0, 0)
        await life.settle()
        await asyncio.sleep(600.0)
        life.tell(0, "fail")
        await life.settle()
        assert len(life.holding) == 1
        life.tell(0, "finish")
        await life.settle()
        assert life.outcomes == {"served": 1}

    run(scenario())


def test_who_waits_when_the_gate_is_closed_is_told_so_and_who_runs_runs_on() -> None:
    async def scenario() -> None:
        life = Life()
        for prompt in range(4):
            life.arrive(MOST, 1, 1, "x", 0, prompt)
        await life.settle()
        life.gate.close()
        await life.settle()
        assert life.outcomes == {"shutting down": 3}
        assert len(life.holding) == 1
        life.arrive(MOST, 1, 1, "x", 0, 4)
        life.arrive(100, 1, 1, "x", 0, 5)  # there is room on the other backend
        await life.settle()
        assert life.outcomes == {"shutting down": 4}
        assert len(life.holding) == 2
        await life.end()

    run(scenario())


def test_the_prompt_of_an_answer_that_is_not_streamed_is_not_waited_for_until_its_end() -> None:
    async def scenario() -> None:
        life = Life()
        life.arrive(400, 1, 1, "x", 0, 0)  # prompts of an even number are not streamed
        await life.settle()
        (lease,) = life.holding.values()
        engines = life.fleet.at[lease.backend.name].backend.engines
        assert sum(ledger.pending_prompt_tokens for ledger in engines) == 400
        await asyncio.sleep(1.0)  # long enough for 400 tokens, and far too short for an answer
        assert sum(ledger.pending_prompt_tokens for ledger in engines) == 0
        await life.end()

    run(scenario())


def test_whole_answers_tell_how_fast_a_backend_is_where_they_can() -> None:
    """Without output to speak of they tell the prompt's rate; with much of it the pace of the output."""

    async def scenario() -> None:
        fleet = Grounds({"a": 10_000})
        rates = fleet.at["a"].backend.rates

        async def whole(prompt: int, output: int, seconds: float) -> None:
            held = fleet.at["a"].backend.reserve(Need(prompt, output), None)
            held.took(output, seconds)
            held.release()

        for prompt in range(500, 10_000, 500):
            await whole(prompt, 0, prompt / 10_000)
        assert rates.prefill_s == pytest.approx(1 / 10_000, rel=0.05)
        assert rates.output_s is None
        await whole(8000, 10, 1.0)  # nearly all of it is the prompt
        assert rates.output_s is None
        for _ in range(50):
            await whole(1000, 401, 0.1 + 400 * 0.02)
        assert rates.output_s == pytest.approx(0.02, rel=0.05)
        assert rates.prefill_s == pytest.approx(1 / 10_000, rel=0.05)

    run(scenario())
