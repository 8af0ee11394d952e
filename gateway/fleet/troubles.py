"""What is wrong with what a backend says of itself: known states with a name, told once when they begin and end. Pure.

None of them is an error for a request. Where the KV cache cannot be known for it, placing goes by requests in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gateway.fleet.metrics_text import Oddity, Reading

# So many looks in a row must be without it before a trouble is over, so that one that comes and goes is one.
FORGIVEN_AFTER = 3
# A trouble that comes back within this time is not told anew.
QUIET_S = 300.0


class Trouble(StrEnum):
    """The names in metrics, logs and on the status page. docs/metrics.md says what each means and what to do."""

    NO_METRICS = "no_metrics"
    NOT_METRICS = Oddity.NOT_METRICS
    METRICS_FAILING = "metrics_failing"
    NO_USAGE = "no_usage"
    NO_CAPACITY = "no_capacity"
    BAD_VALUE = Oddity.BAD_VALUE
    DUPLICATE_ENGINE = Oddity.DUPLICATE_ENGINE
    PARTIAL_ENGINES = Oddity.PARTIAL_ENGINES
    COUNTER_BACK = "counter_back"
    CLOCK_JUMP = "clock_jump"
    SEVERAL_SERVERS = "several_servers"
    SAME_SERVER = "same_server"
    LISTED_TWICE = "listed_twice"
    STALLED = "stalled"
    RANKS_IGNORED = "ranks_ignored"


SAID = {
    Trouble.NO_METRICS: "its /metrics has nothing of an engine; its KV cache is unknown",
    Trouble.NOT_METRICS: "what it answers at /metrics is something else; its KV cache is unknown",
    Trouble.METRICS_FAILING: "its metrics cannot be read",
    Trouble.NO_USAGE: "its metrics lack the use of the KV cache (renamed?)",
    Trouble.NO_CAPACITY: "its metrics do not tell the size of the KV cache; placing goes by requests in flight",
    Trouble.BAD_VALUE: "a metric has a value that cannot be (NaN, negative, above its most)",
    Trouble.DUPLICATE_ENGINE: "its metrics have two series of one engine; its KV cache is unknown",
    Trouble.PARTIAL_ENGINES: "not all of its engines tell the use of their KV cache",
    Trouble.COUNTER_BACK: "a counter went back while the process stayed the same",
    Trouble.CLOCK_JUMP: "its start time changed while its counters went on: its clock was set",
    Trouble.SEVERAL_SERVERS: "several servers answer at its URL in turn; its KV cache is unknown",
    Trouble.SAME_SERVER: "it is the same server as another backend; nothing is placed here while that one is up",
    Trouble.LISTED_TWICE: "its URL stands more than once in the settings; it counts once",
    Trouble.STALLED: "requests wait there and none makes progress",
    Trouble.RANKS_IGNORED: "requests are not at the engine they were sent to; their engines are guessed from now on",
}

# These are not seen on a page, but beside it.
UNSEEN = frozenset({Trouble.SAME_SERVER, Trouble.LISTED_TWICE})
# For these the numbers on the page are not those of one server's cache, however sane each looks.
BLINDING = frozenset({Trouble.SEVERAL_SERVERS, Trouble.DUPLICATE_ENGINE, Trouble.NOT_METRICS, Trouble.NO_METRICS})


@dataclass(frozen=True, slots=True)
class TroubleRecord:
    """A trouble in force, since ``age_s`` seconds."""

    kind: Trouble
    detail: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """A trouble that began (or ended) and is worth a line in the log."""

    kind: Trouble
    detail: str
    began: bool


@dataclass(slots=True)
class _State:
    detail: str
    since_s: float
    told: bool
    without: int = 0  # looks in a row


class Troubles:
    """The troubles of one backend. Times are arguments."""

    def __init__(self) -> None:
        self._now: dict[Trouble, _State] = {}
        self._ended_s: dict[Trouble, float] = {}

    def __contains__(self, kind: Trouble) -> bool:
        return kind in self._now

    @property
    def blinding(self) -> bool:
        """Whether the KV cache cannot be known."""
        return not BLINDING.isdisjoint(self._now)

    @property
    def ever(self) -> frozenset[Trouble]:
        """Those in force and those there were."""
        return frozenset(self._now) | frozenset(self._ended_s)

    def looked(self, found: Mapping[Trouble, str], now_s: float) -> list[Turn]:
        """A look found these, with a detail each, and none but these. What is to be told of it."""
        turns = [turn for kind, detail in found.items() if (turn := self.begin(kind, detail, now_s)) is not None]
        for kind, state in list(self._now.items()):
            if kind in found or kind in UNSEEN:
                continue
            state.without += 1
            if state.without >= FORGIVEN_AFTER:
                turns += self.end(kind, now_s)
        return turns

    def begin(self, kind: Trouble, detail: str, now_s: float) -> Turn | None:
        """It is there (still)."""
        state = self._now.get(kind)
        if state is not None:
            state.detail, state.without = detail, 0
            if state.told or now_s - state.since_s < QUIET_S:
                return None
            state.told = True  # it has come to stay
            return Turn(kind, detail, True)
        told = now_s - self._ended_s.get(kind, -QUIET_S) >= QUIET_S
        self._now[kind] = _State(detail, now_s, told)
        return Turn(kind, detail, True) if told else None

    def end(self, kind: Trouble, now_s: float) -> list[Turn]:
        """It is over."""
        state = self._now.pop(kind, None)
        if state is None:
            return []
        self._ended_s[kind] = now_s
        return [Turn(kind, state.detail, False)] if state.told else []

    def records(self, now_s: float) -> tuple[TroubleRecord, ...]:
        """Those in force."""
        return tuple(
            TroubleRecord(kind, state.detail, max(0.0, now_s - state.since_s))
            for kind, state in sorted(self._now.items())
        )


def troubles_of(reading: Reading) -> dict[Trouble, str]:
    """What is wrong with a page of metrics by itself."""
    if reading.empty:
        return {Trouble.NO_METRICS: ""}
    found = {Trouble(oddity.value): "" for oddity in reading.odd}
    if Trouble.NOT_METRICS in found:
        return found
    if reading.usage_ratio is None and not found:
        found[Trouble.NO_USAGE] = ""
    if reading.block_size_tokens is None or (reading.blocks is None and reading.cache_tokens is None):
        found[Trouble.NO_CAPACITY] = ""
    return found
