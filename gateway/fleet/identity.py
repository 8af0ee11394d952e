"""Whose metrics these are: the same process as before, a new one, one of several behind one URL, or another's. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gateway.fleet.metrics_text import Oddity, Reading

# Processes remembered at one URL.
REMEMBERED = 8
# After so many readings of one process in a row there are no others behind the URL any more.
SETTLED_AFTER = 20
# Without a name for a process, so many counters that go back in so many readings are no restarts.
BACKS, BACKS_IN = 3, 20

Name = tuple[float, float]


class Sequel(StrEnum):
    """What a reading is to the one before it."""

    FIRST = "first"
    SAME = "same"
    RESTART = "restart"
    OTHER = "other"  # one of several servers that answer in turn
    COUNTER_BACK = "counter_back"
    CLOCK_JUMP = "clock_jump"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A process at its last reading."""

    name: Name | None
    shape: tuple[object, ...]
    counters: Mapping[str, float]


class Identity:
    """Who answers at one URL. A process is named by the times it started and made its first counter, as far as told."""

    def __init__(self) -> None:
        self._last: _Seen | None = None
        self._before: OrderedDict[Name, None] = OrderedDict()  # processes that answered before this one
        self._alternating = False
        self._steady = 0  # readings of one process in a row
        self._backs: list[int] = []  # at which readings counters went back
        self._readings = 0

    @property
    def alternating(self) -> bool:
        """Whether several servers answer in turn."""
        return self._alternating

    @property
    def name(self) -> Name | None:
        """The process that answered last; ``None`` if it has none to tell it by."""
        return self._last.name if self._last is not None else None

    def read(self, reading: Reading) -> Sequel:
        """Take in the next reading."""
        if reading.empty or Oddity.NOT_METRICS in reading.odd:
            return Sequel.SAME  # says nothing of anybody
        self._readings += 1
        before = self._last
        now = self._last = _seen(reading, before)
        if before is None:
            return Sequel.FIRST
        sequel = self._sequel(before, now)
        if sequel in (Sequel.SAME, Sequel.CLOCK_JUMP, Sequel.COUNTER_BACK):
            self._steady += 1
            if self._steady >= SETTLED_AFTER:
                self._alternating = False
                self._backs.clear()
            return sequel
        self._steady = 0
        if before.name is not None and now.name != before.name:
            self._before[before.name] = None
            self._before.move_to_end(before.name)
            if len(self._before) > REMEMBERED:
                self._before.popitem(last=False)
        return sequel

    def _sequel(self, before: _Seen, now: _Seen) -> Sequel:
        back = any(now.counters.get(key, value) < value for key, value in before.counters.items())
        if before.name is not None and now.name is not None and before.name != now.name:
            if now.name in self._before:
                # A process does not come back once another has taken its place.
                self._alternating = True
            if self._alternating:
                return Sequel.OTHER
            return Sequel.CLOCK_JUMP if _goes_on(before, now) else Sequel.RESTART
        if not back:
            return Sequel.SAME
        if now.name is not None and now.name[1] > 0:
            return Sequel.COUNTER_BACK
        self._backs = [at for at in self._backs if self._readings - at < BACKS_IN] + [self._readings]
        if len(self._backs) >= BACKS:
            self._alternating = True
        return Sequel.OTHER if self._alternating else Sequel.RESTART


def _seen(reading: Reading, before: _Seen | None) -> _Seen:
    """What a reading leaves unsaid stays as it was."""
    name = before.name if before is not None else None
    if reading.started_s is not None or reading.created_s is not None:
        name = (reading.started_s or 0.0, reading.created_s or 0.0)
    shape = (reading.blocks, reading.block_size_tokens, reading.cache_tokens, reading.engines)
    return _Seen(name, shape, {**(before.counters if before is not None else {}), **reading.counters})


def _goes_on(before: _Seen, now: _Seen) -> bool:
    """Whether it is one process that tells another start time. Its counters have grown, and it made them when it did.

    The time at which a process made a counter is kept, not reckoned anew; where it is told, it decides.
    """
    if before.name is None or now.name is None or before.shape != now.shape:
        return False
    if before.name[1] or now.name[1]:
        return before.name[1] == now.name[1]
    if before.counters.keys() != now.counters.keys():
        return False
    grown = [now.counters[key] - value for key, value in before.counters.items()]
    return bool(grown) and min(grown) >= 0 < max(grown) and max(before.counters.values()) > 0
