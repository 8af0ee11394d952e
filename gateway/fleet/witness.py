"""What the readings of one backend's metrics say, one after the other: of whom they are, and what is wrong. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.fleet.hits import Hits, Verdict
from gateway.fleet.identity import Identity, Sequel
from gateway.fleet.metrics_text import Reading
from gateway.fleet.troubles import Trouble, Troubles, Turn, troubles_of

# Requests without any progress for so long may be paused; for so long, something is wrong.
STUCK_S = 5.0
STALLED_S = 60.0


@dataclass(frozen=True, slots=True)
class Heard:
    """What a reading says beside its numbers.

    ``restarted``: another process answers than before. ``blind``: its numbers are not those of one server's cache.
    ``moved``: something happens there. ``stuck``: requests are there, and nothing has happened for a while. ``turns``:
    what is to be told. ``verdict``: what the prefix cache made of our guesses.
    """

    restarted: bool
    blind: bool
    moved: bool
    stuck: bool
    turns: list[Turn]
    verdict: Verdict | None


class Witness:
    """All of it for one backend. Times are arguments."""

    def __init__(self) -> None:
        self.troubles = Troubles()
        self.identity = Identity()
        self.hits = Hits()
        self._last = Reading()
        self._moved_s = 0.0

    @property
    def silent(self) -> bool:
        """Whether nothing is to be learned from its metrics, however often they are read."""
        return Trouble.NO_METRICS in self.troubles or Trouble.NOT_METRICS in self.troubles

    def read(self, reading: Reading, in_flight: int, now_s: float) -> Heard:
        """Take in the next reading, while ``in_flight`` requests of ours are there."""
        before, self._last = self._last, reading
        sequel = self.identity.read(reading)
        found = troubles_of(reading)
        if self.identity.alternating:
            found[Trouble.SEVERAL_SERVERS] = ""
        elif sequel is Sequel.COUNTER_BACK:
            found[Trouble.COUNTER_BACK] = _gone_back(before, reading)
        elif sequel is Sequel.CLOCK_JUMP:
            found[Trouble.CLOCK_JUMP] = ""
        restarted = sequel is Sequel.RESTART
        if restarted:
            self.hits.forget()
        moved = _gist(before) != _gist(reading)
        waits = bool(in_flight or reading.running or reading.waiting)
        if before.counters != reading.counters or not waits or not reading.counters:
            self._moved_s = now_s
        stuck_s = now_s - self._moved_s
        if stuck_s >= STALLED_S and not self.identity.alternating:
            found[Trouble.STALLED] = f"for {stuck_s:.0f} s"
        turns = self.troubles.looked(found, now_s)
        blind = self.troubles.blinding
        verdict = None
        if not blind:
            verdict = self.hits.read(reading.queried_tokens, reading.hit_tokens, now_s)
        return Heard(restarted, blind, moved, stuck_s >= STUCK_S, turns, verdict)

    def failed(self, detail: str, now_s: float) -> list[Turn]:
        """The metrics could not be read. What is to be told of it."""
        turn = self.troubles.begin(Trouble.METRICS_FAILING, detail, now_s)
        return [turn] if turn is not None else []


def _gist(reading: Reading) -> tuple[object, ...]:
    return (reading.running, reading.waiting, reading.usage_ratio, reading.counters)


def _gone_back(before: Reading, after: Reading) -> str:
    back = [name for name, value in before.counters.items() if after.counters.get(name, value) < value]
    return ", ".join(sorted(back))
