"""The simulated engine does what a real vLLM did when these recordings were made, without vLLM being here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from scheduler_loads import load_of, outcome_of, play
from scheduler_own import OwnScheduler

RECORDINGS = Path(__file__).with_name("recordings")

# Made by tests/vllm/vllm_scheduler.py; tests/vllm/test_vllm_scheduler.py names the first step that differs.
LOADS = [json.loads(line) for line in (RECORDINGS / "scheduler.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", range(len(LOADS)))
def test_a_load_is_scheduled_as_by_vllm(number: int) -> None:
    load = load_of(LOADS[number]["load"])
    scheduler = OwnScheduler(load.limits)
    steps = list(play(load, scheduler))
    assert dataclasses.asdict(outcome_of(steps, scheduler.totals())) == LOADS[number]["outcome"]


def test_the_recorded_loads_are_worth_it() -> None:
    totals = [line["outcome"]["totals"] for line in LOADS]
    assert sum(total["preemptions"] for total in totals) > 100
    assert 0.1 < sum(total["hits_tokens"] for total in totals) / sum(total["queries_tokens"] for total in totals) < 0.9
