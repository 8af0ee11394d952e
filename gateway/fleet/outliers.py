"""Which backends are far slower to begin, or fail far more often, than their peers, and rest for it. Pure.

Peers are the backends that serve the same base models. A first byte is held against those of the peers for prompts of
the same size (tokens to be worked on before it, powers of two), so that long prompts and long queues of ours are no
sign. What is judged is the median over a backend's recent requests of the logarithm of (its time ÷ the peers' median),
against the median and the median absolute deviation of the other peers; requests that still wait for their first byte
count with the time they have waited. Failures are judged as a share of recent requests in the same way.

An outlier rests; each further time it rests longer. No more than a share of the peers rest at once. A backend that
comes back just as slow is not sick but slow, and placing knows what slow costs: half of its slowness is its own then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, floor, log
from statistics import median

# What happened longer ago says nothing of now; nor do more than the last so many requests.
WINDOW_S = 120.0
MOST_SAMPLES = 64
# A median of fewer says nothing; three peers at least, for there is no middle of two.
LEAST_SAMPLES = 8
LEAST_IN_CLASS = 3
LEAST_PEERS = 3
LEAST_ENDED = 10
# Without a first byte since they were placed, so many requests that wait too long are as good as a median.
LEAST_SILENT = 3
# Nobody notices less than this.
LEAST_EXCESS_S = 0.5
# Robust standard deviations: of a normal distribution 1.4826 × MAD is one.
DEVIATIONS = 3 * 1.4826
# A first rest, twice that, three times that … up to so many times.
LONGEST_RESTS = 10
SMALLEST_CLASS_BITS = 9  # prompts up to 512 tokens are alike


@dataclass(frozen=True, slots=True)
class Rules:
    """``latency_factor``: so many times the peers' median is too slow. ``failure_ratio``: such a share of failures is
    too large. ``rest_s``: the first rest. ``most_ratio``: the share of peers that may rest at once."""

    latency_factor: float = 5.0
    failure_ratio: float = 0.3
    rest_s: float = 30.0
    most_ratio: float = 0.34


@dataclass(frozen=True, slots=True)
class Ejected:
    """A backend that rests from now on for ``rest_s``, and why."""

    name: str
    reason: str
    rest_s: float


def size_class(tokens: int) -> int:
    """Prompts of one class are at most twice as long as each other, but for the shortest."""
    return max(SMALLEST_CLASS_BITS, tokens.bit_length())


class Recent:
    """What one backend did lately. Times are arguments."""

    __slots__ = ("_begun", "_ended", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[int, float]] = {}  # size class, when it was placed
        self._begun: deque[tuple[int, float, float]] = deque(maxlen=MOST_SAMPLES)  # size class, seconds, when
        self._ended: deque[tuple[float, bool]] = deque(maxlen=MOST_SAMPLES)  # when, whether it failed

    def placed(self, key: Hashable, tokens: int, now_s: float) -> None:
        """A request is sent; ``tokens`` are to be worked on before its first byte."""
        self._waiting[key] = (size_class(tokens), now_s)

    def began(self, key: Hashable, now_s: float) -> None:
        """Its first byte came."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._begun.append((waiting[0], max(0.0, now_s - waiting[1]), now_s))

    def timed_out(self, key: Hashable, now_s: float) -> None:
        """Its first byte was waited for in vain: it took longer than this."""
        self.began(key, now_s)

    def gone(self, key: Hashable) -> None:
        """It is over, and if it had not begun nothing is learned."""
        self._waiting.pop(key, None)

    def ended(self, failed: bool, now_s: float) -> None:
        """A request was answered, or failed for the backend's sake."""
        self._ended.append((now_s, failed))

    def clear(self) -> None:
        """What it did before does not count any more."""
        self._begun.clear()
        self._ended.clear()

    def begun(self, now_s: float) -> list[tuple[int, float]]:
        """Size class and seconds of recent first bytes."""
        return [(size, took_s) for size, took_s, at_s in self._begun if now_s - at_s <= WINDOW_S]

    def last_begun_s(self) -> float | None:
        """When the last first byte came."""
        return self._begun[-1][2] if self._begun else None

    def waiting(self, now_s: float) -> list[tuple[int, float]]:
        """Size class and seconds of those that wait for their first byte."""
        return [(size, max(0.0, now_s - placed_s)) for size, placed_s in self._waiting.values()]

    def failure_ratio(self, now_s: float) -> float | None:
        """The share of recent requests that failed; ``None`` while there are few."""
        ended = [failed for at_s, failed in self._ended if now_s - at_s <= WINDOW_S]
        return sum(ended) / len(ended) if len(ended) >= LEAST_ENDED else None


@dataclass(slots=True)
class _Record:
    """The past of one backend: until when it rests, how often it did, how slow it is by nature (logarithm)."""

    until_s: float | None = None
    times: int = 0
    calm_since_s: float = 0.0
    nature: float = 0.0


class Outliers:
    """Judges all backends from time to time, and remembers who rests."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._records: dict[str, _Record] = {}
        self.ejections: dict[str, int] = {}

    def until_s(self, name: str) -> float | None:
        """Until when a backend rests; ``None`` if it does not."""
        record = self._records.get(name)
        return record.until_s if record is not None else None

    def judge(self, peers: Sequence[Mapping[str, Recent]], now_s: float) -> tuple[list[Ejected], list[str]]:
        """Who rests from now on, and who is back. ``peers``: groups of backends that serve the same and are up."""
        ejected: list[Ejected] = []
        back = [
            name for name, record in self._records.items() if record.until_s is not None and now_s >= record.until_s
        ]
        for name in back:
            self._end(name, now_s)
        for group in peers:
            resting = [name for name in group if self.until_s(name) is not None]
            most = floor(self._rules.most_ratio * len(group)) if len(group) >= LEAST_PEERS else 0
            for name in sorted(resting, key=lambda name: self.until_s(name) or 0.0)[: max(0, len(resting) - most)]:
                # Others went away: who rests is needed now.
                self._end(name, now_s)
                group[name].clear()
                back.append(name)
            if most > len(resting):
                ejected += self._judged(group, most - len(resting), now_s)
        return ejected, back

    def _judged(self, group: Mapping[str, Recent], most: int, now_s: float) -> list[Ejected]:
        awake = {name: recent for name, recent in group.items() if self.until_s(name) is None}
        slow, failing = self._slow(awake, now_s), _failing(awake, self._rules.failure_ratio, now_s)
        for name in awake.keys() - slow.keys() - failing.keys():
            self._calm(name, now_s)
        # A failing backend is worse than a slow one.
        worst = sorted(failing, key=lambda name: -failing[name])
        worst += sorted(slow.keys() - failing.keys(), key=lambda name: -slow[name])
        ejected = []
        for name in worst[:most]:
            if name in failing:
                reason = f"{failing[name]:.0%} of its requests fail, far more than at its peers"
            else:
                reason = f"first bytes take {exp(slow[name]):.1f} times as long as at its peers"
                record = self._records.setdefault(name, _Record())
                record.nature += (slow[name] - record.nature) / 2
            ejected.append(self._eject(name, reason, now_s))
        return ejected

    def _slow(self, group: Mapping[str, Recent], now_s: float) -> dict[str, float]:
        """Who is too slow to begin: the logarithm of how many times slower than its peers."""
        usual_s = _usual(group, now_s)
        least = log(self._rules.latency_factor)
        scores: dict[str, tuple[float, float]] = {}
        for name, recent in group.items():
            slowness = _score(recent, usual_s, self._rules.latency_factor, now_s)
            if slowness is not None:
                scores[name] = slowness
        if len(scores) < LEAST_PEERS:
            return {}
        found = {}
        for name, (score, excess_s) in scores.items():
            middle, spread = _others({peer: each for peer, (each, _) in scores.items()}, name)
            excess = score - middle
            record = self._records.get(name)
            nature = record.nature if record is not None else 0.0
            if excess - nature > max(least, DEVIATIONS * spread) and excess_s >= LEAST_EXCESS_S:
                found[name] = excess
            elif record is not None:
                record.nature = min(nature, max(0.0, excess))  # what was slow for long may be fast now
        return found

    def _eject(self, name: str, reason: str, now_s: float) -> Ejected:
        record = self._records.setdefault(name, _Record())
        record.times = min(LONGEST_RESTS, record.times + 1)
        rest_s = self._rules.rest_s * record.times
        record.until_s = now_s + rest_s
        self.ejections[name] = self.ejections.get(name, 0) + 1
        return Ejected(name, reason, rest_s)

    def _end(self, name: str, now_s: float) -> None:
        record = self._records[name]
        record.until_s, record.calm_since_s = None, now_s

    def _calm(self, name: str, now_s: float) -> None:
        """For each rest's time that it behaves, the next one is shorter by one."""
        record = self._records.get(name)
        if record is not None and record.times and now_s - record.calm_since_s >= self._rules.rest_s:
            record.times -= 1
            record.calm_since_s = now_s


def _usual(group: Mapping[str, Recent], now_s: float) -> dict[int, float]:
    """The peers' median seconds to a first byte by size class: of each peer's median, where three have one."""
    by_class: dict[int, list[float]] = {}
    for recent in group.values():
        own: dict[int, list[float]] = {}
        for size, took_s in recent.begun(now_s):
            own.setdefault(size, []).append(took_s)
        for size, times in own.items():
            if len(times) >= LEAST_IN_CLASS:
                by_class.setdefault(size, []).append(median(times))
    return {size: median(times) for size, times in by_class.items() if len(times) >= LEAST_PEERS - 1}


def _score(recent: Recent, usual_s: Mapping[int, float], factor: float, now_s: float) -> tuple[float, float] | None:
    """The logarithm of a backend's slowness, and the seconds it takes longer; ``None`` if too little is known."""
    floor_s = 1e-3  # a clock's tick; and zero has no logarithm
    samples = [
        (log(max(floor_s, took_s) / max(floor_s, usual_s[size])), took_s - usual_s[size])
        for size, took_s in recent.begun(now_s)
        if size in usual_s
    ]
    late = [
        (log(waited_s / max(floor_s, usual_s[size])), waited_s - usual_s[size], waited_s)
        for size, waited_s in recent.waiting(now_s)
        if size in usual_s and waited_s > max(floor_s, factor * usual_s[size])
    ]
    last_s = recent.last_begun_s()
    silent = [item for item in late if last_s is None or now_s - item[2] > last_s]
    if len(silent) >= LEAST_SILENT:
        return median(item[0] for item in silent), median(item[1] for item in silent)
    samples += [(score, excess_s) for score, excess_s, _ in late]
    if len(samples) < LEAST_SAMPLES:
        return None
    return median(score for score, _ in samples), median(excess_s for _, excess_s in samples)


def _failing(group: Mapping[str, Recent], least: float, now_s: float) -> dict[str, float]:
    """Who fails too often: the share of its requests that do."""
    ratios: dict[str, float] = {}
    for name, recent in group.items():
        ratio = recent.failure_ratio(now_s)
        if ratio is not None:
            ratios[name] = ratio
    if len(ratios) < LEAST_PEERS:
        return {}
    found = {}
    for name, ratio in ratios.items():
        middle, spread = _others(ratios, name)
        if ratio >= least and ratio - middle > max(least / 2, DEVIATIONS * spread):
            found[name] = ratio
    return found


def _others(values: Mapping[str, float], name: str) -> tuple[float, float]:
    """Median and median absolute deviation of all but one: of three peers a sick one would be half of the spread."""
    others = [value for peer, value in values.items() if peer != name]
    middle = median(others)
    return middle, median(abs(value - middle) for value in others)
