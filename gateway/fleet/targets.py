"""What placing sees of a backend: the server, or, where the gateway chooses the rank, each of its engines.

To a server that balances its engines itself a request goes where the server sends it. So such a server looks to placing
as its next engine does, the one that would get the next request: what it has free, what waits there. What fits all of
its engines together and none of them alone waits, and a full engine that is next closes the server, since the request
would queue or preempt there. After each request another engine may be next, so one is placed at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.fleet.breaker import BreakerState
from gateway.types import BackendView, Health, LoadView

if TYPE_CHECKING:
    from gateway.fleet.backend import WatchedBackend

# A view is built anew when a ledger changes; without changes its age may lag behind by this much.
VIEW_LIFE_S = 0.25


class Target:
    """A backend as a whole (``rank`` is ``None``), or its engine ``rank``, which requests for it ask for by header."""

    __slots__ = ("_backend", "_changes", "_until_s", "_view", "name", "rank")

    def __init__(self, backend: WatchedBackend, rank: int | None) -> None:
        self._backend = backend
        self.rank = rank
        self.name = backend.name if rank is None else f"{backend.name}#{rank}"
        self._view: BackendView | None = None
        self._changes = -1
        self._until_s = 0.0

    def __repr__(self) -> str:
        return f"<Target {self.name}{' gone' if self.gone else ''}>"

    @property
    def backend(self) -> WatchedBackend:
        """Whose it is."""
        return self._backend

    @property
    def gone(self) -> bool:
        """Whether its engine is no more: the server was restarted with fewer."""
        return self.rank is not None and self.rank >= len(self._backend.engines)

    def forget(self) -> None:
        """Something else than its load has changed."""
        self._view = None

    def view(self, now_s: float) -> BackendView:
        """The picture the placing sees.

        When the observation is too old, ``running`` and ``waiting`` are unknown. The ledger stays: our own footprints
        are exact without any scrape, and the last known foreign use beats none.
        """
        view = self._view
        if view is None or now_s >= self._until_s or self._changes != self._seen_changes():
            view = self._view = self._look(now_s)
            self._changes = self._seen_changes()
            self._until_s = now_s + VIEW_LIFE_S
            availability = self._backend.availability
            for end_s in (availability.breaker.half_open_at_s, availability.rests_until_s(now_s)):
                if end_s is not None and end_s > now_s:
                    self._until_s = min(self._until_s, end_s)
        return view

    def load(self, now_s: float) -> LoadView | BackendView:
        """What changes all the time, if nothing else can have changed."""
        view, engines = self._view, self._backend.engines
        if view is None or view.kv is None or not view.accepting:
            return self.view(now_s)
        if self._backend.availability.breaker.half_open_at_s is not None:
            return self.view(now_s)
        if self.rank is None and len(engines) > 1:
            return self.view(now_s)  # another engine may be next
        ledger = engines[self.rank or 0]
        return LoadView(self.name, ledger.in_flight, ledger.pending_prompt_tokens, ledger.reserved_blocks)

    def view_is_due(self, now_s: float) -> bool:
        """Whether the last view has become old by time alone."""
        return self._view is None or now_s >= self._until_s

    def _seen_changes(self) -> int:
        engines = self._backend.engines
        return engines.changes if self.rank is None or self.gone else engines[self.rank].changes

    def _look(self, now_s: float) -> BackendView:
        backend = self._backend
        if self.gone:
            return BackendView(self.name, backend.url, Health.DOWN, {}, 0)
        engines, availability = backend.engines, backend.availability
        rank = engines.next_rank() if self.rank is None else self.rank
        ledger = engines[rank]
        running, waiting = backend.requests_at(rank, now_s)
        # One request tries a recovering backend, whatever it has engines: it goes to the first.
        breaker = availability.breaker
        closed = breaker.half_open_at_s is None
        accepts = closed or (not self.rank and breaker.accepts(now_s))
        accepts = accepts and availability.rests_until_s(now_s) is None
        half_open = not closed and breaker.state(now_s) is BreakerState.HALF_OPEN
        reading, rates = backend.reading, backend.rates
        # In doubt, a request placed there may wait until it is sent elsewhere: that is its price.
        doubtful = backend.pulse.doubtful
        first_s = (rates.first_s or 0.0) + backend.hang_s if doubtful else rates.first_s
        return BackendView(
            self.name,
            backend.url,
            availability.health(now_s),
            backend.windows,
            ledger.in_flight,
            ledger.view(now_s),
            running,
            waiting,
            accepts,
            availability.draining or availability.standby_for is not None,
            ledger.pending_prompt_tokens,
            half_open or (self.rank is None and len(engines) > 1),
            rates.prefill_s,
            rates.output_s,
            backend.share(now_s),
            backend.epoch,
            reading.caches is not False,
            reading.loras,
            reading.lora_slots,
            engines=1 if self.rank is not None else len(engines),
            condition=availability.condition(now_s),
            warmth=availability.warmth(now_s),
            first_s=first_s,
            first_tokens=rates.first_tokens,
            trust=1.0 if doubtful else backend.trust(now_s),
        )
