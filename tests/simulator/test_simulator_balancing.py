"""How requests that ask for no engine are spread: the choices of vLLM's own client, written down from its source."""

from __future__ import annotations

from gateway.simulator.balancing import Balancer
from gateway.simulator.engine import Engine, EngineConfig, EngineRequest


def engines(*running: int) -> list[Engine]:
    """Engines with so many requests at work."""
    made = [Engine(EngineConfig()) for _ in running]
    for engine, count in zip(made, running, strict=True):
        for number in range(count):
            engine.add(EngineRequest(str(number), range(20), range(99)), 0.0)
        engine.step(0.0)
    return made


def choices(balancer: Balancer, count: int, at_s: float = 0.0) -> list[int]:
    made = []
    for _ in range(count):
        made.append(balancer.choose(at_s))
        balancer.sent(made[-1])
    return made


def test_a_burst_on_idle_engines_goes_round() -> None:
    assert choices(Balancer(engines(0, 0, 0)), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_engine_with_the_fewest_requests_is_next_however_large_they_are() -> None:
    assert choices(Balancer(engines(1, 3)), 4) == [0, 0, 0, 1]


def test_what_others_sent_is_seen_when_a_snapshot_is_due() -> None:
    busy = engines(0, 0)
    balancer = Balancer(busy)
    assert choices(balancer, 2) == [0, 1]
    for number in range(5):
        busy[1].add(EngineRequest(f"other{number}", range(20), range(99)), 0.0)
    assert choices(balancer, 2, at_s=0.05) == [0, 1]
    assert choices(balancer, 2, at_s=0.2) == [0, 0]


def test_one_of_several_servers_takes_its_own_for_an_even_share() -> None:
    one, other = (Balancer(engines(0, 0), servers=2, server=server) for server in (0, 1))
    assert choices(one, 2) == [0, 1]
    assert choices(other, 2) == [1, 0]
    one.finished(0)
    assert one.choose(1.0) == 0


def test_releases_before_weighed_waiting_requests_fourfold() -> None:
    busy = engines(3, 0)
    busy[1].add(EngineRequest("waits", range(20), range(99)), 0.0)
    assert choices(Balancer(busy, counts_own=False), 2) == [0, 1]
    assert choices(Balancer(busy), 2) == [1, 1]


def test_a_queue_before_a_full_cache_counts_more() -> None:
    config = EngineConfig(num_gpu_blocks=11)
    full, free = Engine(config), Engine(config)
    for number in range(2):
        full.add(EngineRequest(str(number), range(number, 140 + number), range(9)), 0.0)
    full.step(0.0)
    for number in range(3):
        free.add(EngineRequest(str(number), range(5), range(9)), 0.0)
    free.step(0.0)
    assert (full.running, full.waiting, free.running) == (1, 1, 3)
    assert Balancer([full, free]).choose(0.0) == 1
