"""What readings say one after the other: whose they are, what is wrong, and nothing that can be read is an error."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.metrics_text import COUNTER_NAMES, Oddity, Reading
from gateway.fleet.troubles import FORGIVEN_AFTER, Trouble
from gateway.fleet.witness import STALLED_S, STUCK_S, Witness

PROMPT = COUNTER_NAMES[0]
READING = Reading(
    blocks=100,
    block_size_tokens=16,
    usage_ratio={"0": 0.5},
    running=1,
    waiting=0,
    started_s=100.0,
    created_s=101.0,
    counters={PROMPT: 500.0},
)


def kinds(witness: Witness) -> set[Trouble]:
    return {record.kind for record in witness.troubles.records(0.0)}


def test_requests_without_progress_are_stuck_and_then_stalled() -> None:
    witness = Witness()
    assert not witness.read(READING, 1, 0.0).stuck
    assert not witness.read(READING, 1, STUCK_S - 1).stuck
    assert witness.read(READING, 1, STUCK_S).stuck
    assert Trouble.STALLED not in kinds(witness)
    witness.read(READING, 1, STALLED_S)
    assert Trouble.STALLED in kinds(witness)
    progress = replace(READING, counters={PROMPT: 501.0})
    for second in range(FORGIVEN_AFTER):
        assert not witness.read(progress, 1, STALLED_S + 1 + second).stuck
    assert Trouble.STALLED not in kinds(witness)


def test_an_idle_server_is_not_stuck_however_long_nothing_happens() -> None:
    witness = Witness()
    idle = replace(READING, running=0)
    for hour in range(5):
        assert not witness.read(idle, 0, 3600.0 * hour).stuck
    assert witness.read(idle, 1, 3600.0 * 5 + 2 * STUCK_S).stuck  # ours waits there, though it says nothing of it


def test_a_counter_that_goes_back_is_named_with_the_trouble() -> None:
    witness = Witness()
    witness.read(READING, 0, 0.0)
    (turn,) = witness.read(replace(READING, counters={PROMPT: 1.0}), 0, 1.0).turns
    assert (turn.kind, turn.detail) == (Trouble.COUNTER_BACK, PROMPT)


def test_only_a_new_process_is_a_restart() -> None:
    witness = Witness()
    witness.read(READING, 0, 0.0)
    assert not witness.read(replace(READING, usage_ratio=None), 0, 1.0).restarted
    assert not witness.read(Reading(), 0, 2.0).restarted
    assert witness.read(replace(READING, started_s=200.0, created_s=201.0, counters={PROMPT: 0.0}), 0, 3.0).restarted


def test_while_several_servers_answer_the_cache_is_unknown() -> None:
    witness = Witness()
    other = replace(READING, created_s=999.0)
    blind = [witness.read(item, 0, float(at)).blind for at, item in enumerate((READING, other, READING, other))]
    assert blind == [False, False, True, True]


numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e12)
readings = st.builds(
    Reading,
    blocks=st.none() | st.integers(1, 100),
    block_size_tokens=st.none() | st.just(16),
    usage_ratio=st.none() | st.dictionaries(st.sampled_from("01"), st.floats(0, 1)),
    running=st.none() | st.integers(0, 9),
    waiting=st.none() | st.integers(0, 9),
    queried_tokens=numbers,
    hit_tokens=numbers,
    started_s=numbers,
    created_s=numbers,
    counters=st.dictionaries(st.sampled_from(COUNTER_NAMES), st.floats(0, 1e12)),
    odd=st.frozensets(st.sampled_from(list(Oddity))),
)


@given(st.lists(st.tuples(readings, st.integers(0, 9), st.floats(-1e6, 1e9)), max_size=40))
def test_no_sequence_of_readings_is_an_error_even_if_time_runs_backwards(
    looks: list[tuple[Reading, int, float]],
) -> None:
    witness = Witness()
    for reading, in_flight, now_s in looks:
        heard = witness.read(reading, in_flight, now_s)
        if Oddity.NOT_METRICS in reading.odd or Oddity.DUPLICATE_ENGINE in reading.odd:
            assert heard.blind
        if heard.verdict is not None:
            assert heard.verdict.answers > 0
        ratio = witness.hits.ratio
        assert ratio is None or ratio >= 0
