"""Our engine behind the interface that ``scheduler_loads`` plays."""

from __future__ import annotations

from scheduler_loads import Limits, Step, Totals

from gateway.simulator.engine import Engine, EngineConfig, EngineRequest


class OwnScheduler:
    """``gateway.simulator.engine.Engine`` in steps; its clock counts them."""

    def __init__(self, limits: Limits) -> None:
        self._engine = Engine(
            EngineConfig(
                num_gpu_blocks=limits.blocks,
                block_size_tokens=limits.block_tokens,
                max_model_len_tokens=limits.window_tokens,
                max_num_seqs=limits.sequences,
                max_num_batched_tokens=limits.batched_tokens,
                enable_prefix_caching=limits.caching,
                reserve_whole_prompt=limits.whole_prompt,
            )
        )
        self._steps = 0
        self._cached: dict[str, int] = {}
        self._open: set[str] = set()

    def add(self, request_id: str, prompt: list[int], output: list[int]) -> None:
        self._open.add(request_id)
        self._engine.add(EngineRequest(request_id, prompt, output), self._steps)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._open.discard(request_id)

    def busy(self) -> bool:
        return bool(self._open)  # what was aborted is dropped when the next step begins

    def step(self) -> Step:
        result = self._engine.step(self._steps)
        self._steps += 1
        self._cached.update({output.request_id: output.cached_tokens for output in result.outputs})
        self._open.difference_update(output.request_id for output in result.outputs if output.finish_reason is not None)
        return Step(
            scheduled=result.scheduled,
            preempted=result.preempted,
            sampled=tuple(output.request_id for output in result.outputs),
            finished=tuple(output.request_id for output in result.outputs if output.finish_reason is not None),
            used_blocks=result.gauges.used_blocks,
        )

    def totals(self) -> Totals:
        counters = self._engine.counters
        return Totals(
            counters.preemptions, counters.prefix_queries_tokens, counters.prefix_hits_tokens, dict(self._cached)
        )
