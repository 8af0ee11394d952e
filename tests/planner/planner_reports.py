"""Real start-up reports as plans, and the tables of docs/planner.md: ``python tests/planner/planner_reports.py``.

``reports.jsonl`` holds facts and figures only. ``told`` are the inputs, ``seen`` what was logged, ``inferred`` which
inputs the report does not state but its numbers determine, ``kept_aside`` that nothing was fitted to it,
``not_reproduced`` why a report is left out, ``memory`` whether its KV memory can be predicted: all flags stated, or
defaults assumed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from gateway.planner import overhead
from gateway.planner import pool as pools
from gateway.planner.cards import card_of_memory, find_card
from gateway.planner.catalogue import find
from gateway.planner.figures import GIB
from gateway.planner.geometry import read_geometry
from gateway.planner.plan import Plan, make_plan
from gateway.planner.speculation import parse_speculation
from gateway.planner.versions import behaviour_of
from gateway.planner.wish import Subject, Wish

REPORTS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "reports.jsonl").read_text().splitlines()
]
ROUNDING_GIB = 0.005
SAMPLER_CANDIDATES = range(20, 49)


def plan_of(report: dict[str, Any]) -> Plan:
    """The plan for what the report tells."""
    told = report["told"]
    entry = find(report["model"])
    assert entry is not None, report["model"]
    wish = Wish(
        tp=told.get("tp", 1),
        pp=told.get("pp", 1),
        dcp=told.get("dcp", 1),
        context=told.get("window"),
        quant=told.get("quant"),
        kv_dtype=told.get("kv_dtype", "auto"),
        utilization=told.get("utilization"),
        eager=told.get("eager", False),
        batched_tokens=told.get("batched_tokens"),
        seqs=told.get("seqs"),
        block_tokens=told.get("block_tokens"),
        prefix_caching=told.get("prefix_caching", True),
        speculation=parse_speculation(told.get("speculative")),
    )
    card = find_card(told["card"]) if "card" in told else card_of_memory(told.get("vram", 24.0))
    subject = Subject(read_geometry(entry.as_config(), entry.name), entry.parameters, entry.vision_parameters)
    behaviour = behaviour_of(told.get("version"), engine=told.get("engine"))
    return make_plan(subject, card, wish, behaviour, compare=False)


def at(plan: Plan, gib: float) -> pools.Capacity:
    """What the plan's pool holds in ``gib``."""
    return pools.capacity(plan.pool, int(gib * GIB), plan.window, plan.behaviour)


def window_at(plan: Plan, gib: float) -> int:
    """The estimated maximum length of vLLM's error text for ``gib``."""
    return pools.largest_window(plan.pool, int(gib * GIB), plan.window, plan.behaviour)


def logged_kv_gib(report: dict[str, Any], plan: Plan) -> float:
    """KV memory as logged, or by the blocks that were."""
    seen = report["seen"]
    if "kv_gib" in seen:
        return float(seen["kv_gib"])
    blocks = seen.get("blocks") or seen["concurrency"] * plan.pool.blocks_per_request(plan.window)
    return float(blocks * plan.pool.block_bytes / GIB)


def with_memory(kind: str, *, kept_aside: bool = False) -> list[dict[str, Any]]:
    """The reports whose KV memory is compared: ``stated`` or ``assumed`` flags, seen while fitting or kept aside."""
    return [
        report for report in REPORTS if report.get("memory") == kind and bool(report.get("kept_aside")) is kept_aside
    ]


def miss(report: dict[str, Any]) -> float:
    """Predicted over logged KV memory, less one."""
    plan = plan_of(report)
    return plan.kv_memory.value / logged_kv_gib(report, plan) - 1


def nearest_rank(values: Sequence[float], share: float) -> float:
    """A percentile that is one of the values."""
    return sorted(values)[ceil(share * len(values)) - 1]


def leave_one_out(reports: Sequence[dict[str, Any]]) -> list[float]:
    """Absolute misses, each with the sampler's constant fitted to all other reports (least sum of absolute misses)."""
    kept = overhead.SAMPLER_BYTES_FIRST_RUNNER
    try:
        table: dict[int, list[float]] = {}
        for candidate in SAMPLER_CANDIDATES:
            overhead.SAMPLER_BYTES_FIRST_RUNNER = candidate
            table[candidate] = [abs(miss(report)) for report in reports]
    finally:
        overhead.SAMPLER_BYTES_FIRST_RUNNER = kept
    held_out: list[float] = []
    for index in range(len(reports)):
        best = min(table, key=lambda candidate: sum(table[candidate]) - table[candidate][index])
        held_out.append(table[best][index])
    return held_out


def reproduced_table() -> str:
    """Every report compared, given its KV memory."""
    lines = [
        "| # | Report | Model | KV GiB | Logged | Planned | Difference |",
        "|--:|---|---|--:|--:|--:|--:|",
    ]
    for report in REPORTS:
        if report.get("not_reproduced") or not report["model"]:
            continue
        lines += [f"| {report['id']} | {_short(report)} | {row} |" for row in _compared(report)]
    return "\n".join(lines)


def _compared(report: dict[str, Any]) -> list[str]:
    seen, plan = report["seen"], plan_of(report)
    model, kv = report["model"].split("/")[-1], seen.get("kv_gib")
    rows: list[str] = []
    if kv is not None and "blocks" in seen:
        blocks = at(plan, kv).num_blocks
        rows.append(f"{model} | {kv} | {seen['blocks']:,} blocks | {blocks:,} | {blocks / seen['blocks'] - 1:+.2%}")
    if kv is not None and "tokens" in seen:
        tokens = at(plan, kv).size_tokens
        rows.append(f"{model} | {kv} | {seen['tokens']:,} tokens | {tokens:,} | {tokens / seen['tokens'] - 1:+.2%}")
    if "needed_gib" in seen:
        rows.append(f"{model} | | needs {seen['needed_gib']} GiB | {plan.needed_gib:.3f} | ")
    if "estimated_len" in seen:
        low, middle, high = (window_at(plan, kv + off) for off in (-ROUNDING_GIB, 0, ROUNDING_GIB))
        rows.append(
            f"{model} | {kv} | estimated length {seen['estimated_len']:,} | "
            f"{middle:,} ({low:,} to {high:,} over the rounding) | "
        )
    return rows


def memory_table() -> str:
    """KV memory from model, card and flags."""
    lines = [
        "| # | Model | Card | Inputs | KV GiB logged | Planned | Range | Error |",
        "|--:|---|---|---|--:|--:|---|--:|",
    ]
    for report in REPORTS:
        if "memory" not in report:
            continue
        plan = plan_of(report)
        true, found = logged_kv_gib(report, plan), plan.kv_memory
        lines.append(
            f"| {report['id']} | {report['model'].split('/')[-1]} | {plan.card.name} | {report['memory']} | "
            f"{true:.2f} | {found.value:.2f} | {found.lowest:.1f} to {found.highest:.1f} | "
            f"{found.value / true - 1:+.0%} |"
        )
    return "\n".join(lines)


def memory_summary() -> str:
    """Median and 90th percentile, in sample and held out."""
    lines = ["| Reports | Number | Median error | 90th percentile |", "|---|--:|--:|--:|"]
    for kind, label in (("stated", "all flags stated"), ("assumed", "flags assumed (defaults)")):
        reports = with_memory(kind)
        errors = [abs(miss(report)) for report in reports]
        lines.append(_summary(label, errors))
        if kind == "stated":
            lines.append(_summary(f"{label}, each predicted from the others", leave_one_out(reports)))
    for kind, label in (("stated", "all flags stated"), ("assumed", "flags or card assumed")):
        errors = [abs(miss(report)) for report in with_memory(kind, kept_aside=True)]
        lines.append(_summary(f"kept aside until the planner was done, {label}", errors))
    return "\n".join(lines)


def _summary(label: str, errors: Sequence[float]) -> str:
    return f"| {label} | {len(errors)} | {statistics.median(errors):.1%} | {nearest_rank(errors, 0.9):.1%} |"


def left_out_table() -> str:
    """Reports not reproduced, and why."""
    lines = ["| # | Report | Model | Reason |", "|--:|---|---|---|"]
    lines += [
        f"| {report['id']} | {_short(report)} | {report['model'] or 'unnamed'} | {report['not_reproduced']} |"
        for report in REPORTS
        if report.get("not_reproduced")
    ]
    return "\n".join(lines)


def _short(report: dict[str, Any]) -> str:
    source = str(report["source"]).removeprefix("https://github.com/")
    return source.replace("/pull/", "#").replace("/issues/", "#")


TABLES = {
    "reproduced": reproduced_table,
    "memory-summary": memory_summary,
    "memory": memory_table,
    "left-out": left_out_table,
}

if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "planner.md"
    text = page.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, rest = text.split(start)
        text = before + start + table() + end + rest.split(end, 1)[1]
    page.write_text(text, encoding="utf-8")
    sys.stdout.write(memory_summary() + "\n")
