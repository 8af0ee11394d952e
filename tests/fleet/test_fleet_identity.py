"""Whose metrics are read: one process, a restarted one, several behind one URL, or one whose clock was set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.identity import SETTLED_AFTER, Identity, Sequel
from gateway.fleet.metrics_text import Oddity, Reading

PROMPT = "vllm:prompt_tokens_total"


def reading(
    tokens: float, started_s: float | None = 100.0, created_s: float | None = None, blocks: int = 10
) -> Reading:
    return Reading(
        blocks=blocks, block_size_tokens=16, started_s=started_s, created_s=created_s, counters={PROMPT: tokens}
    )


def sequels(*readings: Reading) -> list[Sequel]:
    identity = Identity()
    return [identity.read(item) for item in readings]


def test_a_process_stays_itself_while_its_counters_grow() -> None:
    assert sequels(reading(0), reading(5), reading(5)) == [Sequel.FIRST, Sequel.SAME, Sequel.SAME]


def test_another_start_time_is_a_restart_and_so_is_a_counter_that_went_back_where_nothing_else_tells() -> None:
    assert sequels(reading(7), reading(0, 200.0))[1] is Sequel.RESTART
    assert sequels(reading(7), reading(7, 200.0))[1] is Sequel.RESTART
    assert sequels(reading(7, None), reading(3, None))[1] is Sequel.RESTART
    assert sequels(reading(7), reading(9, 200.0, blocks=20))[1] is Sequel.RESTART


def test_the_time_a_counter_was_made_decides_where_it_is_told() -> None:
    assert sequels(reading(7, 100.0, 101.5), reading(3, 100.0, 101.5))[1] is Sequel.COUNTER_BACK
    assert sequels(reading(7, 100.0, 101.5), reading(9, 100.0, 102.5))[1] is Sequel.RESTART
    assert sequels(reading(7, 100.0, 101.5), reading(7, 3700.0, 101.5))[1] is Sequel.CLOCK_JUMP


def test_a_start_time_that_moves_while_counters_go_on_is_a_clock_that_was_set() -> None:
    assert sequels(reading(7), reading(9, 3700.0), reading(9, 3700.0))[1:] == [Sequel.CLOCK_JUMP, Sequel.SAME]


def test_a_process_that_comes_back_is_one_of_several_at_the_url() -> None:
    identity = Identity()
    first, second = reading(500, 100.0), reading(20, 200.0)
    found = [identity.read(item) for item in (first, first, second, first, second, second, first)]
    assert found[2:] == [Sequel.RESTART, Sequel.OTHER, Sequel.OTHER, Sequel.SAME, Sequel.OTHER]
    assert identity.alternating


def test_servers_without_a_name_betray_themselves_by_counters_that_go_back_again_and_again() -> None:
    identity = Identity()
    found = [identity.read(reading(tokens, None)) for tokens in (500, 20, 501, 21, 502, 22)]
    assert found == [Sequel.FIRST, Sequel.RESTART, Sequel.SAME, Sequel.RESTART, Sequel.SAME, Sequel.OTHER]
    assert identity.alternating


def test_once_one_server_answers_for_long_it_is_alone_again_and_the_other_is_remembered() -> None:
    identity = Identity()
    for item in (reading(5, 1.0), reading(5, 2.0), reading(5, 1.0)):
        identity.read(item)
    for _ in range(SETTLED_AFTER):
        assert identity.alternating
        assert identity.read(reading(5, 1.0)) is Sequel.SAME
    assert not identity.alternating
    assert identity.read(reading(5, 2.0)) is Sequel.OTHER
    assert identity.alternating


def test_what_says_nothing_changes_nothing() -> None:
    identity = Identity()
    identity.read(reading(7))
    assert identity.read(Reading()) is Sequel.SAME
    assert identity.read(Reading(odd=frozenset({Oddity.NOT_METRICS}))) is Sequel.SAME
    assert identity.read(Reading(running=1)) is Sequel.SAME
    assert identity.read(reading(7, 200.0)) is Sequel.RESTART


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=60))
def test_of_processes_that_never_come_back_each_is_a_restart(steps: list[tuple[int, int]]) -> None:
    """However often a server crashes: no restart is missed, and none is taken for a load balancer."""
    identity = Identity()
    process = tokens = 0
    for crashes, more in steps:
        process += crashes
        tokens = more if crashes else tokens + more
        found = identity.read(reading(tokens, 100.0 + process, 100.5 + process))
        assert found in (Sequel.FIRST, Sequel.RESTART if crashes else Sequel.SAME)
        assert not identity.alternating


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80))
def test_several_servers_are_never_more_restarts_than_there_are_servers(turns: list[int]) -> None:
    identity = Identity()
    tokens = [0, 0, 0, 0]
    found = []
    for server in turns:
        tokens[server] += 5
        found.append(identity.read(reading(tokens[server], float(server + 1), server + 1.5)))
    assert found.count(Sequel.RESTART) < len(set(turns)) + 1
