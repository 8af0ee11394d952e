"""The queue in front of the backends: where a request waits until ``routing.assign`` says it may go, and where to.

All deciding is done by that pure function; this shell holds who waits, asks it when anything changed, and hands out
leases. A place in the queue or on a backend is given back whatever happens, cancellation at any await included.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.config import PlacingSettings
from gateway.exceptions import Busy, NoBackend
from gateway.fleet.backend import Reservation
from gateway.fleet.fleet import Backend, Fleet
from gateway.routing.assign import assign
from gateway.routing.need import budget_tokens, need_for
from gateway.types import Need, Offer, Placed, Waiter

# Releases of the last minute tell how fast the queue drains.
DRAIN_MEMORY_S = 60.0
LONGEST_RETRY_AFTER_S = 59.0

FULL = "The KV cache of every suitable backend is full and the queue is, too. Try again in {seconds} s."
WAITED = "No place on a backend became free within {limit} s. Try again in {seconds} s."
TOO_LARGE = "The request needs more KV cache than any backend that is up has."
DOWN = "Every backend that could take this request is down or draining. Try again in a few seconds."


class Lease:
    """A place on a backend. ``release`` it in a ``finally``; doing so twice changes nothing."""

    __slots__ = ("_gate", "_released", "_reservation", "backend", "offer", "waited_s")

    def __init__(self, gate: Gate, reservation: Reservation, backend: Backend, offer: Offer, waited_s: float) -> None:
        self._gate = gate
        self._reservation = reservation
        self._released = False
        self.backend = backend
        self.offer = offer
        self.waited_s = waited_s

    def first_byte(self) -> None:
        """The backend began to answer."""
        self._reservation.first_byte()

    def grow(self, tokens: int) -> None:
        """So many more tokens were generated."""
        self._reservation.grow(tokens)

    def release(self) -> None:
        """Give the place back and let the next one have it."""
        if not self._released:
            self._released = True
            self._reservation.release()
            self._gate.released()


@dataclass(slots=True)
class _Place:
    """Somebody in the queue."""

    waiter: Waiter
    prompt_tokens: int
    body_bytes: int
    future: asyncio.Future[Lease]


class Gate:
    """The one queue. Times are seconds of the event loop's clock."""

    def __init__(self, fleet: Fleet, settings: PlacingSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._queue: dict[int, _Place] = {}
        self._bytes = 0
        self._sequences = itertools.count(1)
        self._names: dict[frozenset[str], frozenset[str]] = {}
        self._releases: deque[float] = deque(maxlen=1024)
        self._look: asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Gate {len(self._queue)} waiting, {self._bytes} bytes>"

    def stats(self) -> dict[str, float]:
        """Who waits now, and how fast places become free (a second, over the last minute)."""
        return {
            "waiting_requests": len(self._queue),
            "waiting_bytes": self._bytes,
            "releases_per_second": self._drain_rate(asyncio.get_running_loop().time()),
        }

    async def enter(
        self,
        offers: tuple[Offer, ...],
        prompt_tokens: int,
        n: int,
        body_bytes: int,
        excluded: frozenset[str] = frozenset(),
        model: str = "",
    ) -> Lease:
        """Wait for a place on one of ``offers`` less ``excluded``. ``prompt_tokens`` and ``n`` say what it needs there.

        Raises ``Busy`` when the queue is full or the wait too long, and ``NoBackend`` when nobody can take it.
        """
        now_s = asyncio.get_running_loop().time()
        waiter = Waiter(
            sequence=next(self._sequences),
            arrived_s=now_s,
            deadline_s=now_s + self._settings.queue_timeout_s,
            offers=offers,
            need=self._needs(offers, prompt_tokens, n),
            excluded=excluded,
            model=model,
            backends=self._shared(frozenset(offer.backend for offer in offers) - excluded),
        )
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        place = _Place(waiter, prompt_tokens, body_bytes, future)
        self._queue[waiter.sequence] = place
        self._bytes += body_bytes
        self._decide()
        try:
            if not future.done():
                self._admit(now_s)
                self._watch_deadline()
            return await future if not future.done() else future.result()
        except asyncio.CancelledError:
            # Placed in the very moment it was cancelled: the place must not be lost.
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()
            raise
        finally:
            self._leave(waiter.sequence)

    def wake(self) -> None:
        """Something changed: look through the queue soon. Many calls in one turn of the loop make one look."""
        if self._queue and self._look is None:
            self._look = asyncio.get_running_loop().call_soon(self._decide)

    def released(self) -> None:
        """A place became free."""
        self._releases.append(asyncio.get_running_loop().time())
        self.wake()

    def _admit(self, now_s: float) -> None:
        """Raise ``Busy`` if whoever came last is one too many to wait."""
        settings = self._settings
        if len(self._queue) > settings.queue_max_requests or self._bytes > settings.queue_max_bytes:
            seconds = self._retry_after_s(now_s)
            raise Busy(FULL.format(seconds=math.ceil(seconds)), seconds)

    def _decide(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if not self._queue:
            return
        now_s = asyncio.get_running_loop().time()
        queue = [place.waiter for place in self._queue.values()]
        for decision in assign(queue, self._fleet.views(now_s), now_s, self._settings):
            place = self._queue.get(decision.sequence)
            if place is None or place.future.done():
                continue
            if isinstance(decision, Placed):
                place.future.set_result(self._lease(place, decision.offer, now_s))
            else:
                place.future.set_exception(self._refusal(decision.reason, now_s))
            self._leave(decision.sequence)

    def _lease(self, place: _Place, offer: Offer, now_s: float) -> Lease:
        need = place.waiter.need[offer.backend]
        reservation = self._fleet.reserve(offer.backend, need, budget_tokens(offer, place.prompt_tokens))
        return Lease(self, reservation, self._fleet.backend(offer.backend), offer, now_s - place.waiter.arrived_s)

    def _refusal(self, reason: str, now_s: float) -> Busy | NoBackend:
        if reason == "timeout":
            seconds = self._retry_after_s(now_s)
            limit = f"{self._settings.queue_timeout_s:g}"
            return Busy(WAITED.format(limit=limit, seconds=math.ceil(seconds)), seconds)
        return NoBackend(TOO_LARGE if reason == "too_large" else DOWN)

    def _leave(self, sequence: int) -> None:
        place = self._queue.pop(sequence, None)
        if place is None:
            return
        self._bytes -= place.body_bytes
        self.wake()  # whoever stood behind may go now
        if not self._queue:
            self._names.clear()
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    def _watch_deadline(self) -> None:
        """Look again when the first wait is over: deadlines are in the order of arrival."""
        if self._deadline is None and self._queue:
            first = next(iter(self._queue.values()))
            self._deadline = asyncio.get_running_loop().call_at(first.waiter.deadline_s, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._deadline = None
        self._decide()
        self._watch_deadline()

    def _needs(self, offers: tuple[Offer, ...], prompt_tokens: int, n: int) -> Mapping[str, Need]:
        return {offer.backend: need_for(offer, prompt_tokens, n, self._settings) for offer in offers}

    def _shared(self, names: frozenset[str]) -> frozenset[str]:
        """One object for equal sets: the queue is then looked through faster."""
        return self._names.setdefault(names, names)

    def _drain_rate(self, now_s: float) -> float:
        recent = [moment for moment in self._releases if now_s - moment <= DRAIN_MEMORY_S]
        return len(recent) / max(1.0, now_s - recent[0]) if recent else 0.0

    def _retry_after_s(self, now_s: float) -> float:
        """When as many places will have become free as requests wait now, at the rate of late."""
        rate = self._drain_rate(now_s)
        expected_s = len(self._queue) / rate if rate else LONGEST_RETRY_AFTER_S
        return min(LONGEST_RETRY_AFTER_S, max(1.0, expected_s))
