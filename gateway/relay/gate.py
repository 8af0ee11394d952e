"""The queue before the backends: requests wait here until ``routing`` places them, and then hold a lease.

This shell decides nothing. It keeps the queue, asks for decisions whenever something changed, and sees to it that
whoever leaves, by whatever door, leaves nothing behind.
"""

from __future__ import annotations

import asyncio

from gateway.config import PRIORITIES, PlacingSettings
from gateway.relay.gate_fleet import GateFleet
from gateway.relay.learning import Learner
from gateway.relay.lease import Lease
from gateway.relay.queue import DrainRate, Queue, Queued
from gateway.relay.refusals import closing, queue_full, refusal
from gateway.routing.blocks import BlockIndex
from gateway.routing.need import budget_tokens, groups_of
from gateway.routing.placer import Placer
from gateway.types import Condition, Decision, Offer, Placed, Waiter, Wish

NO_WISH = Wish()
WHOLE = 1 << 40  # tokens: what nothing but the budget bounds


class Gate:
    """Lets requests through to backends, oldest first. Lives in one event loop; times are that loop's clock."""

    def __init__(self, fleet: GateFleet, settings: PlacingSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._placer = Placer(settings)
        self._learner = Learner(self._placer, settings.output_quantile)
        self._queue = Queue(settings)
        self._rate = DrainRate()
        self._timeouts_s = [settings.class_timeouts_s.get(name, settings.queue_timeout_s) for name in PRIORITIES]
        self._sequence = 0
        self._run: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = 0.0
        self._closed = False
        self._leases = 0
        self._placed = 0
        self._queued = 0
        self._refused = 0

    def __repr__(self) -> str:
        return f"<Gate {len(self._queue)} waiting ({self._queue.bytes} bytes), {self._leases} leases>"

    async def enter(
        self,
        offers: tuple[Offer, ...],
        prompt_tokens: int,
        n: int = 1,
        body_bytes: int = 0,
        excluded: frozenset[str] = frozenset(),
        model: str = "",
        wish: Wish = NO_WISH,
        again: Lease | None = None,
    ) -> Lease:
        """A lease on the best backend among ``offers`` (in order of preference): at once if there is room, or in turn.

        ``excluded`` are backends that failed this request before, ``again`` the last lease it had: it keeps its place
        in the queue and what was left of its time to wait. The caller releases the lease in a ``finally``.
        Raises ``Busy`` if the queue is full or the wait too long, ``NoBackend`` if every backend is down, draining or
        excluded, ``ContextOverflow`` if the prompt is larger than any cache, ``ShuttingDown`` instead of a wait if the
        gate was closed. A cancelled wait leaves nothing behind.
        """
        now_s = asyncio.get_running_loop().time()
        entry = Queued(self._waiter(offers, prompt_tokens, n, excluded, model, wish, again, now_s), body_bytes)
        # Nothing is awaited on this way: who finds room at once goes on without a task switch.
        self._admit(entry, now_s)
        if not entry.settled:
            await self._wait(entry)
        if entry.error is not None:
            self._refused += 1
            raise entry.error
        assert entry.lease is not None
        return entry.lease

    def enter_now(
        self,
        offers: tuple[Offer, ...],
        prompt_tokens: int,
        excluded: frozenset[str],
        model: str,
        wish: Wish,
    ) -> Lease | None:
        """A lease for a second attempt at a request that has one: only if there is room at once that nobody waits for,
        and on no backend that is being tried after a failure. The caller releases it."""
        now_s = asyncio.get_running_loop().time()
        views = self._fleet.views(now_s)
        names = {offer.backend for offer in offers}
        tried = {name for name in names if (view := views.get(name)) and view.condition is Condition.FAILING}
        entry = Queued(self._waiter(offers, prompt_tokens, 1, excluded | tried, model, wish, None, now_s), 0)
        self._admit(entry, now_s)
        if not entry.settled:
            self._leave(entry)
            self.wake()  # its claim is gone; others may pass
        return entry.lease

    def cache_counted(self, name: str, expected_tokens: int, cached_tokens: int, answers: int) -> None:
        """A backend's counters tell what was cached of the prompts of ``answers`` that were placed there."""
        self._placer.counted(name, expected_tokens, cached_tokens, answers)

    def close(self) -> None:
        """Let nobody wait any more: who does is refused now. Who finds room at once still goes through."""
        self._closed = True
        for entry in self._queue.all():
            entry.error = closing()
            self._leave(entry)
            entry.tell()

    def decide(self) -> None:
        """Look now at who can go, rather than in the next turn of the loop."""
        if self._queue:
            self._decide(asyncio.get_running_loop().time())

    def wake(self) -> None:
        """Something changed that may let a waiting request go. Many calls in one turn of the loop cost one decision."""
        if self._queue and self._run is None:
            self._run = asyncio.get_running_loop().call_soon(self._run_now)

    def let_go(self, lease: Lease) -> None:
        """A lease was released (called by the lease)."""
        self._leases -= 1
        self.wake()

    def stats(self) -> dict[str, float]:
        """Now: requests, bytes and prompt tokens waiting, those first in line that are kept out though they would fit,
        the longest wait, leases held. Ever: placed, placed after waiting, refused; of answers that tell how much of
        their prompt was cached, what was expected to be and was.

        ``drain_rate`` is placements out of the queue a second, 0 before there were two.
        """
        return {
            "waiting_requests": len(self._queue),
            "waiting_bytes": self._queue.bytes,
            "waiting_tokens": self._queue.tokens,
            "kept_out_requests": self._placer.kept_out(),
            "oldest_wait_s": self._queue.oldest_wait_s(asyncio.get_running_loop().time()) if self._queue else 0.0,
            "leases": self._leases,
            "placed_requests": self._placed,
            "queued_requests": self._queued,
            "refused_requests": self._refused,
            "prefix_expected_tokens": self._placer.prefixes.matched_tokens + self.blocks.expected_tokens,
            "prefix_confirmed_tokens": self._placer.prefixes.confirmed_tokens + self.blocks.confirmed_tokens,
            "reported_expected_tokens": self.blocks.expected_tokens,
            "reported_confirmed_tokens": self.blocks.confirmed_tokens,
            "drain_rate": self._rate.per_s,
        }

    def kept_blocks(self) -> dict[str, int]:
        """KV blocks kept now for conversations about to return, by backend, where its cache is known."""
        kept: dict[str, float] = {}
        for name, blocks in self._placer.kept_blocks(asyncio.get_running_loop().time()).items():
            backend = self._fleet.backend(name).name  # of an engine that is a place of its own
            kept[backend] = kept.get(backend, 0.0) + blocks
        return {name: round(blocks) for name, blocks in kept.items()}

    @property
    def blocks(self) -> BlockIndex:
        """The KV blocks that backends report, for who hears them."""
        return self._placer.blocks

    def expected_output_tokens(self) -> dict[str, int]:
        """Output reserved for an answer without a budget, by model, where enough was learned."""
        return self._learner.learned()

    def _waiter(
        self,
        offers: tuple[Offer, ...],
        prompt_tokens: int,
        n: int,
        excluded: frozenset[str],
        model: str,
        wish: Wish,
        again: Lease | None,
        now_s: float,
    ) -> Waiter:
        self._sequence += 1
        expected_tokens = WHOLE if wish.whole_budget else self._learner.expected_tokens(model, wish.flow)
        return Waiter(
            sequence=self._sequence if again is None else again.sequence,
            arrived_s=now_s,
            deadline_s=now_s + (self._timeouts_s[wish.rank] if again is None else again.patience_s),
            groups=groups_of(offers, prompt_tokens, n, self._settings, expected_tokens),
            excluded=excluded,
            model=model,
            rank=wish.rank,
            flow=wish.flow,
            tag=None if again is None else again.tag,
            session=wish.session,
            chain=wish.chain,
            blocks=wish.blocks,
            adapter=wish.adapter,
            streamed=wish.streamed,
            engine=wish.engine,
            heeded=wish.heeded,
        )

    def _admit(self, entry: Queued, now_s: float) -> None:
        """Put a request into the queue and decide at once. If it is not settled then, it has to wait."""
        self._queue.add(entry)
        try:
            self._placer.see(self._fleet.changed(now_s))
            self._carry_out(self._placer.add(entry.waiter, now_s), now_s)
        except BaseException:
            # It may have been placed before the decision on another request failed.
            if entry.lease is not None:
                entry.lease.release()
            self._leave(entry)
            raise

    def _leave(self, entry: Queued) -> None:
        """Take an entry out of the queue."""
        if self._queue.pop(entry):
            self._placer.remove(entry.waiter.sequence)
            if not self._queue:
                self._rate.rest()
                if self._alarm is not None:
                    self._alarm.cancel()
                    self._alarm = None

    async def _wait(self, entry: Queued) -> None:
        """Wait for a decision on ``entry``, or raise if there is no room to wait in."""
        if self._queue.is_overfull() and entry.waiter.tag is None:  # who was placed before was let in then
            retry_s = self._rate.retry_after_s(len(self._queue) - 1)
            for surplus in self._queue.surplus(entry):
                surplus.error = queue_full(retry_s)
                self._leave(surplus)
                surplus.tell()
            if entry.error is not None:
                return
            self.wake()  # claims are gone
        if self._closed:
            self._leave(entry)
            self._refused += 1
            raise closing()
        loop = asyncio.get_running_loop()
        self._queued += 1
        self._set_alarm(loop)
        entry.future = loop.create_future()
        try:
            await entry.future
        except BaseException:  # cancelled, or the coroutine is closed
            # It may have been placed in the very turn of the loop in which it was cancelled.
            if entry.lease is not None:
                entry.lease.release()
            self._leave(entry)
            self.wake()  # its claim is gone; others may pass
            raise

    def _run_now(self) -> None:
        self._run = None
        if self._queue:
            loop = asyncio.get_running_loop()
            self._decide(loop.time())
            self._set_alarm(loop)

    def _decide(self, now_s: float) -> None:
        """Ask for decisions on whoever waits and carry them out."""
        self._placer.see(self._fleet.changed(now_s))
        self._carry_out(self._placer.decide(now_s), now_s)

    def _carry_out(self, decisions: list[Decision], now_s: float) -> None:
        done = 0
        try:
            for decision in decisions:
                entry = self._queue[decision.sequence]
                if isinstance(decision, Placed):
                    self._place(entry, decision, now_s)
                else:
                    retry_s = self._rate.retry_after_s(len(self._queue))
                    entry.error = refusal(entry.waiter, decision, self._fleet.views(now_s), now_s, retry_s)
                self._leave(entry)
                entry.tell()
                done += 1
        finally:
            if done < len(decisions):  # the placer takes them for settled; they wait on
                rest = (self._queue.get(decision.sequence) for decision in decisions[done:])
                self._placer.put([entry.waiter for entry in rest if entry is not None])

    def _place(self, entry: Queued, placed: Placed, now_s: float) -> None:
        waiter, offer = entry.waiter, placed.offer
        need = placed.need
        backend = self._fleet.backend(offer.backend)
        budget = budget_tokens(offer, need.prompt_tokens)
        reservation = self._fleet.reserve(
            offer.backend,
            need,
            budget,
            placed.matched_tokens,
            waiter.streamed,
            placed.chain,
            waiter.engine,
            waiter.heeded,
        )
        entry.lease = lease = Lease(self, self._learner, reservation, backend, placed, waiter, now_s)
        if not waiter.streamed:
            lease.expect_prefill(asyncio.get_running_loop())
        self._leases += 1
        self._placed += 1
        if entry.future is not None:
            self._rate.note(now_s)

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the first deadline noticed."""
        deadline_s = self._placer.next_deadline_s()
        if deadline_s is None or (self._alarm is not None and self._alarm_s <= deadline_s):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_s = loop.call_at(deadline_s, self._ring), deadline_s

    def _ring(self) -> None:
        self._alarm = None
        self._run_now()
