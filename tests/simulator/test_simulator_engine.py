"""The engine schedules as vLLM V1 does: no block is lost, order is kept, and what is preempted is computed anew."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.simulator.blocks import BlockPool, block_hashes
from gateway.simulator.clock import play
from gateway.simulator.engine import Engine, EngineConfig, EngineRequest, StepResult


def request(name: str, prompt: int, output: int, *, shared: int = 0, **more: object) -> EngineRequest:
    """``shared`` leading tokens are equal in all requests; the rest is the request's own."""
    own = hash(name) % 10**9
    ids = [*range(shared), *(own * 10000 + index for index in range(prompt - shared))]
    return EngineRequest(name, ids, range(output), **more)  # type: ignore[arg-type]


def config(**more: object) -> EngineConfig:
    defaults: dict[str, object] = {"num_gpu_blocks": 101, "block_size_tokens": 4, "max_model_len_tokens": 400}
    return EngineConfig(**{**defaults, **more})  # type: ignore[arg-type]


def ends(steps: list[StepResult]) -> dict[str, int]:
    """Output tokens of each request that finished."""
    return {done.request_id: done.output_tokens for step in steps for done in step.finished}


arrival = st.tuples(
    st.floats(0, 2), st.integers(1, 120), st.integers(0, 60), st.integers(0, 40), st.none() | st.floats(0, 3)
)


@given(
    st.lists(arrival, max_size=12),
    st.integers(2, 60),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
    st.integers(1, 64),
)
def test_blocks_are_never_lost_or_doubled(
    arrivals: list[tuple[float, int, int, int, float | None]],
    blocks: int,
    caching: bool,
    whole: bool,
    seqs: int,
    batched: int,
) -> None:
    engine = Engine(
        config(
            num_gpu_blocks=blocks,
            enable_prefix_caching=caching,
            reserve_whole_prompt=whole,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
        )
    )
    fitting = [item for item in arrivals if item[1] + item[2] <= (blocks - 1) * 4]
    timed = [
        (at, request(f"r{number}", prompt, output, shared=min(shared, prompt)))
        for number, (at, prompt, output, shared, _) in enumerate(fitting)
    ]
    aborts = [(item[4], f"r{number}") for number, item in enumerate(fitting) if item[4] is not None]
    steps = []
    for step in play(engine, timed, aborts):
        steps.append(step)
        assert len(steps) < 20000
        held = [block for sequence in engine._known.values() for block in sequence.blocks]
        counted = [engine.pool._references[block] for block in range(blocks)]
        assert sorted(set(held)) == [block for block in range(blocks) if counted[block]]
        assert len(held) == sum(counted)
        assert 0 not in held
        assert engine.pool.free_blocks == blocks - 1 - len(set(held))
        assert step.prefill_tokens + step.decode_tokens <= batched
        assert engine.running <= seqs
    assert engine.gauges().kv_usage_ratio == 0
    assert not engine.has_work
    assert len(ends(steps)) == len(fitting)
    whole_answers = {done.request_id for step in steps for done in step.finished if done.finish_reason != "abort"}
    assert all(
        ends(steps)[item.request_id] == len(item.output_token_ids)
        for _, item in timed
        if item.request_id in whole_answers
    )


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 5)), min_size=1, max_size=10), st.integers(1, 4))
def test_first_come_is_first_served(sizes: list[tuple[int, int]], seqs: int) -> None:
    engine = Engine(config(num_gpu_blocks=26, max_num_seqs=seqs, max_num_batched_tokens=16))
    names = [f"r{number:02}" for number in range(len(sizes))]
    timed = [(0.0, request(name, *size)) for name, size in zip(names, sizes, strict=True)]
    steps = list(play(engine, timed))
    done = sorted((item for step in steps for item in step.finished), key=lambda item: item.request_id)
    scheduled = [item.scheduled_s or 0.0 for item in done]
    assert scheduled == sorted(scheduled)


def test_the_head_of_the_queue_blocks_smaller_requests_behind_it() -> None:
    engine = Engine(config(num_gpu_blocks=26))  # 25 blocks of 4
    engine.add(request("running", 60, 5), 0)
    engine.step(0)
    engine.add(request("large", 60, 1), 0)
    engine.add(request("small", 4, 1), 0)
    engine.step(1)
    assert (engine.running, engine.waiting) == (1, 2)


def test_the_whole_prompt_must_fit_since_019_and_only_its_first_chunk_before() -> None:
    for whole, running in ((True, 1), (False, 2)):
        engine = Engine(config(num_gpu_blocks=26, reserve_whole_prompt=whole, max_num_batched_tokens=32))
        engine.add(request("a", 60, 5), 0)
        engine.step(0)
        engine.step(0.5)  # 16 of 25 blocks
        engine.add(request("b", 80, 5), 0)
        engine.step(1)
        assert engine.running == running


def test_running_out_of_blocks_preempts_the_last_arrived_and_recomputes_it() -> None:
    engine = Engine(config(num_gpu_blocks=13, enable_prefix_caching=False))  # 12 blocks = 48 tokens
    steps = list(play(engine, [(0.0, request("first", 20, 20)), (0.0, request("second", 20, 20))]))
    preempted = [name for step in steps for name in step.preempted]
    assert preempted == ["second"]
    assert engine.counters.preemptions == 1
    assert ends(steps) == {"first": 20, "second": 20}
    before = next(index for index, step in enumerate(steps) if step.preempted)
    recomputed = [step.prefill_tokens for step in steps[before + 1 :] if step.prefill_tokens]
    assert recomputed and recomputed[0] > 20  # the prompt and what it had said already
    assert next(done for step in steps for done in step.finished if done.request_id == "second").preemptions == 1


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    engine = Engine(config(num_gpu_blocks=11, enable_prefix_caching=False))  # 10 blocks
    engine.add(request("a", 16, 30), 0)
    engine.add(request("b", 20, 30), 0)
    now = 0.0
    while not (step := engine.step(now)).preempted:
        now = step.ended_s
    assert step.preempted == ("b",)
    assert (engine.running, engine.waiting) == (1, 1)


@given(st.integers(1, 200), st.integers(1, 8))
def test_a_prefix_hit_is_whole_blocks_and_leaves_a_token_to_compute(prompt: int, size: int) -> None:
    engine = Engine(config(num_gpu_blocks=402, block_size_tokens=size, max_num_batched_tokens=500))
    for name in ("one", "two"):
        steps = list(play(engine, [(0.0, request(name, prompt, 1, shared=prompt))]))
    cached = steps[-1].finished[0].cached_tokens
    assert cached % size == 0
    assert cached == (prompt - 1) // size * size
    assert engine.counters.prefix_queries_tokens == 2 * prompt
    assert engine.counters.prefix_hits_tokens == cached


def test_equal_tokens_under_another_key_share_nothing() -> None:
    engine = Engine(config())
    steps = list(
        play(engine, [(0.0, request("a", 40, 1, shared=40)), (1.0, request("b", 40, 1, shared=40, cache_key="x"))])
    )
    assert [done.cached_tokens for step in steps for done in step.finished] == [0, 0]


def test_idle_cached_blocks_are_free_and_evicted_tail_first() -> None:
    engine = Engine(config(num_gpu_blocks=26))
    list(play(engine, [(0.0, request("old", 80, 1, shared=80))]))
    assert engine.gauges().used_blocks == 0
    assert engine.pool.cached_blocks == 20
    list(play(engine, [(0.0, request("new", 60, 1))]))  # 15 of 25 blocks: 5 unhashed ones first, then 10 of the tail
    steps = list(play(engine, [(0.0, request("again", 80, 1, shared=80))]))
    assert steps[-1].finished[0].cached_tokens == 40


def test_blocks_that_nothing_leads_to_are_handed_out_before_cached_ones_since_028() -> None:
    for first, cached in ((True, 40), (False, 36)):
        engine = Engine(config(num_gpu_blocks=13, unfindable_blocks_first=first))  # 12 blocks
        list(play(engine, [(0.0, request("old", 42, 1, shared=42))]))  # ten full blocks and a partial one
        list(play(engine, [(0.0, request("new", 6, 1))]))  # two blocks: the partial one and one never used
        list(play(engine, [(0.0, request("newer", 3, 1))]))
        steps = list(play(engine, [(0.0, request("again", 42, 1, shared=42))]))
        assert steps[-1].finished[0].cached_tokens == cached


def test_sequences_of_one_request_share_its_full_prompt_blocks() -> None:
    engine = Engine(config())
    for index in range(4):
        engine.add(EngineRequest(f"r-{index}", range(42), range(8)), 0)
    engine.step(0)
    assert engine.gauges().used_blocks == 10 + 4  # ten shared, the partial last one private


def test_an_abort_frees_the_blocks_when_the_next_step_begins() -> None:
    engine = Engine(config())
    engine.add(request("gone", 40, 50), 0)
    engine.step(0)
    engine.abort("gone")
    assert engine.gauges().used_blocks > 0
    step = engine.step(1)
    assert step.idle and step.duration_s == 0
    assert (step.gauges.used_blocks, step.gauges.running) == (0, 0)
    assert [done.finish_reason for done in step.finished] == ["abort"]
    assert not engine.has_work
    engine.abort("gone")  # unknown now, and harmless


def test_prefill_is_chunked_and_takes_the_time_its_rate_says() -> None:
    engine = Engine(config(max_num_batched_tokens=100, prefill_tokens_per_s=1000, decode_tokens_per_s=10))
    steps = list(play(engine, [(0.0, request("a", 250, 3))]))
    assert [step.prefill_tokens for step in steps] == [100, 100, 50, 0, 0]
    assert [round(step.duration_s, 6) for step in steps] == [0.1, 0.1, 0.05, 0.1, 0.1]
    done = steps[-1].finished[0]
    assert done.first_token_s == pytest.approx(0.25)
    assert done.finished_s == pytest.approx(0.45)


def test_a_sequence_ends_at_the_window() -> None:
    engine = Engine(config(max_model_len_tokens=50))
    steps = list(play(engine, [(0.0, request("a", 45, 1000))]))
    assert steps[-1].finished[0].finish_reason == "length"
    assert steps[-1].finished[0].output_tokens == 5
    with pytest.raises(ValueError, match="max_model_len"):
        engine.add(request("b", 50, 1), 0)


def test_a_prompt_larger_than_the_pool_waits_for_ever() -> None:
    engine = Engine(config(num_gpu_blocks=5))
    steps = list(play(engine, [(0.0, request("a", 40, 1))]))
    assert steps[-1].idle
    assert (engine.running, engine.waiting) == (0, 1)


def test_usage_is_over_the_usable_blocks_and_before_0102_over_all() -> None:
    for old, usage in ((False, 10 / 100), (True, 11 / 101)):
        engine = Engine(config(null_block_in_usage=old))
        engine.add(request("a", 40, 9), 0)
        assert engine.step(0).gauges.kv_usage_ratio == pytest.approx(usage)


def test_an_hour_of_traffic_passes_in_moments() -> None:
    engine = Engine(EngineConfig(num_gpu_blocks=2000))
    timed = [(index * 3.6, request(f"r{index}", 300, 50)) for index in range(1000)]
    ended = 0.0
    finished = 0
    for step in play(engine, timed):
        assert step.started_s >= ended - 1e-9
        ended = step.ended_s
        finished += len(step.finished)
    assert finished == 1000
    assert ended > 3590


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_hashes_chain_so_equal_hashes_mean_equal_beginnings(tokens: list[int], size: int) -> None:
    hashes = block_hashes(tokens, size, [])
    assert len(hashes) == len(tokens) // size
    assert len(set(hashes)) == len(hashes)
    grown = block_hashes(tokens[: len(tokens) // 2], size, [])
    assert all(a == b for a, b in zip(grown, hashes, strict=False))
    assert block_hashes(tokens, size, grown) == hashes
    assert all(a != b for a, b in pairwise(hashes))


def test_the_pool_refuses_what_would_corrupt_it() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    with pytest.raises(ValueError, match="free"):
        pool.allocate(1)
    pool.release(taken)
    with pytest.raises(ValueError, match="more often"):
        pool.release(taken)
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)
