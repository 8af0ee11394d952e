"""The simulated engine does what a real vLLM did when these recordings were made, without vLLM being here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from scheduler_loads import load_of, outcome_of, play
from scheduler_own import OwnScheduler
from served_loads import load, replay_free, replay_waves, swapped

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


# Made by tests/vllm/test_vllm_agreement.py.
SERVED = sorted(RECORDINGS.glob("served-*.jsonl"))


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)
def test_what_a_paused_server_was_given_at_once_is_simulated_exactly(path: Path) -> None:
    recording = load(path)
    again = replay_waves(recording)
    assert recording.waves.totals.preemptions > 4
    assert again.totals == recording.waves.totals
    assert again.cached_tokens == tuple(one.cached_tokens for one in recording.waves.served)
    assert swapped(recording.waves, again)[0] == 0


def test_what_servers_did_at_their_own_pace_is_simulated_within_five_percent() -> None:
    """Summed over the recordings: one preemption more or less in a single one is ten percent."""
    there, here = [0, 0, 0], [0, 0, 0]
    for path in SERVED:
        recording = load(path)
        again = replay_free(recording)
        wrong, pairs = swapped(recording.free, again)
        assert wrong <= 0.05 * pairs
        for sums, totals in ((there, recording.free.totals), (here, again.totals)):
            for index, value in enumerate(dataclasses.astuple(totals)):
                sums[index] += value
    assert here == pytest.approx(there, rel=0.05)
