"""What is printed: a row a policy, figures by kind of request, and the verdict of ours against the baselines'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.placing.report import Figures

OURS = "kvgate"


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the verdict. ``value`` and ``best`` are ours and the baselines'; ``ratio`` is ours ÷ theirs."""

    name: str
    goal: str
    value: float
    best: float | None
    best_policy: str
    ratio: float | None
    met: bool


def rows(found: Sequence[Figures], *, markdown: bool = False) -> str:
    """One line a policy."""
    head = (
        ["policy", "requests", "done", "refused", "lost", "400s", "goodput/s"]
        + [f"TTFT {name}" for name in ("p50", "p95", "p99")]
        + [f"gap {name}" for name in ("p50", "p95", "p99")]
        + ["preempted", "hits", "of pooled", "Jain", "served", "max/mean"]
    )
    return _table(head, [_row(item) for item in found], markdown)


def by_kind(found: Sequence[Figures], *, markdown: bool = False) -> str:
    """One line a policy; for each kind its goodput and seconds to the first token (p50/p95/p99)."""
    names = sorted({name for item in found for name in item.kinds})
    head = ["policy", *(f"{name}: goodput/s, TTFT" for name in names)]
    lines = []
    for item in found:
        cells = [item.policy]
        for name in names:
            kind = item.kinds.get(name)
            cells.append(f"{kind.goodput:.2f}  {_seconds(kind.first_token_s)}" if kind else "")
        lines.append(cells)
    return _table(head, lines, markdown)


def flooded(with_flood: Sequence[Figures], without: Sequence[Figures], *, markdown: bool = False) -> str:
    """Seconds to the first token of the keys that do not flood, with the flood and without it."""
    head = ["policy", "others' TTFT (p50/p95/p99)", "without the flood", "p99 ratio"]
    lines = []
    for one, other in zip(with_flood, without, strict=True):
        ratio = _ratio(one.others_first_token_s[2], other.others_first_token_s[2])
        lines.append(
            [one.policy, _seconds(one.others_first_token_s), _seconds(other.others_first_token_s), _times(ratio)]
        )
    return _table(head, lines, markdown)


def verdict(found: Sequence[Figures]) -> list[Goal]:
    """Ours against the best baseline of each figure; empty if ours or every baseline is missing."""
    ours = next((item for item in found if item.policy == OURS), None)
    others = [item for item in found if not item.policy.startswith(OURS)]
    if ours is None or not others:
        return []
    strongest = max(others, key=lambda item: item.goodput)

    def against(
        name: str,
        goal: str,
        of: Callable[[Figures], float],
        met: Callable[[float, float], bool],
        best: Figures,
    ) -> Goal:
        mine, theirs = of(ours), of(best)
        return Goal(name, goal, mine, theirs, best.policy, _ratio(mine, theirs), met(mine, theirs))

    def preempted(item: Figures) -> float:
        return float(item.preemptions)

    def late(item: Figures) -> float:
        return item.first_token_s[2]

    def good(item: Figures) -> float:
        return item.goodput

    return [
        against("preemptions", "≤ 0.01 ×", preempted, _at_most(0.01), min(others, key=preempted)),
        against("preemptions, best by goodput", "≤ 0.01 ×", preempted, _at_most(0.01), strongest),
        against("p99 TTFT", "≤ 0.5 ×", late, _at_most(0.5), min(others, key=late)),
        against("p99 TTFT, best by goodput", "≤ 0.5 ×", late, _at_most(0.5), strongest),
        against("goodput", "≥ 1.3 ×", good, lambda mine, theirs: mine >= 1.3 * theirs, strongest),
        _alone("hits of the oracle's", "≥ 95 %", ours.hit_share, 0.95, [(item.hit_share, item) for item in others]),
        _alone(
            "hits of the pooled's", "≥ 95 %", ours.pooled_share, 0.95, [(item.pooled_share, item) for item in others]
        ),
        _alone("Jain", "≥ 0.95", ours.jain, 0.95, [(item.jain, item) for item in others]),
        _alone("Jain, served", "≥ 0.95", ours.served_jain, 0.95, [(item.served_jain, item) for item in others]),
    ]


def verdict_table(goals: Sequence[Goal], *, markdown: bool = False) -> str:
    """The verdict, one line a goal."""
    head = ["figure", "goal", "kvgate", "baseline", "which", "ratio", "met"]
    lines = []
    for item in goals:
        best = "" if item.best is None else f"{item.best:.3g}"
        met = "yes" if item.met else "no"
        lines.append([item.name, item.goal, f"{item.value:.3g}", best, item.best_policy, _times(item.ratio), met])
    return _table(head, lines, markdown)


def _alone(name: str, goal: str, value: float, least: float, others: Sequence[tuple[float, Figures]]) -> Goal:
    best, item = max(others, key=lambda pair: pair[0])
    return Goal(name, goal, value, best, item.policy, _ratio(value, best), value >= least)


def _at_most(share: float) -> Callable[[float, float], bool]:
    return lambda mine, theirs: mine <= share * theirs


def _row(item: Figures) -> list[str]:
    return [
        item.policy,
        str(item.requests),
        str(item.finished),
        str(item.refused),
        str(item.lost),
        str(item.overflows),
        f"{item.goodput:.2f}",
        *(f"{value:.2f}" for value in item.first_token_s),
        *(f"{value * 1000:.0f}ms" for value in item.gap_s),
        str(item.preemptions),
        f"{item.hit_share:.1%}",
        f"{item.pooled_share:.1%}",
        f"{item.jain:.3f}",
        f"{item.served_jain:.3f}",
        f"{item.balance:.2f}",
    ]


def _seconds(values: tuple[float, float, float]) -> str:
    return "/".join(f"{value:.2f}" for value in values)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratio(one: float, other: float) -> float | None:
    return one / other if other else None


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], markdown: bool) -> str:
    if markdown:
        rule = "|".join(["---", *("--:" for _ in head[1:])])
        return "\n".join(
            ["| " + " | ".join(head) + " |", f"|{rule}|", *("| " + " | ".join(line) + " |" for line in lines)]
        )
    widths = [max(len(line[place]) for line in [head, *lines]) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *lines]
    )
