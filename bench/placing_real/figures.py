"""What a run comes to: differences of vLLM's own counters and histograms, and what the clients saw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from bench.accounting import percentile

COUNTERS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens")
FIRST_TOKEN = "time_to_first_token_seconds"


@dataclass(frozen=True, slots=True)
class Reading:
    """A server's counters (``COUNTERS``) and its histogram of times to first token, cumulative, by upper bound."""

    counters: Mapping[str, float]
    first_token: Mapping[float, float]

    @classmethod
    def of(cls, page: str) -> Reading:
        """From ``/metrics``. What is not on the page has not been counted yet."""
        counters = dict.fromkeys(COUNTERS, 0.0)
        buckets: dict[float, float] = {}
        for family in text_string_to_metric_families(page):
            name = family.name.removeprefix("vllm:")
            for sample in family.samples:
                if name in counters and sample.name.endswith("_total"):
                    counters[name] += sample.value
                elif name == FIRST_TOKEN and sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
        return cls(counters, buckets)

    def since(self, before: Reading) -> Reading:
        """What was counted after ``before``."""
        return Reading(
            {name: value - before.counters.get(name, 0.0) for name, value in self.counters.items()},
            {bound: value - before.first_token.get(bound, 0.0) for bound, value in self.first_token.items()},
        )

    def __add__(self, other: Reading) -> Reading:
        """Both servers together."""
        return Reading(
            {name: value + other.counters.get(name, 0.0) for name, value in self.counters.items()},
            {bound: value + other.first_token.get(bound, 0.0) for bound, value in self.first_token.items()},
        )


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """The value below which ``share`` of a cumulative histogram lies, evenly spread within a bucket; NaN if empty.

    As Prometheus's ``histogram_quantile``: what lies in the last, unbounded bucket is taken for its lower bound.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return math.nan
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= share * total:
            if math.isinf(bound):
                return lower
            inside = buckets[bound] - below
            return bound if inside <= 0 else lower + (bound - lower) * (share * total - below) / inside
        lower, below = bound, buckets[bound]
    return lower


@dataclass(slots=True)
class Seen:
    """What the clients saw. ``failures`` by kind; a failed request ends its conversation."""

    first_token_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    output_tokens: int = 0
    finished: int = 0
    conversations: int = 0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One target, one time: what the clients saw and what each server counted."""

    name: str
    seen: Seen
    servers: tuple[Reading, ...]


def rows(run: Run) -> dict[str, float]:
    """The figures of a run by the words of the table."""
    both = run.servers[0]
    for reading in run.servers[1:]:
        both = both + reading
    seen = run.seen
    asked = both.counters["prefix_cache_queries"]
    figures = {
        "conversations to their end, %": 100 * seen.finished / max(1, seen.conversations),
        "requests answered": seen.requests - sum(seen.failures.values()),
        "requests failed": sum(seen.failures.values()),
        "minutes": seen.wall_s / 60,
        "output tokens/s": seen.output_tokens / seen.wall_s if seen.wall_s else math.nan,
        "prompt tokens from the prefix cache, %": 100 * both.counters["prefix_cache_hits"] / asked if asked else 0.0,
        "preemptions": both.counters["num_preemptions"],
    }
    for share in (0.5, 0.95, 0.99):
        name = f"p{share * 100:.0f}"
        figures[f"first token as vLLM counts it, {name}, s"] = quantile(both.first_token, share)
    for share in (0.5, 0.95, 0.99):
        name = f"p{share * 100:.0f}"
        seen_s = percentile(seen.first_token_s, share) if seen.first_token_s else math.nan
        figures[f"first token as the client sees it, {name}, s"] = seen_s
    return figures


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row for each figure, a column for each target; of several runs, each after a stroke."""
    names = list(dict.fromkeys(run.name for run in runs))
    by_name = {name: [rows(run) for run in runs if run.name == name] for name in names}
    lines = [f"| | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for row in rows(runs[0]):
        cells = [" / ".join(_number(figures[row]) for figures in by_name[name]) for name in names]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def failures(runs: Sequence[Run]) -> str:
    """Why requests failed, by target."""
    return "\n".join(
        f"{run.name}: {count} x {kind}" for run in runs for kind, count in sorted(run.seen.failures.items())
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"
