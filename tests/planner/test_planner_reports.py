"""Real start-up reports: what vLLM logged on other people's machines, and what the planner computes for the same input.

``reports.jsonl`` holds facts and figures only. ``told`` are the inputs, ``seen`` what was logged, ``inferred`` which
inputs the report does not state but its numbers determine, ``not_reproduced`` why a report is left out, ``memory``
whether its KV memory can be predicted: all flags stated, or defaults assumed.
"""

from __future__ import annotations

import json
import statistics
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from gateway.planner import pool as pools
from gateway.planner.cards import card_of_memory, find_card
from gateway.planner.catalogue import find
from gateway.planner.figures import GIB
from gateway.planner.geometry import read_geometry
from gateway.planner.plan import Plan, Subject, Wish, make_plan
from gateway.planner.speculation import parse_speculation
from gateway.planner.versions import behaviour_of

REPORTS = [json.loads(line) for line in (Path(__file__).parent / "reports.jsonl").read_text().splitlines()]
ROUNDING_GIB = 0.005


def _plan(report: dict[str, Any]) -> Plan:
    told = report["told"]
    entry = find(report["model"])
    assert entry is not None, report["model"]
    wish = Wish(
        tp=told.get("tp", 1),
        pp=told.get("pp", 1),
        context=told.get("window"),
        quant=told.get("quant"),
        kv_dtype=told.get("kv_dtype", "auto"),
        utilization=told.get("utilization"),
        eager=told.get("eager", False),
        batched_tokens=told.get("batched_tokens"),
        seqs=told.get("seqs"),
        block_tokens=told.get("block_tokens"),
        speculation=parse_speculation(told.get("speculative")),
    )
    card = find_card(told["card"]) if "card" in told else card_of_memory(told.get("vram", 24.0))
    subject = Subject(read_geometry(entry.as_config(), entry.name), entry.parameters, entry.vision_parameters)
    behaviour = behaviour_of(told.get("version"), engine=told.get("engine"))
    return make_plan(subject, card, wish, behaviour, compare=False)


def _at(plan: Plan, gib: float) -> pools.Capacity:
    return pools.capacity(plan.pool, int(gib * GIB), plan.window, plan.behaviour)


def _chosen(*fields: str) -> list[Any]:
    return [
        pytest.param(report, id=f"{report['id']}-{report['model'].split('/')[-1]}")
        for report in REPORTS
        if not report.get("not_reproduced") and report["model"] and all(field in report["seen"] for field in fields)
    ]


@pytest.mark.parametrize("report", _chosen("kv_gib", "tokens"))
def test_kv_tokens_follow_from_the_reported_memory(report: dict[str, Any]) -> None:
    plan, seen = _plan(report), report["seen"]
    low, middle, high = (_at(plan, seen["kv_gib"] + off).size_tokens for off in (-ROUNDING_GIB, 0, ROUNDING_GIB))
    assert low <= seen["tokens"] <= high or abs(middle / seen["tokens"] - 1) <= 0.005
    if "concurrency" in seen:
        assert _at(plan, seen["kv_gib"]).max_concurrency == pytest.approx(seen["concurrency"], rel=0.006, abs=0.011)


@pytest.mark.parametrize("report", list(_chosen("kv_gib", "blocks")))
def test_block_counts_follow_from_the_reported_memory(report: dict[str, Any]) -> None:
    plan, seen = _plan(report), report["seen"]
    low, high = (_at(plan, seen["kv_gib"] + off).num_blocks for off in (-ROUNDING_GIB, ROUNDING_GIB))
    assert low <= seen["blocks"] <= high


@pytest.mark.parametrize("report", _chosen("needed_gib"))
def test_the_needed_memory_of_a_refused_window_is_reproduced(report: dict[str, Any]) -> None:
    plan = _plan(report)
    assert plan.needed_gib == pytest.approx(report["seen"]["needed_gib"], abs=0.0051)


@pytest.mark.parametrize("report", _chosen("estimated_len"))
def test_the_estimated_maximum_length_of_the_error_is_reproduced(report: dict[str, Any]) -> None:
    plan, seen = _plan(report), report["seen"]
    low, high = (
        pools.largest_window(plan.pool, int((seen["kv_gib"] + off) * GIB), plan.window, plan.behaviour)
        for off in (-ROUNDING_GIB, ROUNDING_GIB)
    )
    assert low <= seen["estimated_len"] <= high


def test_tokens_without_memory_still_agree_with_the_concurrency_line() -> None:
    checked = 0
    for report in REPORTS:
        seen = report["seen"]
        if report.get("not_reproduced") or "tokens" not in seen or "concurrency" not in seen or "kv_gib" in seen:
            continue
        plan = _plan(report)
        blocks = round(seen["concurrency"] * plan.pool.blocks_per_request(plan.window))
        expected = _at(plan, blocks * plan.pool.block_bytes / GIB).size_tokens
        assert expected == pytest.approx(seen["tokens"], rel=0.006), report["id"]
        checked += 1
    assert checked >= 4


def test_kv_memory_is_predicted_from_model_card_and_flags_alone() -> None:
    errors: dict[str, list[float]] = {"stated": [], "assumed": []}
    for report in REPORTS:
        if "memory" not in report:
            continue
        plan, seen = _plan(report), report["seen"]
        true = seen.get("kv_gib")
        if true is None:
            blocks = seen.get("blocks") or seen["concurrency"] * plan.pool.blocks_per_request(plan.window)
            true = blocks * plan.pool.block_bytes / GIB
        errors[report["memory"]].append(abs(plan.kv_memory.value / true - 1))
    stated = sorted(errors["stated"])
    assert len(stated) >= 12
    # The constants were fitted to these same logs, so this guards against regressions and proves no more.
    assert statistics.median(stated) <= 0.06
    assert stated[ceil(0.9 * len(stated)) - 1] <= 0.135
    assert statistics.median(errors["assumed"]) <= 0.10


def test_logged_weights_are_predicted() -> None:
    errors = {
        report["id"]: abs(_plan(report).weights.per_gpu.value / report["seen"]["weights_gib"] - 1)
        for report in REPORTS
        if report["model"] and "weights_gib" in report["seen"] and not report.get("not_reproduced")
    }
    assert len(errors) >= 18
    assert statistics.median(errors.values()) <= 0.012
    assert sorted(errors.values())[ceil(0.9 * len(errors)) - 1] <= 0.08


def test_every_report_left_out_says_why() -> None:
    left_out = [report for report in REPORTS if report.get("not_reproduced")]
    assert len(REPORTS) == 69
    assert len(left_out) <= 26
    assert all(len(report["not_reproduced"]) > 15 for report in left_out)
    assert all(report["model"] or report.get("not_reproduced") for report in REPORTS)
