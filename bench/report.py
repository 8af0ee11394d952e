"""The table of a run: medians with their spread, what follows from them, and ratios between targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.accounting import Spread, ratio, slope

Values = Mapping[str, Mapping[str, Sequence[float]]]

GATEWAY, PEERS = "gateway", ("nginx", "vllm-router")
_PER_REQUEST = ", CPU us per request"
_PER_STREAM = ", CPU us per stream"


def summarised(values: Values) -> dict[str, dict[str, Spread]]:
    """Medians and spreads, with what follows from them: requests a core can do, cost by chunk, added latency."""
    rows = {metric: {name: Spread.of(of) for name, of in targets.items()} for metric, targets in values.items()}
    derived: dict[str, dict[str, Spread]] = {}
    for metric, targets in rows.items():
        derived[metric] = targets
        if metric.endswith(_PER_REQUEST):
            name = metric.removesuffix(_PER_REQUEST)
            derived[f"{name}, requests/s per core"] = {target: inverted(cost) for target, cost in targets.items()}
        if " alone, " in metric and "direct" in targets:
            floor = targets["direct"].median
            derived[metric.replace(" alone, ", " added to direct, ")] = {
                target: Spread(of.median - floor, of.least - floor, of.most - floor, of.samples)
                for target, of in targets.items()
                if target != "direct"
            }
    marginal = per_further_chunk(values)
    if marginal:
        derived["each further chunk, CPU us"] = {target: Spread.of(of) for target, of in marginal.items()}
    return derived


def inverted(cost_us: Spread) -> Spread:
    """Requests a second that one core can do at this CPU cost of a request."""
    return Spread(1e6 / cost_us.median, 1e6 / cost_us.most, 1e6 / cost_us.least, cost_us.samples)


def per_further_chunk(values: Values) -> dict[str, list[float]]:
    """The slope of a small stream's cost over its number of chunks, by target, one value a round."""
    points: dict[str, list[list[tuple[float, float]]]] = {}
    for metric, targets in values.items():
        if metric.startswith("stream of ") and metric.endswith(_PER_STREAM):
            chunks = int(metric.removeprefix("stream of ").removesuffix(_PER_STREAM))
            for target, samples in targets.items():
                for number, cost_us in enumerate(samples):
                    rounds = points.setdefault(target, [])
                    if len(rounds) <= number:
                        rounds.append([])
                    rounds[number].append((chunks, cost_us))
    return {
        target: [slope(of) for of in rounds if len(of) > 1]
        for target, rounds in points.items()
        if any(len(of) > 1 for of in rounds)
    }


def table(rows: Mapping[str, Mapping[str, Spread]], targets: Sequence[str]) -> str:
    """The rows as text: a column a target, then the gateway against each peer."""
    peers = [peer for peer in PEERS if peer in targets] if GATEWAY in targets else []
    lines = [["", *targets, *(f"gateway/{peer}" for peer in peers)]]
    for metric, of in rows.items():
        cells = [metric, *(_cell(of.get(target)) for target in targets)]
        for peer in peers:
            value = ratio(_median(of, GATEWAY), _median(of, peer))
            cells.append("-" if value is None else f"{value:.2f}")
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )


def document(rows: Mapping[str, Mapping[str, Spread]], values: Values, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All of it for machines: every sample, medians, and the gateway's ratios."""
    return {
        **facts,
        "metrics": {
            metric: {
                target: {
                    "median": spread.median,
                    "least": spread.least,
                    "most": spread.most,
                    "samples": list(values.get(metric, {}).get(target, ())),
                }
                for target, spread in of.items()
            }
            for metric, of in rows.items()
        },
        "ratios": {
            metric: {peer: ratio(_median(of, GATEWAY), _median(of, peer)) for peer in PEERS if peer in of}
            for metric, of in rows.items()
            if GATEWAY in of
        },
    }


def _median(of: Mapping[str, Spread], target: str) -> float | None:
    return of[target].median if target in of else None


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    middle = _number(spread.median)
    return middle if spread.samples == 1 else f"{middle} [{_number(spread.least)}..{_number(spread.most)}]"


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
