"""The queue before the backends: requests wait here until ``routing`` places them, and then hold a lease.

This shell decides nothing. It keeps the queue, asks for decisions whenever something changed, and sees to it that
whoever leaves, by whatever door, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from gateway.config import PRIORITIES, PlacingSettings
from gateway.exceptions import Busy, ContextOverflow, GatewayError, NoBackend
from gateway.fleet.backend import Reservation
from gateway.fleet.fleet import Backend
from gateway.routing.lengths import OutputLengths
from gateway.routing.need import budget_tokens, groups_of
from gateway.routing.placer import Placer
from gateway.types import BackendView, Decision, LoadView, Need, Offer, Overflow, Placed, Refused, Waiter, Wish

LEAST_RETRY_S = 1.0
MOST_RETRY_S = 59.0  # clients ignore hints of a minute and more
UNMEASURED_RETRY_S = 10.0
# Weight of the newest gap between two placements out of the queue in the drain rate.
DRAIN_WEIGHT = 0.1


NO_WISH = Wish()
WHOLE = 1 << 40  # tokens: what nothing but the budget bounds


class GateFleet(Protocol):
    """What the gate needs of the fleet."""

    def views(self, now_s: float) -> Mapping[str, BackendView]:
        """All backends as they look now."""

    def changed(self, now_s: float) -> Iterable[BackendView | LoadView]:
        """The backends that look otherwise than at the last call; at the first, all."""

    def reserve(
        self, name: str, need: Need, budget_tokens: int | None, cached_tokens: int = 0, timed: bool = False
    ) -> Reservation:
        """Enter a request into a backend's ledger."""

    def backend(self, name: str) -> Backend:
        """How to reach a backend."""


class Lease:
    """A place on a backend: KV blocks are reserved there until ``release``, which may be called any number of times."""

    __slots__ = (
        "_begun", "_finished", "_gate", "_matched_tokens", "_need", "_reservation", "_waiter", "backend", "offer",
        "released", "tag", "waited_s",
    )  # fmt: skip

    def __init__(
        self, gate: Gate, reservation: Reservation, backend: Backend, placed: Placed, waiter: Waiter, now_s: float
    ) -> None:
        self._gate = gate
        self._reservation = reservation
        self._waiter = waiter
        self._matched_tokens = placed.matched_tokens
        self._need = placed.need
        self._begun = False
        self._finished = False
        self.backend = backend
        self.offer = placed.offer
        self.waited_s = now_s - waiter.arrived_s
        self.tag = placed.tag
        self.released = False

    def __repr__(self) -> str:
        return f"<Lease {self.sequence} on {self.backend.name}{', released' if self.released else ''}>"

    @property
    def sequence(self) -> int:
        """Its number in the order of arrival."""
        return self._waiter.sequence

    @property
    def deadline_s(self) -> float:
        """When its wait would have been over."""
        return self._waiter.deadline_s

    @property
    def rank(self) -> int:
        """Its priority class."""
        return self._waiter.rank

    def first_byte(self) -> None:
        """The backend began to answer."""
        self._begun = True
        self._reservation.first_byte()

    def grow(self, tokens: int) -> None:
        """So many more tokens were generated, over all sequences."""
        self._reservation.grow(tokens)

    def finished(self, output_tokens: int | None, cached_tokens: int | None) -> None:
        """The answer came to its end; its usage tells so many output tokens, and cached ones of the prompt."""
        self._finished = True
        if cached_tokens is not None:
            self._reservation.cached_tokens = cached_tokens
        self._gate.answered(self._waiter, self.offer, self._need, self._matched_tokens, output_tokens, cached_tokens)

    def release(self) -> None:
        """Give the place back and let others have it."""
        if not self.released:
            self.released = True
            self._reservation.release()
            if not self._finished:
                grown_tokens = self._reservation.grown_tokens
                self._gate.broken_off(
                    self._waiter, self.offer, self._need, self._matched_tokens, self._begun, grown_tokens
                )
            self._gate.let_go(self)


class _Entry:
    """One request: what the placer sees of it, and the future it waits on."""

    __slots__ = ("body_bytes", "error", "future", "lease", "tokens", "waiter")

    def __init__(self, waiter: Waiter, body_bytes: int) -> None:
        self.waiter = waiter
        self.body_bytes = body_bytes
        self.tokens = waiter.groups[0].need.prompt_tokens if waiter.groups else 0
        self.future: asyncio.Future[None] | None = None
        self.lease: Lease | None = None
        self.error: GatewayError | None = None

    @property
    def settled(self) -> bool:
        """Whether it was placed or refused."""
        return self.lease is not None or self.error is not None

    def tell(self) -> None:
        """Wake who waits; a fresh arrival has nobody waiting yet."""
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class Gate:
    """Lets requests through to backends, oldest first. Lives in one event loop; times are that loop's clock."""

    def __init__(self, fleet: GateFleet, settings: PlacingSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._placer = Placer(settings)
        self._lengths = OutputLengths()
        self._queue: dict[int, _Entry] = {}  # by sequence, which is the order of arrival
        self._queue_bytes = 0
        self._queue_tokens = 0
        self._timeouts_s = [settings.class_timeouts_s.get(name, settings.queue_timeout_s) for name in PRIORITIES]
        self._sequence = 0
        self._run: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = 0.0
        self._leases = 0
        self._placed = 0
        self._queued = 0
        self._refused = 0
        self._drain_gap_s: float | None = None
        self._drained_s: float | None = None

    def __repr__(self) -> str:
        return f"<Gate {len(self._queue)} waiting ({self._queue_bytes} bytes), {self._leases} leases>"

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
        in the queue and the end of its wait. The caller releases the lease in a ``finally``.
        Raises ``Busy`` if the queue is full or the wait too long, ``NoBackend`` if every backend is down, draining or
        excluded, ``ContextOverflow`` if the prompt is larger than any cache. A cancelled wait leaves nothing behind.
        """
        now_s = asyncio.get_running_loop().time()
        entry = self._arrive(self._waiter(offers, prompt_tokens, n, excluded, model, wish, again, now_s), body_bytes)
        # Nothing is awaited up to here and on this way: who finds room at once goes on without a task switch.
        try:
            self._placer.see(self._fleet.changed(now_s))
            self._carry_out(self._placer.add(entry.waiter, now_s), now_s)
        except BaseException:
            # It may have been placed before the decision on another request failed.
            if entry.lease is not None:
                entry.lease.release()
            self._leave(entry)
            raise
        if not entry.settled:
            await self._wait(entry)
        if entry.error is not None:
            self._refused += 1
            raise entry.error
        assert entry.lease is not None
        return entry.lease

    def decide(self) -> None:
        """Look now at who can go, rather than in the next turn of the loop."""
        if self._queue:
            self._decide(asyncio.get_running_loop().time())

    def wake(self) -> None:
        """Something changed that may let a waiting request go. Many calls in one turn of the loop cost one decision."""
        if self._queue and self._run is None:
            self._run = asyncio.get_running_loop().call_soon(self._run_now)

    def answered(
        self,
        waiter: Waiter,
        offer: Offer,
        need: Need,
        matched_tokens: int,
        output_tokens: int | None,
        cached_tokens: int | None,
    ) -> None:
        """Learn from an answer that came to its end (called by the lease)."""
        self._placer.answered(offer.backend, output_tokens or 0, matched_tokens, cached_tokens)
        if output_tokens is not None:
            each_tokens = output_tokens // need.n
            ended = each_tokens < budget_tokens(offer, need.prompt_tokens)
            self._lengths.note(waiter.model, waiter.flow, each_tokens, ended)

    def broken_off(
        self, waiter: Waiter, offer: Offer, need: Need, matched_tokens: int, begun: bool, grown_tokens: int
    ) -> None:
        """Learn from an answer that did not end, or never began (called by the lease)."""
        if begun:
            each_tokens = grown_tokens // need.n
            self._lengths.note(waiter.model, waiter.flow, each_tokens, False)
        else:
            self._placer.unanswered(offer.backend, waiter.chain, waiter.model, matched_tokens)

    def let_go(self, lease: Lease) -> None:
        """A lease was released (called by the lease)."""
        self._leases -= 1
        self.wake()

    def stats(self) -> dict[str, float]:
        """Now: requests, bytes and prompt tokens waiting, the longest wait, leases held. Ever: placed, placed after
        waiting, refused; of answers that tell how much of their prompt was cached, what was expected to be and was.

        ``drain_rate`` is placements out of the queue a second, 0 before there were two.
        """
        return {
            "waiting_requests": len(self._queue),
            "waiting_bytes": self._queue_bytes,
            "waiting_tokens": self._queue_tokens,
            "oldest_wait_s": self._oldest_wait_s(),
            "leases": self._leases,
            "placed_requests": self._placed,
            "queued_requests": self._queued,
            "refused_requests": self._refused,
            "prefix_expected_tokens": self._placer.prefixes.matched_tokens,
            "prefix_confirmed_tokens": self._placer.prefixes.confirmed_tokens,
            "drain_rate": 1.0 / self._drain_gap_s if self._drain_gap_s else 0.0,
        }

    def expected_output_tokens(self) -> dict[str, int]:
        """Output reserved for an answer without a budget, by model, where enough was learned."""
        return self._lengths.learned(self._settings.output_quantile)

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
        settings = self._settings
        expected_tokens = (
            WHOLE if wish.whole_budget else self._lengths.expected(model, wish.flow, settings.output_quantile)
        )
        return Waiter(
            sequence=self._sequence if again is None else again.sequence,
            arrived_s=now_s,
            deadline_s=now_s + self._timeouts_s[wish.rank] if again is None else again.deadline_s,
            groups=groups_of(offers, prompt_tokens, n, settings, expected_tokens),
            excluded=excluded,
            model=model,
            rank=wish.rank,
            flow=wish.flow,
            tag=None if again is None else again.tag,
            session=wish.session,
            chain=wish.chain,
            adapter=wish.adapter,
            streamed=wish.streamed,
        )

    def _arrive(self, waiter: Waiter, body_bytes: int) -> _Entry:
        entry = _Entry(waiter, body_bytes)
        self._queue[waiter.sequence] = entry
        self._queue_bytes += body_bytes
        self._queue_tokens += entry.tokens
        return entry

    def _leave(self, entry: _Entry) -> None:
        """Take an entry out of the queue."""
        if self._queue.pop(entry.waiter.sequence, None) is not None:
            self._queue_bytes -= entry.body_bytes
            self._queue_tokens -= entry.tokens
            self._placer.remove(entry.waiter.sequence)
            if not self._queue:
                self._drained_s = None
                if self._alarm is not None:
                    self._alarm.cancel()
                    self._alarm = None

    async def _wait(self, entry: _Entry) -> None:
        """Wait for a decision on ``entry``, or raise if there is no room to wait in."""
        settings = self._settings
        if (
            len(self._queue) > settings.queue_max_requests
            or self._queue_bytes > settings.queue_max_bytes
            or self._queue_tokens > settings.queue_max_tokens
        ) and entry.waiter.tag is None:  # who was placed before was let in then
            retry_s = self._retry_after_s(len(self._queue) - 1)
            self._leave(entry)
            self._refused += 1
            raise Busy("The KV caches are full and so is the queue. Try again later.", retry_s)
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
                    entry.error = self._refusal(entry.waiter, decision, now_s)
                self._leave(entry)
                entry.tell()
                done += 1
        finally:
            if done < len(decisions):  # the placer takes them for settled; they wait on
                rest = (self._queue.get(decision.sequence) for decision in decisions[done:])
                self._placer.put([entry.waiter for entry in rest if entry is not None])

    def _place(self, entry: _Entry, placed: Placed, now_s: float) -> None:
        waiter, offer = entry.waiter, placed.offer
        need = placed.need
        backend = self._fleet.backend(offer.backend)
        budget = budget_tokens(offer, need.prompt_tokens)
        reservation = self._fleet.reserve(offer.backend, need, budget, placed.matched_tokens, waiter.streamed)
        entry.lease = Lease(self, reservation, backend, placed, waiter, now_s)
        self._leases += 1
        self._placed += 1
        if entry.future is not None:
            self._note_drain(now_s)

    def _refusal(self, waiter: Waiter, decision: Refused, now_s: float) -> GatewayError:
        if decision.reason == "no_backend":
            if waiter.excluded and all(offer.backend in waiter.excluded for offer in waiter.offers):
                return NoBackend("Every backend that serves the model has failed this request. Try again later.")
            return NoBackend("Every backend that could take the request is down or draining. Try again later.")
        if decision.reason == "too_large":
            return ContextOverflow(self._overflow(waiter, now_s))
        waited_s = now_s - waiter.arrived_s
        retry_s = self._retry_after_s(len(self._queue))
        return Busy(f"No KV cache had room for the request within {waited_s:.0f} s. Try again later.", retry_s)

    def _overflow(self, waiter: Waiter, now_s: float) -> Overflow:
        """The numbers of a prompt that no cache can hold: the largest cache counts as the window."""
        views = self._fleet.views(now_s)
        names = {offer.backend for offer in waiter.offers} - waiter.excluded
        caches = [kv for name in names if name in views and (kv := views[name].kv) is not None]
        limit = max((kv.engine_capacity_blocks * kv.block_size_tokens for kv in caches), default=0)
        need = waiter.groups[0].need
        return Overflow(need.prompt_tokens, need.output_tokens, limit, limit)

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

    def _note_drain(self, now_s: float) -> None:
        """Learn the mean gap between two placements while requests wait."""
        if self._drained_s is not None:
            gap_s = now_s - self._drained_s
            known_s = gap_s if self._drain_gap_s is None else self._drain_gap_s
            self._drain_gap_s = known_s + DRAIN_WEIGHT * (gap_s - known_s)
        self._drained_s = now_s

    def _retry_after_s(self, ahead: int) -> float:
        """Seconds until the requests waiting now will be through, at the rate they are drained."""
        if self._drain_gap_s is None:
            return UNMEASURED_RETRY_S
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, ahead * self._drain_gap_s))

    def _oldest_wait_s(self) -> float:
        if not self._queue:
            return 0.0
        return asyncio.get_running_loop().time() - next(iter(self._queue.values())).waiter.arrived_s
