"""What the bench of counting measures with, and the arithmetic of its figures."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from bench.agent import agent_conversation
from bench.counting import Figures, figures, measure_growth, tables
from bench.counting_phases import measure_phases, phases
from gateway.types import Count, CountKind


def test_figures_are_milliseconds_of_the_least_the_median_and_the_99th_of_a_hundred() -> None:
    samples = [(number / 1000, (101 - number) / 2000) for number in range(1, 101)]
    wall_p50, cpu_p50 = 50.5, 25.25
    assert figures(samples) == Figures(1.0, 0.5, wall_p50, 99.0, cpu_p50, 49.5, 100)


def test_a_single_sample_is_all_its_figures() -> None:
    assert figures([(0.002, 0.001)]) == Figures(2.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1)


def test_phases_of_a_request_add_up_to_all_of_it() -> None:
    found = phases([[0.001, 0.004, 0.002], [0.003, 0.002, 0.001], [0.002, 0.003, 0.009]])
    assert [each.least_ms for each in found.values()] == pytest.approx([1.0, 2.0, 1.0, 6.0])
    assert [each.p50_ms for each in found.values()] == pytest.approx([2.0, 3.0, 2.0, 7.0])


def test_phases_are_measured_of_every_body_but_the_first_ones() -> None:
    calls = []

    class Local:
        def begin(self, prompt: Any, kwargs: Any) -> Any:
            calls.append(len(prompt.messages))
            return lambda: None

    conversation = agent_conversation(3, 4, 300)
    local: Any = Local()
    samples = measure_phases(local, [conversation.body(turn, "m") for turn in range(4)], unmeasured=1)
    assert calls == conversation.ends
    assert [len(each) for each in samples] == [3, 3, 3]
    assert all(seconds >= 0 for each in samples for seconds in each)


def test_the_table_has_a_row_for_each_thing_and_one_for_each_phase() -> None:
    measured = {"warm": vars_of(Figures(1.0, 0.5, 2.0, 3.0, 0.75, 4.0, 7))}
    lines = tables(measured, {"cold": {"parse": {"least_ms": 0.5, "p50_ms": 1.25}}})
    assert "| warm | 1 | 2 | 3 | 0.5 | 0.75 | 4 | 7 |" in lines
    assert "| parse | 0.50 | 1.25 |" in lines
    assert len({line.count("|") for line in lines[:3]}) == 1


def vars_of(each: Figures) -> dict[str, float]:
    return {name: getattr(each, name) for name in Figures.__slots__}


def test_a_conversation_is_the_same_for_the_same_seed_and_grows_by_whole_turns() -> None:
    one = agent_conversation(1, 6, 900)
    assert one == agent_conversation(1, 6, 900)
    assert one.messages != agent_conversation(2, 6, 900).messages
    sent = [json.loads(one.body(turn, "m"))["messages"] for turn in range(6)]
    for before, after in itertools.pairwise(sent):
        assert after[: len(before)] == before
        assert len(after) > len(before)
        calls = {call["id"] for message in after for call in message.get("tool_calls", ())}
        assert calls == {message["tool_call_id"] for message in after if message["role"] == "tool"}


def test_a_count_that_is_not_local_ends_the_run() -> None:
    class Estimating:
        async def count(self, ask: Any, served: Any) -> Count:
            return Count(1, 1, CountKind.ESTIMATE, "estimate")

    counter: Any = Estimating()
    served: Any = None
    with pytest.raises(SystemExit, match="estimate"):
        asyncio.run(measure_growth(counter, served, [agent_conversation(1, 40, 100)]))
