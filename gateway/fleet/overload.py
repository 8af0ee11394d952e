"""A backend that answers 503 since its own queue is full: it rests a moment, a longer one each time it says so again.

That is no failure: the server is well, and takes less than placing thinks. Pure.
"""

from __future__ import annotations

FIRST_REST_S = 0.25
LONGEST_REST_S = 8.0


class Overload:
    """The rests of one backend. Times are arguments."""

    __slots__ = ("_rest_s", "_since_s", "until_s")

    def __init__(self) -> None:
        self.until_s: float | None = None
        self._since_s = 0.0
        self._rest_s = 0.0

    def rests(self, now_s: float) -> bool:
        """Whether nothing is to be sent now."""
        return self.until_s is not None and now_s < self.until_s

    def refused(self, placed_s: float, now_s: float) -> float | None:
        """A request placed at ``placed_s`` was refused. Seconds of the rest that begins; ``None`` if it was sent before
        the last one did: of many refused together one rest is enough."""
        if self.until_s is not None and placed_s < self._since_s:
            return None
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s) if self._rest_s else FIRST_REST_S
        self._since_s, self.until_s = now_s, now_s + self._rest_s
        return self._rest_s

    def answered(self, now_s: float) -> bool:
        """A request was taken. Returns whether that ends an overload; a rest under way is rested out."""
        if not self._rest_s or self.rests(now_s):
            return False
        self._rest_s, self.until_s = 0.0, None
        return True

    def forget(self) -> None:
        """Another process answers now."""
        self._rest_s, self.until_s = 0.0, None
