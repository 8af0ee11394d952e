"""A backend that came back gets its share of work by and by; what is timed there is learned."""

from __future__ import annotations

from dataclasses import replace

from gateway.config import BackendSettings, FleetSettings
from gateway.fleet.backend import WatchedBackend
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.discovery import ModelCard
from gateway.types import Need


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def watched(clock: Clock, **fields: float) -> WatchedBackend:
    fleet = FleetSettings(failures_to_open=1, reopen_after_s=5.0, **fields)
    item = WatchedBackend(BackendSettings(url="http://a", weight=2.0), fleet, clock, lambda: None)
    item.found((ModelCard("m", None, None, 4096),), KvCapacity(1, 1000, 16))
    return item


async def test_its_share_grows_after_its_breaker_has_closed() -> None:
    clock = Clock()
    item = watched(clock, slow_start_s=10.0)
    assert item.targets[0].view(clock.now_s).share == 2.0
    item.availability.note_failure()
    clock.now_s += 6
    item.availability.note_success()
    assert item.targets[0].view(clock.now_s).share == 0.2
    assert item.targets[0].view(clock.now_s).warmth == 0.1
    clock.now_s += 5
    assert item.targets[0].view(clock.now_s).share == 1.0
    clock.now_s += 5
    assert item.targets[0].view(clock.now_s).share == 2.0


async def test_without_a_slow_start_it_gets_all_at_once() -> None:
    clock = Clock()
    item = watched(clock, slow_start_s=0.0)
    item.availability.note_failure()
    clock.now_s += 6
    item.availability.note_success()
    assert item.targets[0].view(clock.now_s).share == 2.0


async def test_streams_tell_how_fast_it_is() -> None:
    clock = Clock()
    item = watched(clock)
    for number in range(40):
        prompt_tokens = 100 + 50 * number
        lease = item.reserve(Need(prompt_tokens, 100), None, timed=True)
        clock.now_s += 0.1 + prompt_tokens / 2000
        lease.first_byte()
        for _ in range(50):
            clock.now_s += 0.02
            lease.grow(1)
        lease.release()
        lease.release()
    record = item.record(clock.now_s)
    assert record.prefill_tokens_per_s is not None
    assert abs(record.prefill_tokens_per_s - 2000) < 20
    assert record.output_tokens_per_s is not None
    assert abs(record.output_tokens_per_s - 49) < 2
    view = item.targets[0].view(clock.now_s)
    assert (view.prefill_s, view.output_s) == (item.rates.prefill_s, item.rates.output_s)


async def test_prompts_ahead_and_what_was_cached_are_reckoned_with() -> None:
    """Two at once: the second waits for the first; most of its own prompt was cached, as its answer tells."""
    clock = Clock()
    item = watched(clock)
    for number in range(40):
        first_tokens = 200 + 40 * number
        first = item.reserve(Need(first_tokens, 10), None, timed=True)
        second = item.reserve(Need(5000, 10), None, timed=True)
        clock.now_s += first_tokens / 1000
        first.first_byte()
        clock.now_s += 0.5
        second.first_byte()
        second.cached_tokens = 4500
        first.release()
        second.release()
    assert item.rates.prefill_s is not None
    assert abs(1 / item.rates.prefill_s - 1000) < 20


async def test_what_should_be_cached_is_not_pending() -> None:
    item = watched(Clock())
    lease = item.reserve(Need(1000, 10), None, cached_tokens=900)
    assert item.engines[0].pending_prompt_tokens == 100
    assert item.engines[0].reserved_blocks == Need(1000, 10).blocks(16)
    lease.first_byte()
    assert item.engines[0].pending_prompt_tokens == 0
    lease.release()


async def test_whole_answers_tell_of_a_late_backend_where_little_of_their_time_is_output() -> None:
    clock = Clock()
    item = watched(clock)
    for _ in range(20):  # a stream in between tells the pace of the output
        lease = item.reserve(Need(100, 100), None, timed=True)
        lease.first_byte()
        lease.grow(101)
        clock.now_s += 1.0
        lease.release()
    assert item.rates.first_s is None
    for output_tokens in (11, 21, 31, 41):
        lease = item.reserve(Need(100, 50), None)
        clock.now_s += 2.0 + 0.01 * output_tokens
        lease.took(output_tokens, 2.0 + 0.01 * output_tokens)
        lease.release()
    assert item.rates.first_s is not None
    assert abs(item.rates.first_s - 2.0) < 0.05
    assert item.record(clock.now_s).first_byte_s == item.rates.base_s


async def test_a_wait_in_the_servers_own_queue_is_no_delay_of_its_own() -> None:
    clock = Clock()
    item = watched(clock)
    for waiting in (0, 5):
        item.reading, item.read_s = replace(item.reading, waiting=waiting), clock.now_s
        for _ in range(12):
            lease = item.reserve(Need(100, 100), None, timed=True)
            clock.now_s += 0.1 + waiting
            item.read_s = clock.now_s
            lease.first_byte()
            lease.release()
    assert item.rates.first_s is not None
    assert abs(item.rates.first_s - 0.1) < 0.01


async def test_who_gets_nothing_is_believed_less_until_one_request_tries_it() -> None:
    clock, placed = Clock(), [0.0]
    touched: list[str] = []
    item = WatchedBackend(
        BackendSettings(url="http://a"),
        FleetSettings(),
        clock,
        lambda: None,
        lambda target, resting: touched.append(target.name),
        rounds=lambda: placed[0],
    )
    item.found((ModelCard("m", None, None, 4096),), KvCapacity(1, 1000, 16))

    def ask(took_s: float) -> None:
        lease = item.reserve(Need(100, 10), None, timed=True)
        assert item.targets[0].view(clock.now_s).trust == 1.0
        clock.now_s += took_s
        lease.first_byte()
        lease.release()

    for _ in range(12):
        ask(3.0)
    assert item.targets[0].view(clock.now_s).first_s == 3.0
    for took_s, known_s in ((3.0, 3.0), (0.2, None)):
        clock.now_s, placed[0] = clock.now_s + 35.0, placed[0] + 1000
        assert item.targets[0].view(clock.now_s).trust == 0.125
        touched.clear()
        ask(took_s)
        assert touched  # placing sees at once that it is not to be tried by more
        assert item.rates.first_s == known_s
