"""The circuit breaker of one backend: failures in a row open it, time lets one request try, a success closes it."""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum


class BreakerState(StrEnum):
    """Closed lets everything pass, open nothing, half-open one request at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts the failures of requests, not of scrapes: a dead engine's HTTP server may go on answering scrapes."""

    def __init__(self, failures_to_open: int, reopen_after_s: float) -> None:
        self._failures_to_open = failures_to_open
        self._reopen_after_s = reopen_after_s
        self._failures = 0
        self._opened_s: float | None = None
        self._last_opened_s: float | None = None  # stays when it closes
        self._trial: Hashable | None = None

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self._failures

    @property
    def half_open_at_s(self) -> float | None:
        """When an open breaker lets one request try; ``None`` if it is closed."""
        return None if self._opened_s is None else self._opened_s + self._reopen_after_s

    def state(self, now_s: float) -> BreakerState:
        """The state at ``now_s``."""
        half_open_at_s = self.half_open_at_s
        if half_open_at_s is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now_s >= half_open_at_s else BreakerState.OPEN

    def accepts(self, now_s: float) -> bool:
        """Whether a request may be sent: closed, or half open and nobody is trying."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def placed(self, key: Hashable, now_s: float) -> None:
        """A request is being sent; in a half-open breaker it is the one that tries."""
        if self._opened_s is not None and self._trial is None and self.state(now_s) is BreakerState.HALF_OPEN:
            self._trial = key

    def released(self, key: Hashable) -> None:
        """A request is over. If it was trying and nothing was learned, another may try."""
        if self._trial is not None and self._trial == key:
            self._trial = None

    def succeeded(self) -> bool:
        """A backend answered. Returns whether that closed the breaker."""
        was_open = self._opened_s is not None
        self._failures = 0
        self._opened_s = self._trial = None
        return was_open

    def failed(self, now_s: float, placed_s: float | None = None) -> bool:
        """A request failed that was placed at ``placed_s``. Returns whether that opened the breaker (anew).

        One that was placed before the breaker opened tells of the trouble of then, however late it fails: it must
        neither end a trial it has nothing to do with nor count against a backend that has come back.
        """
        if placed_s is not None and self._last_opened_s is not None and placed_s < self._last_opened_s:
            return False
        self._failures += 1
        if self._opened_s is not None:
            # Of many requests that fail at once only a trial's failure prolongs the rest.
            if self.state(now_s) is BreakerState.HALF_OPEN:
                self._opened_s = self._last_opened_s = now_s
                self._trial = None
                return True
            return False
        if self._failures >= self._failures_to_open:
            self._opened_s = self._last_opened_s = now_s
            return True
        return False
