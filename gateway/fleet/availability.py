"""Whether a backend is to be sent requests, and how many: whether it answers, is awake, fails, rests or comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.config import FleetSettings
from gateway.fleet.breaker import Breaker, BreakerState
from gateway.fleet.outliers import Recent
from gateway.fleet.overload import FIRST_REST_S, Overload
from gateway.fleet.standing import Signs, condition
from gateway.types import Condition, Health

log = logging.getLogger("kvgate.fleet")

LEAST_WARMTH = 0.1
# A backend that says it is full may say so many times a second; the log does not.
QUIET_S = 60.0


class Availability:
    """It for one backend, ``name`` in the log.

    ``clock`` gives seconds (the event loop's); ``on_change`` is called whenever more or less may be sent there than
    before, ``look_soon`` when something happened that a look would explain.

    ``starting``: it said that it is not ready, or was never there and may come. ``standby_for``: the backend that is
    the same server, and is up. ``wakings``: how often it woke up, each time with empty caches. ``overloads`` and
    ``ejections`` count, too.
    """

    def __init__(
        self,
        name: str,
        fleet: FleetSettings,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        look_soon: Callable[[], None],
    ) -> None:
        self.breaker = Breaker(fleet.failures_to_open, fleet.reopen_after_s)
        self.overload = Overload()
        self.recent = Recent()
        self.standby_for: str | None = None
        self.ejected_until_s: float | None = None
        self.draining = False
        self.starting = False
        self.wakings = self.overloads = self.ejections = 0
        self._name = name
        self._slow_start_s = fleet.slow_start_s
        self._clock = clock
        self._on_change = on_change
        self._look_soon = look_soon
        self._reachable: bool | None = None
        self._asleep = False
        self._back_s: float | None = None  # when it came back, for a slow start
        self._told_full_s: float | None = None

    def __repr__(self) -> str:
        return f"<Availability of {self._name}: {self.condition(self._clock())}>"

    @property
    def reachable(self) -> bool | None:
        """Whether it answered the last look; ``None`` before the first one is over."""
        return self._reachable

    @property
    def resting(self) -> bool:
        """Whether time alone will change what may be sent there."""
        resting = self.breaker.half_open_at_s is not None or self._back_s is not None
        return resting or self.overload.until_s is not None or self.ejected_until_s is not None

    def set_reachable(self, reachable: bool, again: bool = False) -> None:
        """Whether it answers. ``again``: it was read before, so that it comes back and does not only come."""
        if reachable is self._reachable:
            return
        if self._reachable is not None or reachable:
            calm = reachable or self.starting
            word = "up" if reachable else "starting" if self.starting else "down"
            log.log(logging.INFO if calm else logging.WARNING, "backend %s is %s", self._name, word)
        if self._reachable is False and reachable and again:
            self._back_s = self._clock()
        self._reachable = reachable
        self._on_change()

    def set_asleep(self, asleep: bool) -> None:
        """Whether it sleeps."""
        if asleep is self._asleep:
            return
        self._asleep = asleep
        log.info("backend %s %s", self._name, "is asleep: nothing is placed there" if asleep else "is awake")
        if not asleep:
            self.wakings += 1
            self._back_s = self._clock()
        self._on_change()

    def drain(self, draining: bool) -> None:
        """Send nothing more there (or do so again). What runs there runs on."""
        if draining != self.draining:
            self.draining = draining
            self._on_change()

    def stand_by(self, other: str | None) -> None:
        """It is the same server as backend ``other``, or none that is up any more."""
        if other != self.standby_for:
            self.standby_for = other
            self._on_change()

    def note_success(self, erred: bool = False) -> None:
        """The backend answered a request. ``erred``: with an internal error, which may be the request's fault: so it
        opens no breaker, and counts only beside what the backend's peers answer."""
        self.recent.ended(erred, self._clock())
        if self.overload.answered(self._clock()):
            self._on_change()
        if self.breaker.failures and self.breaker.succeeded():
            self._back_s = self._clock()
            log.info("backend %s answers again", self._name)
            self._on_change()
            self._look_soon()

    def note_failure(self, placed_s: float | None = None) -> None:
        """A request failed for the backend's sake that was placed at ``placed_s``."""
        self.recent.ended(True, self._clock())
        if self.breaker.failed(self._clock(), placed_s):
            log.warning("backend %s: %d failures in a row, resting it", self._name, self.breaker.failures)
            self._on_change()
        self._look_soon()

    def note_busy(self, placed_s: float, full: bool) -> None:
        """A request, placed at ``placed_s``, was answered 503: the backend has as much as it takes for now (``full``),
        or is not what it was."""
        now_s = self._clock()
        if not full:
            self._look_soon()
        rest_s = self.overload.refused(placed_s, now_s)
        self.overloads += 1
        if rest_s is None:
            return
        if rest_s == FIRST_REST_S and (self._told_full_s is None or now_s - self._told_full_s >= QUIET_S):
            self._told_full_s = now_s
            log.warning(
                "backend %s takes no more for now (503): it rests, and requests go elsewhere or wait", self._name
            )
        self._on_change()
        # Nobody else would notice the end of so short a time.
        asyncio.get_running_loop().call_later(rest_s, self._on_change)

    def eject(self, until_s: float, reason: str) -> None:
        """Let it rest until then: it is far worse than its peers."""
        self.ejections += 1
        self.ejected_until_s = until_s
        log.warning("backend %s: %s; it rests for %.0f s", self._name, reason, until_s - self._clock())
        self._on_change()

    def readmit(self) -> None:
        """Its rest is over; what it did before does not count any more."""
        self.ejected_until_s = None
        self.recent.clear()
        self._back_s = self._clock()
        log.info("backend %s is back from its rest", self._name)
        self._on_change()

    def forget(self) -> None:
        """Another process answers: how the one before did says nothing of it."""
        self.overload.forget()
        self.recent.clear()

    def health(self, now_s: float) -> Health:
        """Down: it cannot be reached, sleeps, or its breaker is open. Unknown until the first look is over."""
        if self._reachable is None:
            return Health.UNKNOWN
        if not self._reachable or self._asleep or self.breaker.state(now_s) is BreakerState.OPEN:
            return Health.DOWN
        return Health.UP

    def takes_new(self, now_s: float) -> bool:
        """Whether new requests are placed there: at once, or when there is room, or after a moment's rest."""
        return self.health(now_s) is Health.UP and not self.draining and self.standby_for is None

    def condition(self, now_s: float) -> Condition:
        """How it stands, in one word."""
        return condition(
            Signs(
                reachable=self._reachable,
                starting=self.starting,
                asleep=self._asleep,
                standby=self.standby_for is not None,
                draining=self.draining,
                breaker=self.breaker.state(now_s),
                ejected=self.ejected_until_s is not None and self.ejected_until_s > now_s,
                overloaded=self.overload.rests(now_s),
                warming=self.warmth(now_s) < 1.0,
            )
        )

    def rests_until_s(self, now_s: float) -> float | None:
        """Until when nothing is placed there for a moment; ``None`` if it does not rest."""
        ends = [end_s for end_s in (self.overload.until_s, self.ejected_until_s) if end_s is not None and end_s > now_s]
        return max(ends, default=None)

    def warmth(self, now_s: float) -> float:
        """The part of its share, and of its cache, that it gets now: it grows to the whole while it comes back."""
        if self._back_s is None:
            return 1.0
        slow_s = self._slow_start_s
        warmth = max(LEAST_WARMTH, (now_s - self._back_s) / slow_s) if slow_s else 1.0
        if warmth >= 1.0:
            self._back_s = None
            return 1.0
        return warmth
