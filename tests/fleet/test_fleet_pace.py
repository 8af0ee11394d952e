"""How often a backend is looked at: often where room is scarce, seldom where nothing happens, never as a burden."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.pace import LEAST_REST, Pace, Sight

IDLE = Sight()
BUSY = Sight(busy=True)


def test_it_is_usual_while_ours_run_there_and_fast_while_room_is_scarce() -> None:
    pace = Pace(0.25, 1.0, 5.0)
    assert pace.pause_s(BUSY, 0.0) == 1.0
    assert pace.pause_s(Sight(busy=True, waiting=1), 0.0) == 0.25
    assert pace.pause_s(Sight(busy=True, waiting=0, kv_ratio=0.81), 0.0) == 0.25
    assert pace.pause_s(Sight(busy=True, waiting=0, kv_ratio=0.79), 0.0) == 1.0


def test_traffic_of_others_counts_as_well_as_ours() -> None:
    pace = Pace(0.25, 1.0, 5.0)
    assert pace.pause_s(Sight(moved=True), 0.0) == 1.0
    assert pace.pause_s(Sight(waiting=3, moved=True), 0.0) == 0.25


def test_where_nothing_happens_the_pause_grows_to_the_slowest_and_is_usual_again_at_once() -> None:
    pace = Pace(0.25, 1.0, 5.0)
    pauses = [pace.pause_s(IDLE, 0.0) for _ in range(6)]
    assert pauses == [1.5, 2.25, 3.375, 5.0, 5.0, 5.0]
    assert pace.leisurely
    assert pace.pause_s(BUSY, 0.0) == 1.0
    assert not pace.leisurely


def test_a_request_that_arrives_ends_the_leisure() -> None:
    pace = Pace(0.25, 1.0, 5.0)
    while pace.pause_s(IDLE, 0.0) < 5.0:
        pass
    pace.hurry()
    assert not pace.leisurely
    assert pace.pause_s(IDLE, 0.0) == 1.5


def test_a_backend_that_is_away_is_asked_as_usual_so_that_it_is_back_soon() -> None:
    pace = Pace(0.25, 1.0, 5.0)
    while pace.pause_s(IDLE, 0.0) < 5.0:
        pass
    assert pace.pause_s(Sight(failed=True), 0.0) == 1.0


def test_a_slow_look_makes_the_next_pause_longer_whatever_the_load() -> None:
    pace = Pace(0.25, 1.0, 5.0)
    assert pace.pause_s(Sight(busy=True, waiting=9), 0.5) == 0.5 * LEAST_REST
    assert pace.pause_s(Sight(failed=True), 30.0) == 5.0


def test_bounds_that_contradict_the_usual_pause_give_way() -> None:
    pace = Pace(0.25, 0.02, 0.01)
    assert pace.pause_s(Sight(waiting=1), 0.0) == 0.02
    assert pace.pause_s(IDLE, 0.0) == 0.02


sights = st.builds(
    Sight,
    busy=st.booleans(),
    kv_ratio=st.none() | st.floats(0, 2),
    waiting=st.none() | st.integers(0, 9),
    moved=st.booleans(),
    failed=st.booleans(),
)


@given(st.lists(st.tuples(sights, st.floats(0, 20)), max_size=40))
def test_the_pause_never_leaves_its_bounds_nor_burdens_a_slow_backend(looks: list[tuple[Sight, float]]) -> None:
    pace = Pace(0.25, 1.0, 5.0)
    for sight, took_s in looks:
        pause_s = pace.pause_s(sight, took_s)
        assert 0.25 <= pause_s <= 5.0
        assert pause_s >= min(5.0, LEAST_REST * took_s)


def test_whether_a_backend_still_lives_is_asked_at_once_however_long_the_last_question_hung() -> None:
    pace = Pace(0.25, 1.0, 5.0)
    assert pace.pause_s(Sight(doubtful=True), 5.0) == 0.25
    assert pace.pause_s(BUSY, 0.0) == 1.0
