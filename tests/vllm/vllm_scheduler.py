"""vLLM's own scheduler and KV cache manager behind the interface that ``scheduler_loads`` plays. No model is loaded.

Runs in vLLM's environment; a line of JSON for each load goes to stdout. The recording that the simulator's tests hold
themselves to is made with::

    .venv-vllm/bin/python tests/vllm/vllm_scheduler.py .cache/models/qwen3-tiny 0 39 --record \\
        > tests/simulator/recordings/scheduler.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections import deque
from typing import Any

from scheduler_loads import Limits, Step, Totals, outcome_of, play, random_load

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class VllmScheduler:
    """``vllm.v1.core.sched.scheduler.Scheduler``, driven as ``EngineCore.step`` drives it, with outputs of our own."""

    def __init__(self, limits: Limits, folder: str, *, ahead: int = 0) -> None:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_num_seqs=limits.sequences,
                max_num_batched_tokens=limits.batched_tokens,
                max_model_len=limits.window_tokens,
                is_encoder_decoder=False,
                scheduler_reserve_full_isl=limits.whole_prompt,
            ),
            model_config=ModelConfig(
                model=folder, dtype="float32", max_model_len=limits.window_tokens, skip_tokenizer_init=True
            ),
            cache_config=CacheConfig(block_size=limits.block_tokens, enable_prefix_caching=limits.caching),
        )
        config.cache_config.num_gpu_blocks = limits.blocks
        layers = FullAttentionSpec(block_size=limits.block_tokens, num_kv_heads=1, head_size=32, dtype=torch.float32)
        kind = AsyncScheduler if ahead else Scheduler
        self._scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=limits.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)]
            ),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=limits.block_tokens,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(limits.block_tokens, sha256)
        self._limits = limits
        self._ahead = ahead
        self._in_flight: deque[tuple[Any, list[str]]] = deque()
        self._outputs: dict[str, list[int]] = {}
        self._produced: dict[str, int] = {}
        self._preemptions = 0
        self._queries = 0
        self._hits = 0
        self._cached: dict[str, int] = {}

    def add(self, request_id: str, prompt: list[int], output: list[int]) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=len(output), ignore_eos=True)
        request = Request(request_id, prompt, params, None, block_hasher=self._hasher)
        self._outputs[request_id] = output
        self._produced[request_id] = 0
        self._scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def busy(self) -> bool:
        return bool(self._in_flight or self._scheduler.get_num_unfinished_requests())

    def step(self) -> Step:
        """One iteration of the engine's loop. Ahead, what is scheduled in one is sampled in the next."""
        before = {name: request.num_preemptions for name, request in self._scheduler.requests.items()}
        planned = self._scheduler.schedule()
        preempted = [name for name, count in before.items() if self._scheduler.requests[name].num_preemptions > count]
        order = [request.request_id for request in self._scheduler.waiting]
        preempted.sort(key=order.index, reverse=True)  # each was put before the one that was preempted before it
        self._preemptions += len(preempted)
        if planned.num_scheduled_tokens:
            known = self._scheduler.requests
            sampling = [name for name in planned.num_scheduled_tokens if not known[name].is_prefill_chunk]
            self._in_flight.append((planned, sampling))
        sampled, finished = (), ()
        if len(self._in_flight) > self._ahead or (self._in_flight and not planned.num_scheduled_tokens):
            sampled, finished = self._update(*self._in_flight.popleft())
        return Step(
            scheduled=tuple(planned.num_scheduled_tokens.items()),
            preempted=tuple(preempted),
            sampled=sampled,
            finished=finished,
            used_blocks=round(self._scheduler.kv_cache_manager.usage * (self._limits.blocks - 1)),
        )

    def _update(self, planned: Any, sampling: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Give the scheduler what a step sampled; who got a token, and who ended with it."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(planned.num_scheduled_tokens)
        tokens = []
        for name in names:
            known = self._outputs[name]
            place = self._produced[name]
            tokens.append([known[min(place, len(known) - 1)]] if name in sampling else [])
            self._produced[name] += name in sampling
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
        )
        finished = []
        for outputs in self._scheduler.update_from_output(planned, output).values():
            for item in outputs.outputs:
                if item.prefill_stats is not None:
                    self._cached[item.request_id] = item.prefill_stats.num_cached_tokens
                if item.finish_reason is not None:
                    finished.append(item.request_id)
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.prefix_cache_stats is not None:
                self._queries += outputs.scheduler_stats.prefix_cache_stats.queries
                self._hits += outputs.scheduler_stats.prefix_cache_stats.hits
        return tuple(sampling), tuple(finished)

    def totals(self) -> Totals:
        return Totals(self._preemptions, self._queries, self._hits, self._cached)


def main() -> None:
    """Play loads and print what vLLM makes of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of any model that vLLM knows")
    parser.add_argument("first", type=int, help="first seed")
    parser.add_argument("last", type=int, help="last seed")
    parser.add_argument("--ahead", type=int, default=0, help="1: asynchronous scheduling, as vLLM does on GPUs")
    parser.add_argument("--record", action="store_true", help="print the load and a digest instead of the steps")
    options = parser.parse_args()
    for seed in range(options.first, options.last + 1):
        load = random_load(seed)
        scheduler = VllmScheduler(load.limits, options.model, ahead=options.ahead)
        steps = list(play(load, scheduler))
        if options.record:
            outcome = outcome_of(steps, scheduler.totals())
            line = {"load": dataclasses.asdict(load), "outcome": dataclasses.asdict(outcome)}
        else:
            every = [dataclasses.astuple(step) for step in steps]
            line = {"seed": seed, "steps": every, "totals": dataclasses.asdict(scheduler.totals())}
        print(json.dumps(line, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
