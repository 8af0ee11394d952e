"""Whether anything is heard of a backend: answers to looks, or any byte for the requests that run there.

A host that is gone, a network that is lost and a process that hangs say nothing at all: no connection ends, and who
waits would wait for as long as an answer may take. Pure but for whom it tells.
"""

from __future__ import annotations

from collections.abc import Callable

# A look without an answer for so long, while nothing else is heard either, is a reason to prefer other backends.
DOUBT_AFTER_S = 1.0


class Pulse:
    """It for one backend. Times are arguments.

    A question of a look is ``missed`` if nothing at all came back in its time: neither its answer nor, meanwhile, a
    byte for a request. ``misses_to_lose`` of them in a row, over ``silence_to_lose_s`` at least, and the backend is
    ``lost``: whoever waits there is told. The first one, or half of it (``overdue``), makes it ``doubtful``, of which
    ``on_doubt`` is told; any sign of life ends that.
    """

    __slots__ = (
        "_asked_s",
        "_asked_sounds",
        "_listeners",
        "_misses_to_lose",
        "_on_doubt",
        "_silence_to_lose_s",
        "_sounds",
        "doubtful",
        "lost",
        "misses",
    )

    def __init__(
        self, misses_to_lose: int, silence_to_lose_s: float, on_doubt: Callable[[], None] = lambda: None
    ) -> None:
        self._misses_to_lose = misses_to_lose
        self._silence_to_lose_s = silence_to_lose_s
        self._on_doubt = on_doubt
        self._listeners: dict[object, Callable[[], None]] = {}
        self._sounds = 0
        self._asked_sounds = 0
        self._asked_s = 0.0
        self.misses = 0
        self.doubtful = False
        self.lost = False

    def heard(self) -> None:
        """A byte came for a request. It is called for each chunk of each stream."""
        self._sounds += 1
        if self.doubtful and not self.lost:
            self._set_doubtful(False)

    def asked(self, now_s: float) -> None:
        """A look asks something."""
        if not self.misses:  # else it is still the silence of before
            self._asked_sounds, self._asked_s = self._sounds, now_s

    def overdue(self) -> None:
        """The answer is late. A busy server answers late, too, but its streams go on."""
        if self._sounds == self._asked_sounds:
            self._set_doubtful(True)

    def answered(self) -> None:
        """It was answered, well or not: somebody is there."""
        self.misses, self.lost = 0, False
        self._set_doubtful(False)

    def missed(self) -> None:
        """It was not answered."""
        if self._sounds != self._asked_sounds:
            self.misses = 0
            return
        self.misses += 1
        self._set_doubtful(True)

    def judge(self, now_s: float) -> bool:
        """Whether the silence has become too long. If so, whoever waits there is told, once."""
        long = now_s - self._asked_s >= self._silence_to_lose_s
        if not self.lost and self.misses >= self._misses_to_lose and long:
            self.lost = True
            listeners, self._listeners = self._listeners, {}
            for tell in listeners.values():
                tell()
        return self.lost

    def listen(self, key: object, tell: Callable[[], None]) -> None:
        """Have ``tell`` called once when the backend is lost; now, if it is. ``key`` is for ``ignore``."""
        if self.lost:
            tell()
        else:
            self._listeners[key] = tell

    def ignore(self, key: object) -> None:
        """Tell it nothing, or nothing more."""
        self._listeners.pop(key, None)

    @property
    def listeners(self) -> int:
        """How many wait for what may never come."""
        return len(self._listeners)

    def _set_doubtful(self, doubtful: bool) -> None:
        if doubtful is not self.doubtful:
            self.doubtful = doubtful
            self._on_doubt()
