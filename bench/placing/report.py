"""What a run comes to: goodput, latencies, preemptions, cache hits, fairness, balance.

*Goodput* is requests a second that kept their objective: the first token within its kind's limit, and tokens at least
every 0.1 s on average. A request's *work* is its prompt tokens and its output tokens.

*Fairness* is Jain's index over the keys of (work served ÷ fair share). A key's fair share is its max-min share of all
that the policy served: a key that asked for less than an equal part gets what it asked for, and the others share the
rest equally. So a policy that serves little is not unfair, one that lets a flooding key crowd the others out is, and so
is one that starves the flooder. For ``jain`` only work of requests that kept their objective is served; since
objectives differ, it also tells whether kinds of requests fare differently. For ``served_jain`` all work that was
finished within the load's time is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.placing.terms import Outcome, Run
from bench.placing.traffic import FLOOD


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Requests of one kind: how many, goodput (a second), and seconds to the first token (p50, p95, p99)."""

    requests: int
    goodput: float
    first_token_s: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy under one load. Seconds; percentiles are p50, p95, p99; ``goodput`` in requests a second.

    ``hit_share``: cached prompt tokens as a share of those of an oracle that forgets nothing; ``pooled_share``: of one
    that has the fleet's memory as one (``oracle.py``); both over requests whose answer began. ``balance``: tokens
    worked on (uncached prompts, and outputs) of the busiest backend ÷ those of the mean. ``others_first_token_s``: of
    the keys that do not flood. ``lost`` ended without an answer since a backend failed; ``overflows`` counts answers
    that the prompt does not fit.
    """

    policy: str
    requests: int
    finished: int
    refused: int
    lost: int
    overflows: int
    goodput: float
    first_token_s: tuple[float, float, float]
    others_first_token_s: tuple[float, float, float]
    gap_s: tuple[float, float, float]
    preemptions: int
    hit_share: float
    pooled_share: float
    jain: float
    balance: float
    kinds: dict[str, KindFigures]
    served_jain: float


def figures(run: Run, duration_s: float) -> Figures:
    """The figures of a run. Requests that never began count with the time they had waited."""
    outcomes = run.outcomes
    began = [item for item in outcomes if item.first_token_s is not None]
    cached = sum(item.cached_tokens for item in began)
    kinds: dict[str, list[Outcome]] = defaultdict(list)
    for item in outcomes:
        kinds[item.request.session.kind.name].append(item)
    return Figures(
        policy=run.policy,
        requests=len(outcomes),
        finished=sum(item.finished_s is not None for item in outcomes),
        refused=sum(item.refused for item in outcomes),
        lost=sum(item.lost for item in outcomes),
        overflows=sum(item.overflows for item in outcomes),
        goodput=sum(item.kept for item in outcomes) / duration_s,
        first_token_s=_waits(outcomes, run.lasted_s),
        others_first_token_s=_waits([item for item in outcomes if item.request.session.key != FLOOD], run.lasted_s),
        gap_s=(_weighted(run.gaps, 0.5), _weighted(run.gaps, 0.95), _weighted(run.gaps, 0.99)),
        preemptions=run.preemptions,
        hit_share=_share(cached, sum(item.oracle_tokens for item in began)),
        pooled_share=_share(cached, sum(item.pooled_tokens for item in began)),
        jain=jain(_service(outcomes, lambda item: item.kept)),
        balance=_balance(outcomes, run.backends),
        kinds={
            name: KindFigures(
                len(found),
                sum(item.kept for item in found) / duration_s,
                _waits(found, run.lasted_s, unlimited=True),
            )
            for name, found in sorted(kinds.items())
        },
        served_jain=jain(_service(outcomes, lambda item: _done(item, duration_s))),
    )


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has all."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


def fair_shares(demands: Mapping[str, float], total: float) -> dict[str, float]:
    """Max-min shares of ``total``: nobody gets more than it asks for, and who gets less gets no less than any other."""
    shares: dict[str, float] = {}
    left = total
    for place, (key, demand) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
        shares[key] = min(demand, left / (len(demands) - place))
        left -= shares[key]
    return shares


def _waits(outcomes: Sequence[Outcome], lasted_s: float, *, unlimited: bool = False) -> tuple[float, float, float]:
    waits = sorted(
        (lasted_s if item.first_token_s is None else item.first_token_s) - item.request.sent_s
        for item in outcomes
        if not (item.refused or item.lost)
        and (unlimited or not math.isinf(item.request.session.kind.first_token_limit_s))
    )
    return _at(waits, 0.5), _at(waits, 0.95), _at(waits, 0.99)


def _done(item: Outcome, duration_s: float) -> bool:
    return item.finished_s is not None and item.finished_s <= duration_s


def _service(outcomes: Sequence[Outcome], counts: Callable[[Outcome], bool]) -> list[float]:
    """Each key's work that counts as served, as a share of its fair share of all that does."""
    asked: dict[str, float] = defaultdict(float)
    served: dict[str, float] = defaultdict(float)
    for item in outcomes:
        work_tokens = item.request.prompt_tokens + item.request.answer_tokens
        asked[item.request.session.key] += work_tokens
        served[item.request.session.key] += work_tokens * counts(item)
    fair = fair_shares(asked, sum(served.values()))
    return [served[key] / share for key, share in fair.items() if share]


def _balance(outcomes: Sequence[Outcome], backends: int) -> float:
    tokens = [0] * backends
    for item in outcomes:
        if item.backend is not None:
            tokens[item.backend] += item.request.prompt_tokens - item.cached_tokens + item.output_tokens
    return max(tokens) * backends / sum(tokens) if sum(tokens) else 1.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _weighted(counts: Counter[float], share: float) -> float:
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * total:
            return value
    return 0.0
