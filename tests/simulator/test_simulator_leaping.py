"""Many decoding steps taken at once end as the same steps taken one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.simulator.engine import EngineConfig, EngineRequest, FinishedRequest
from gateway.simulator.leaping import LeapingEngine

Arrival = tuple[float, int, int, int]


def run(arrivals: list[Arrival], config: EngineConfig, *, leaping: bool) -> tuple[list[FinishedRequest], LeapingEngine]:
    """Play ``(second, shared prefix, own tokens, output tokens)`` and return what finished, in order."""
    engine = LeapingEngine(config)
    script = sorted(
        (
            (
                moment_s,
                EngineRequest(
                    f"r{number}", [*range(shared), *range(1000 * (number + 1), 1000 * (number + 1) + own)], [7] * output
                ),
            )
            for number, (moment_s, shared, own, output) in enumerate(arrivals)
        ),
        key=lambda item: item[0],
    )
    finished: list[FinishedRequest] = []
    now_s = 0.0
    while script or engine.has_work:
        if not engine.has_work:
            now_s = max(now_s, script[0][0])
        while script and script[0][0] <= now_s:
            engine.add(script.pop(0)[1], now_s)
        steps = engine.steps_ahead() if leaping else 0
        if script:  # the step under way when somebody comes is taken; the next one sees the new request
            within = int((script[0][0] - now_s) * config.decode_tokens_per_s)
            steps = min(steps, within)
        if steps > 0:
            engine.leap(steps)
            now_s += steps * engine.step_s
            continue
        result = engine.step(now_s)
        finished.extend(result.finished)
        now_s = result.ended_s
        if result.idle and not result.finished and engine.has_work:
            if not script:
                break
            now_s = max(now_s, script[0][0])
    return finished, engine


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40).map(lambda tick: tick / 8),
            st.integers(0, 40),
            st.integers(1, 60),
            st.integers(1, 80),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(12, 60),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
)
def test_a_leap_ends_as_its_steps_would(arrivals: list[Arrival], blocks: int, size: int, whole: bool) -> None:
    config = EngineConfig(
        num_gpu_blocks=blocks * 16 // size,
        block_size_tokens=size,
        max_model_len_tokens=180,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        reserve_whole_prompt=whole,
        prefill_tokens_per_s=1024.0,
        decode_tokens_per_s=32.0,
    )
    slow, by_steps = run(arrivals, config, leaping=False)
    fast, by_leaps = run(arrivals, config, leaping=True)
    assert [(item.request_id, item.output_tokens, item.cached_tokens, item.preemptions) for item in fast] == [
        (item.request_id, item.output_tokens, item.cached_tokens, item.preemptions) for item in slow
    ]
    assert [round(item.finished_s, 6) for item in fast] == [round(item.finished_s, 6) for item in slow]
    assert by_leaps.counters == by_steps.counters
    assert by_leaps.pool.free_blocks == by_steps.pool.free_blocks


def test_a_leap_saves_steps() -> None:
    engine = LeapingEngine(EngineConfig(num_gpu_blocks=64))
    engine.add(EngineRequest("one", list(range(20)), [7] * 100), 0.0)
    engine.step(0.0)
    assert engine.steps_ahead() == 98  # of the 99 tokens left, the last ends the request
    leap = engine.leap(98)
    assert (leap.steps, leap.running) == (98, 1)
    assert engine.produced() == {"one": 99}
    assert [item.output_tokens for item in engine.step(2.0).finished] == [100]
