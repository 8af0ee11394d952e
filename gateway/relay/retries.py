"""How many failed attempts may be repeated: a share of the requests, so that retries cannot drown who is left."""

from __future__ import annotations

# So many may be repeated at once before the share counts: one backend that dies takes its running requests with it.
AT_ONCE = 50.0


class RetryBudget:
    """Earned by requests, spent on retries. ``denied`` counts those there was nothing left for."""

    __slots__ = ("_left", "_most", "_share", "denied")

    def __init__(self, share: float, at_once: float = AT_ONCE) -> None:
        self._share = share
        self._most = at_once
        self._left = at_once if share else 0.0
        self.denied = 0

    def earn(self) -> None:
        """A request came."""
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Whether one more attempt may be made."""
        if self._left < 1.0:
            self.denied += 1
            return False
        self._left -= 1.0
        return True

    def give_back(self) -> None:
        """The attempt was not made after all."""
        self._left = min(self._most, self._left + 1.0)
