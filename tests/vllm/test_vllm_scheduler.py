"""The simulated engine does, step by step, what vLLM's own scheduler and KV cache manager do with the same requests."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scheduler_loads import Step, play, random_load
from scheduler_own import OwnScheduler
from vllm_server import ENVIRONMENT, PYTHON, ROOT

from gateway.simulator.model import default_folder, ensure_model

SEEDS = (1000, 1059)
TOLERANCE = 0.05

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def of_vllm(*flags: str) -> list[dict[str, Any]]:
    """What vLLM made of the loads of ``SEEDS``."""
    command = [str(PYTHON), str(Path(__file__).with_name("vllm_scheduler.py")), str(ensure_model(default_folder()))]
    command += [*map(str, SEEDS), *flags]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def lists(value: object) -> Any:
    """Tuples as JSON gives them back."""
    return [lists(item) for item in value] if isinstance(value, list | tuple) else value


def difference(ours: list[Step], theirs: list[Any]) -> str | None:
    """The first step that differs, in words."""
    for number, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if lists(dataclasses.astuple(own)) != other:
            return f"step {number}: {own}, vLLM {other}"
    return None if len(ours) == len(theirs) else f"{len(ours)} steps, vLLM {len(theirs)}"


def test_every_step_is_vllms() -> None:
    found = of_vllm()
    assert len(found) == SEEDS[1] - SEEDS[0] + 1
    preemptions = hits = 0
    for theirs in found:
        load = random_load(theirs["seed"])
        own = OwnScheduler(load.limits)
        differs = difference(list(play(load, own)), theirs["steps"])
        assert differs is None, f"load {theirs['seed']}, {load.limits}: {differs}"
        assert dataclasses.asdict(own.totals()) == theirs["totals"]
        preemptions += theirs["totals"]["preemptions"]
        hits += theirs["totals"]["hits_tokens"]
    assert preemptions > 100 and hits > 10_000  # the loads are worth the while


def test_scheduling_ahead_as_on_gpus_changes_little() -> None:
    """vLLM schedules a step before it knows what the one before sampled; the simulated engine does not."""
    ours, theirs = [0, 0, 0], [0, 0, 0]
    for line in of_vllm("--ahead", "1"):
        load = random_load(line["seed"])
        own = OwnScheduler(load.limits)
        list(play(load, own))
        totals = own.totals()
        for sums, values in (
            (ours, (totals.preemptions, totals.queries_tokens, totals.hits_tokens)),
            (theirs, tuple(line["totals"][key] for key in ("preemptions", "queries_tokens", "hits_tokens"))),
        ):
            for index, value in enumerate(values):
                sums[index] += value
    assert theirs == pytest.approx(ours, rel=TOLERANCE)
