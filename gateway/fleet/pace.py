"""How long to wait before looking at a backend's metrics again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# From this share of the cache on, a second is long: blocks that were free are gone.
NEARLY_FULL = 0.8
# A look that takes long is a load, or meets one: no more than a fifth of the time is spent on looking.
LEAST_REST = 4.0
# How fast the pause grows while nothing happens.
GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look found. ``busy``: requests of ours are there. ``kv_ratio``: reserved share of the cache, if known.
    ``waiting``: requests in the server's own queue. ``moved``: its gauges or counters are not what they were.
    ``failed``: it did not answer, or not what was asked. ``doubtful``: whether it still lives is the question."""

    busy: bool = False
    kv_ratio: float | None = None
    waiting: int | None = None
    moved: bool = False
    failed: bool = False
    doubtful: bool = False


class Pace:
    """The pause between two looks: ``usual_s`` while something happens, ``fastest_s`` while room is scarce or the
    backend in doubt, and more and more up to ``slowest_s`` while nothing does. Bounds that contradict ``usual_s`` give
    way to it."""

    __slots__ = ("_fastest_s", "_last_s", "_slowest_s", "_usual_s")

    def __init__(self, fastest_s: float, usual_s: float, slowest_s: float) -> None:
        self._fastest_s = min(fastest_s, usual_s)
        self._usual_s = usual_s
        self._slowest_s = max(slowest_s, usual_s)
        self._last_s = usual_s

    @property
    def leisurely(self) -> bool:
        """Whether the pause has grown beyond the usual one, so that what begins now should be looked at early."""
        return self._last_s > self._usual_s

    def pause_s(self, sight: Sight, took_s: float) -> float:
        """Seconds until the next look, after one that took ``took_s``."""
        if sight.doubtful:  # a server that answers nothing has no work with a look
            self._last_s = self._usual_s
            return self._fastest_s
        scarce = bool(sight.waiting) or (sight.kv_ratio is not None and sight.kv_ratio >= NEARLY_FULL)
        if sight.failed:
            pause_s = self._usual_s
        elif scarce:
            pause_s = self._fastest_s
        elif sight.busy or sight.moved:
            pause_s = self._usual_s
        else:
            pause_s = max(self._usual_s, self._last_s * GROWTH)
        self._last_s = min(self._slowest_s, max(pause_s, LEAST_REST * took_s))
        return self._last_s

    def hurry(self) -> None:
        """Something begins: the next pause grows from the usual one."""
        self._last_s = self._usual_s
