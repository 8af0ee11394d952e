"""Who chooses the engine: in the simulation the rules keep what docs/placing.md says of them."""

from __future__ import annotations

import pytest

from bench.ranks import WAYS, Load, Result, play

LOAD = Load(rate=1.6, duration_s=90.0)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {way: play(way, LOAD, 4, 1, 1000, 0) for way in WAYS}


def test_every_request_is_answered_whoever_chooses(results: dict[str, Result]) -> None:
    for result in results.values():
        assert all(job.finished_s is not None for job in result.jobs), result.way
    assert len({len(result.jobs) for result in results.values()}) == 1


def test_who_is_seen_as_its_next_engine_is_spared_what_the_sum_of_all_is_not(results: dict[str, Result]) -> None:
    straight, whole, following = results["straight"], results["sum"], results["next"]
    assert following.preemptions < whole.preemptions < straight.preemptions
    assert following.inside_s < whole.inside_s < straight.inside_s


def test_pinned_engines_preempt_nobody_and_are_done_sooner(results: dict[str, Result]) -> None:
    pinned, following = results["pinned"], results["next"]
    assert pinned.preemptions == 0
    assert pinned.inside_s < following.inside_s
    assert pinned.first_byte_s(0.99) < following.first_byte_s(0.99)
    assert pinned.ended_s <= min(result.ended_s for result in results.values())


def test_a_run_can_be_repeated(results: dict[str, Result]) -> None:
    again = play("next", LOAD, 4, 1, 1000, 0)
    assert [job.finished_s for job in again.jobs] == [job.finished_s for job in results["next"].jobs]
