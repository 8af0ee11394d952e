"""Many steps taken at once end as the same steps taken one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gateway.simulator.engine import Engine, EngineConfig, EngineRequest, FinishedRequest
from gateway.simulator.leaping import LeapingEngine

Arrival = tuple[float, int, int, int, int | None]


@dataclass
class Played:
    """What a run brought: its ends in order, who began in order, and the times between tokens."""

    engine: Engine
    finished: list[FinishedRequest] = field(default_factory=list)
    began: dict[str, None] = field(default_factory=dict)
    gaps: Counter[float] = field(default_factory=Counter)


def script_of(arrivals: list[Arrival]) -> list[tuple[float, EngineRequest]]:
    """Requests of ``(second, shared prefix, own tokens, output tokens, words of the answer before it continues)``."""
    script: list[tuple[float, EngineRequest]] = []
    for number, (moment_s, shared, own, output, continues) in enumerate(sorted(arrivals, key=lambda item: item[0])):
        start = list(range(shared))
        if continues is not None and script:
            start = [*script[-1][1].prompt_token_ids, *([7] * continues)][:100]
        prompt = [*start, *range(1000 * (number + 1), 1000 * (number + 1) + own)]
        script.append((moment_s, EngineRequest(f"r{number}", prompt, [7] * output)))
    return script


def by_steps(arrivals: list[Arrival], config: EngineConfig, aborts: dict[str, float]) -> Played:
    engine, script, aborts = Engine(config), script_of(arrivals), dict(aborts)
    played = Played(engine)
    now_s = 0.0
    while script or engine.has_work:
        if not engine.has_work:
            now_s = max(now_s, script[0][0])
        while script and script[0][0] <= now_s:
            engine.add(script.pop(0)[1], now_s)
        abort_due(engine, aborts, now_s)
        result = engine.step(now_s)
        played.finished.extend(result.finished)
        played.began.update(dict.fromkeys(item.request_id for item in result.outputs))
        played.gaps.update(round(gap_s, 6) for gap_s in result.inter_token_latencies_s)
        now_s = result.ended_s
        if result.idle and not result.finished and engine.has_work:
            if not script:
                break
            now_s = max(now_s, script[0][0])
    return played


def by_leaps(arrivals: list[Arrival], config: EngineConfig, aborts: dict[str, float]) -> Played:
    engine, script, aborts = LeapingEngine(config), script_of(arrivals), dict(aborts)
    played = Played(engine)
    now_s = 0.0
    while script or engine.has_work:
        if not engine.has_work:
            now_s = max(now_s, script[0][0])
        while script and script[0][0] <= now_s:
            engine.add(script.pop(0)[1], now_s)
        abort_due(engine, aborts, now_s)
        steps = engine.steps_ahead()
        for moment_s in [*(item[0] for item in script[:1]), *aborts.values()]:
            # The step under way when somebody comes or goes is taken; the next one sees it.
            steps = min(steps, int((moment_s - now_s) * config.decode_tokens_per_s))
        if steps > 0:
            leap = engine.leap(steps)
            played.gaps[round(leap.step_s, 6)] += leap.steps * leap.running
            now_s += steps * engine.step_s
            continue
        move = engine.move(now_s)
        played.finished.extend(move.finished)
        played.began.update(dict.fromkeys(name for name, _ in move.first))
        for gap_s, count in move.gaps:
            played.gaps[round(gap_s, 6)] += count
        now_s = move.ended_s
        if move.idle and not move.finished and engine.has_work:
            if not script:
                break
            now_s = max(now_s, script[0][0])
    return played


def abort_due(engine: Engine, aborts: dict[str, float], now_s: float) -> None:
    for name in [name for name, moment_s in aborts.items() if moment_s <= now_s]:
        engine.abort(name)
        del aborts[name]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40).map(lambda tick: tick / 8),
            st.integers(0, 40),
            st.integers(1, 60),
            st.integers(1, 80),
            st.none() | st.integers(0, 40),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(12, 60),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([3, 64]),
    st.dictionaries(st.sampled_from(["r0", "r1", "r2"]), st.integers(0, 48).map(lambda tick: tick / 8), max_size=2),
)
def test_leaps_end_as_their_steps_would(
    arrivals: list[Arrival],
    blocks: int,
    size: int,
    whole: bool,
    caching: bool,
    batched: int,
    aborts: dict[str, float],
) -> None:
    config = EngineConfig(
        num_gpu_blocks=blocks * 16 // size,
        block_size_tokens=size,
        max_model_len_tokens=180,
        max_num_seqs=5,
        max_num_batched_tokens=batched,
        enable_prefix_caching=caching,
        reserve_whole_prompt=whole,
        prefill_tokens_per_s=1024.0,
        decode_tokens_per_s=32.0,
    )
    slow, fast = by_steps(arrivals, config, aborts), by_leaps(arrivals, config, aborts)
    assert [(item.request_id, item.output_tokens, item.cached_tokens, item.preemptions) for item in fast.finished] == [
        (item.request_id, item.output_tokens, item.cached_tokens, item.preemptions) for item in slow.finished
    ]
    for one, other in zip(fast.finished, slow.finished, strict=True):
        assert abs(one.finished_s - other.finished_s) < 1e-6
    assert list(fast.began) == list(slow.began)
    assert fast.gaps.total() == slow.gaps.total()
    assert abs(sum(gap_s * count for gap_s, count in (fast.gaps - slow.gaps).items())) < 1e-3
    assert fast.engine.counters == slow.engine.counters
    assert fast.engine.pool.free_blocks == slow.engine.pool.free_blocks
    assert fast.engine.pool.cached_blocks == slow.engine.pool.cached_blocks


def test_a_leap_saves_steps() -> None:
    engine = LeapingEngine(EngineConfig(num_gpu_blocks=64))
    engine.add(EngineRequest("one", list(range(20)), [7] * 100), 0.0)
    assert engine.steps_ahead() == 0  # its prompt is to be read first
    engine.move(0.0)
    assert engine.steps_ahead() == 98  # of the 99 tokens left, the last ends the request
    leap = engine.leap(98)
    assert (leap.steps, leap.running) == (98, 1)
    assert engine.produced() == {"one": 99}
    assert [item.output_tokens for item in engine.move(2.0).finished] == [100]
