"""What a run comes to: goodput, latencies, preemptions, cache hits, fairness."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.placing.lab import Outcome, Run


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy under one load. Seconds; ``goodput`` in requests a second that kept their objective.

    ``hit_share``: cached prompt tokens as a share of an oracle's, which has seen every earlier prompt and forgets
    nothing. ``jain``: fairness over keys of (tokens served ÷ tokens asked for) within the load's time.
    """

    policy: str
    requests: int
    finished: int
    refused: int
    goodput: float
    first_token_s: tuple[float, float, float]
    gap_s: tuple[float, float, float]
    preemptions: int
    hit_share: float
    jain: float


def figures(run: Run, duration_s: float) -> Figures:
    """The figures of a run. Requests that never began count with the time they had waited."""
    outcomes = run.outcomes
    waits = sorted(
        (run.lasted_s if item.first_token_s is None else item.first_token_s) - item.request.sent_s
        for item in outcomes
        if not item.refused and not math.isinf(item.request.session.kind.first_token_limit_s)
    )
    cached = sum(item.cached_tokens for item in outcomes)
    return Figures(
        policy=run.policy,
        requests=len(outcomes),
        finished=sum(item.finished_s is not None for item in outcomes),
        refused=sum(item.refused for item in outcomes),
        goodput=sum(item.kept for item in outcomes) / duration_s,
        first_token_s=(_at(waits, 0.5), _at(waits, 0.95), _at(waits, 0.99)),
        gap_s=tuple(_weighted(run.gaps, share) for share in (0.5, 0.95, 0.99)),  # type: ignore[arg-type]
        preemptions=run.preemptions,
        hit_share=cached / run.oracle_tokens if run.oracle_tokens else 0.0,
        jain=jain(_service(outcomes)),
    )


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has all."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


def table(rows: Sequence[Figures]) -> str:
    """The rows, one line a policy."""
    head = (
        f"{'policy':<24}{'reqs':>7}{'done':>7}{'ref':>5}{'goodput':>9}"
        f"{'ttft p50':>9}{'p95':>8}{'p99':>8}{'gap p50':>9}{'p99':>7}{'preempt':>9}{'hits':>7}{'jain':>6}"
    )
    lines = [head]
    for row in rows:
        first, gap = row.first_token_s, row.gap_s
        lines.append(
            f"{row.policy:<24}{row.requests:>7}{row.finished:>7}{row.refused:>5}{row.goodput:>9.2f}"
            f"{first[0]:>9.2f}{first[1]:>8.2f}{first[2]:>8.2f}{gap[0] * 1000:>7.0f}ms{gap[2] * 1000:>5.0f}ms"
            f"{row.preemptions:>9}{row.hit_share:>7.1%}{row.jain:>6.2f}"
        )
    return "\n".join(lines)


def _service(outcomes: Sequence[Outcome]) -> list[float]:
    asked: dict[str, float] = defaultdict(float)
    served: dict[str, float] = defaultdict(float)
    for item in outcomes:
        key = item.request.session.key
        asked[key] += 1
        served[key] += item.kept
    return [served[key] / asked[key] for key in asked]


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _weighted(counts: Counter[float], share: float) -> float:
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * total:
            return value
    return 0.0
