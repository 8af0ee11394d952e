"""A sans-I/O engine that schedules as vLLM V1 does: the clock is an argument, a step is a call, nothing sleeps here.

Each ``step(now_s)`` first frees what was aborted, then gives running requests their next tokens (preempting the last
arrived when blocks run out), then admits waiting ones in order of arrival, and returns what the step produced and how
long it takes at the configured rates. vLLM's ``v1/core/sched/scheduler.py`` (0.32) is the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.simulator.blocks import BlockPool, BlockStored, block_hashes

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is given. Rates are tokens per second.

    ``prefill_tokens_per_s`` is for the whole engine; ``decode_tokens_per_s`` is what one sequence sees, since a batch
    advances together: a step takes ``prefill tokens / prefill rate``, plus ``1 / decode rate`` if it decodes at all.
    ``reserve_whole_prompt``: admit only if the whole prompt fits (vLLM 0.19 on), not just its first chunk.
    ``unfindable_blocks_first``: freed blocks that no prefix can hit are handed out before cached ones (vLLM 0.28 on).
    ``null_block_in_usage``: before 0.10.2 the usage gauge was divided by all blocks, the null block included.
    """

    num_gpu_blocks: int = 4096
    block_size_tokens: int = 16
    max_model_len_tokens: int = 32768
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    reserve_whole_prompt: bool = True
    unfindable_blocks_first: bool = True
    null_block_in_usage: bool = False
    prefill_tokens_per_s: float = 20000.0
    decode_tokens_per_s: float = 50.0

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "max_model_len_tokens", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks must be at least 2 (one is the null block), not {self.num_gpu_blocks}")
        if self.prefill_tokens_per_s <= 0 or self.decode_tokens_per_s <= 0:
            raise ValueError("rates must be above zero")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence. ``output_token_ids`` is what it will say, decided beforehand; empty for pooling requests.

    ``finish_reason`` tells why it ends after the last of them. ``cache_key`` keeps prompts apart that must not share
    blocks. ``skip_cache``: do not read the prefix cache (``prompt_logprobs`` requests).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    finish_reason: FinishReason = "length"
    cache_key: object = None
    skip_cache: bool = False


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token, or the end of a pooling request (``token_id`` is ``None``)."""

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The life of a request that ended: times in seconds on the engine's clock, ``None`` if it never came so far."""

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    arrived_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float


@dataclass(frozen=True, slots=True)
class Gauges:
    """What ``/metrics`` shows of an engine after a step."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    kv_usage_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. Its outputs exist at ``ended_s``, not before. ``idle``: nothing could be scheduled.

    ``scheduled``: tokens computed for each request, in the order in which they were given.
    """

    started_s: float
    duration_s: float
    scheduled: tuple[tuple[str, int], ...]
    outputs: tuple[TokenOutput, ...]
    finished: tuple[FinishedRequest, ...]
    preempted: tuple[str, ...]
    prefill_tokens: int
    decode_tokens: int
    first_token_latencies_s: tuple[float, ...]
    inter_token_latencies_s: tuple[float, ...]
    gauges: Gauges

    @property
    def ended_s(self) -> float:
        return self.started_s + self.duration_s

    @property
    def idle(self) -> bool:
        return not (self.prefill_tokens or self.decode_tokens)


@dataclass(slots=True)
class Counters:
    """Cumulative counts since the engine started. Prefix cache counts are in tokens."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    success: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way through the engine. ``tokens`` grows as it is answered."""

    request: EngineRequest
    arrived_s: float
    tokens: list[int]
    hashes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    remembered: int = 0
    produced: int = 0
    cached: int | None = None
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Engine:
    """One engine (one data-parallel rank). Not thread-safe; every method returns at once."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(
            config.num_gpu_blocks,
            caching=config.enable_prefix_caching,
            unfindable_first=config.unfindable_blocks_first,
        )
        self.counters = Counters()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._known: dict[str, _Sequence] = {}
        self._aborting: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"<Engine {len(self._running)} running, {len(self._waiting)} waiting, {self.pool!r}>"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step may change anything. False after the step that ends or drops the last request."""
        return bool(self._known)

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request. Raises ``ValueError`` for what vLLM's front end would have refused."""
        if request.request_id in self._known:
            raise ValueError(f"request {request.request_id} is already here")
        if not request.prompt_token_ids:
            raise ValueError("The decoder prompt cannot be empty")
        if len(request.prompt_token_ids) + bool(request.output_token_ids) > self.config.max_model_len_tokens:
            raise ValueError("the prompt leaves no room in max_model_len")
        sequence = _Sequence(request, now_s, list(request.prompt_token_ids))
        self._known[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request; its blocks are freed when the next step begins. Unknown ids are ignored."""
        if request_id in self._known:
            self._aborting[request_id] = None

    def gauges(self) -> Gauges:
        """The state now. ``/metrics`` must show that of the last ``StepResult`` instead."""
        used = self.pool.used_blocks
        null = int(self.config.null_block_in_usage)
        whole = self.config.num_gpu_blocks - 1 + null
        return Gauges(len(self._running), len(self._waiting), used, (used + null) / whole)

    def step(self, now_s: float) -> StepResult:
        """Run one scheduling step that starts at ``now_s``."""
        finished = [self._drop(request_id, now_s) for request_id in self._aborting]
        self._aborting.clear()
        preempted: list[str] = []
        batch: list[tuple[_Sequence, int]] = []
        budget = self._schedule_running(batch, preempted)
        if not preempted:
            self._admit(batch, budget, now_s)
        prefill = sum(count for sequence, count in batch if not self._decodes(sequence, count))
        decode = sum(count for _, count in batch) - prefill
        duration_s = prefill / self.config.prefill_tokens_per_s + bool(decode) / self.config.decode_tokens_per_s
        outputs, latencies, gaps = self._sample(batch, now_s + duration_s, finished)
        return StepResult(
            started_s=now_s,
            duration_s=duration_s,
            scheduled=tuple((sequence.request.request_id, count) for sequence, count in batch),
            outputs=tuple(outputs),
            finished=tuple(finished),
            preempted=tuple(preempted),
            prefill_tokens=prefill,
            decode_tokens=decode,
            first_token_latencies_s=tuple(latencies),
            inter_token_latencies_s=tuple(gaps),
            gauges=self.gauges(),
        )

    def _schedule_running(self, batch: list[tuple[_Sequence, int]], preempted: list[str]) -> int:
        """Give each running request its next chunk or token; returns what is left of the token budget."""
        budget, index = self.config.max_num_batched_tokens, 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            count = min(sequence.pending, budget)
            if not self._make_room(sequence, count, preempted):
                break
            batch.append((sequence, count))
            budget -= count
            index += 1
        return budget

    def _make_room(self, sequence: _Sequence, count: int, preempted: list[str]) -> bool:
        """Blocks for the next ``count`` tokens, taken from the last arrived if need be; false if it gave up its own."""
        while not self._grow(sequence, sequence.computed + count):
            victim = self._running.pop()
            self._preempt(victim)
            preempted.append(victim.request.request_id)
            if victim is sequence:
                return False
        return True

    def _admit(self, batch: list[tuple[_Sequence, int]], budget: int, now_s: float) -> None:
        """Admit in order of arrival until the head does not fit; whoever is behind it waits with it."""
        size = self.config.block_size_tokens
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            cached_blocks = self._find_prefix(sequence)
            cached = len(cached_blocks) * size
            count = min(len(sequence.tokens) - cached, budget)
            reach = len(sequence.tokens) if self.config.reserve_whole_prompt else cached + count
            wanted = -(-reach // size) - len(cached_blocks)
            if wanted + self.pool.idle(cached_blocks) > self.pool.free_blocks:
                break
            self._waiting.popleft()
            self.pool.touch(cached_blocks)
            sequence.blocks = cached_blocks
            sequence.computed = cached
            sequence.remembered = len(cached_blocks)
            if not self._grow(sequence, cached + count):
                raise AssertionError("the admission test promised these blocks")
            self._note_admission(sequence, cached, now_s)
            self._running.append(sequence)
            batch.append((sequence, count))
            budget -= count

    def _note_admission(self, sequence: _Sequence, cached: int, now_s: float) -> None:
        if sequence.scheduled_s is None:
            sequence.scheduled_s = max(now_s, sequence.arrived_s)  # a late driver may start a step in the past
        if sequence.cached is None:  # vLLM keeps the look-ups of preempted requests apart
            sequence.cached = cached
            if self.config.enable_prefix_caching and not sequence.request.skip_cache:
                self.counters.prefix_queries_tokens += len(sequence.tokens)
                self.counters.prefix_hits_tokens += cached

    def _find_prefix(self, sequence: _Sequence) -> list[int]:
        """Cached blocks of the request's prefix; at least one token is left to compute."""
        if not self.config.enable_prefix_caching or sequence.request.skip_cache:
            return []
        size = self.config.block_size_tokens
        hashes = block_hashes(sequence.tokens, size, sequence.hashes, sequence.request.cache_key)
        return self.pool.find(hashes[: (len(sequence.tokens) - 1) // size])

    def _grow(self, sequence: _Sequence, tokens: int) -> bool:
        """Extend the request's blocks to hold ``tokens``; false, with nothing taken, if they are not free."""
        size = self.config.block_size_tokens
        missing = -(-tokens // size) - len(sequence.blocks)
        if missing > self.pool.free_blocks:
            return False
        if missing > 0:
            sequence.blocks.extend(self.pool.allocate(missing))
        if self.config.enable_prefix_caching:
            # As in vLLM, blocks become findable when they are scheduled: a later request of the same step may share.
            hashes = block_hashes(sequence.tokens, size, sequence.hashes, sequence.request.cache_key)
            full = tokens // size
            if full > sequence.remembered:
                fresh = slice(sequence.remembered, full)
                self.pool.remember_all(sequence.blocks[fresh], hashes[fresh])
                if self.pool.journal is not None:
                    parent = hashes[sequence.remembered - 1] if sequence.remembered else None
                    ids = sequence.tokens[sequence.remembered * size : full * size]
                    self.pool.journal.append(BlockStored(hashes[fresh], parent, ids, sequence.request.cache_key))
                sequence.remembered = full
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        """Free everything and start over from the front of the queue (V1 recomputes, it never swaps)."""
        self._free(sequence)
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(sequence)

    def _free(self, sequence: _Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.remembered = 0

    @staticmethod
    def _decodes(sequence: _Sequence, count: int) -> bool:
        return count == 1 and sequence.produced > 0 and sequence.pending == 1

    def _sample(
        self, batch: list[tuple[_Sequence, int]], ended_s: float, finished: list[FinishedRequest]
    ) -> tuple[list[TokenOutput], list[float], list[float]]:
        """One token for each request whose known tokens are all computed."""
        outputs: list[TokenOutput] = []
        latencies: list[float] = []
        gaps: list[float] = []
        for sequence, count in batch:
            moment_s = max(ended_s, sequence.scheduled_s or ended_s)
            sequence.computed += count
            if sequence.pending:
                continue
            planned = sequence.request.output_token_ids
            token = planned[sequence.produced] if len(planned) else None
            if sequence.last_token_s is None:
                sequence.first_token_s = moment_s
                self.counters.prompt_tokens += len(sequence.request.prompt_token_ids)
                self.counters.cached_prompt_tokens += sequence.cached or 0
                latencies.append(moment_s - sequence.arrived_s)
            else:
                gaps.append(moment_s - sequence.last_token_s)
            sequence.last_token_s = moment_s
            if token is not None:
                sequence.tokens.append(token)
                sequence.produced += 1
                self.counters.generation_tokens += 1
            reason = self._end_of(sequence)
            outputs.append(TokenOutput(sequence.request.request_id, token, reason, sequence.cached or 0))
            if reason is not None:
                finished.append(self._finish(sequence, reason, moment_s))
        return outputs, latencies, gaps

    def _end_of(self, sequence: _Sequence) -> FinishReason | None:
        if sequence.produced >= len(sequence.request.output_token_ids):
            return sequence.request.finish_reason
        return "length" if len(sequence.tokens) >= self.config.max_model_len_tokens else None

    def _finish(self, sequence: _Sequence, reason: FinishReason, now_s: float) -> FinishedRequest:
        if sequence in self._running:
            self._running.remove(sequence)
        self._free(sequence)
        del self._known[sequence.request.request_id]
        self.counters.success[reason] += 1
        return FinishedRequest(
            request_id=sequence.request.request_id,
            finish_reason=reason,
            prompt_tokens=len(sequence.request.prompt_token_ids),
            output_tokens=sequence.produced,
            cached_tokens=sequence.cached or 0,
            preemptions=sequence.preemptions,
            arrived_s=sequence.arrived_s,
            scheduled_s=sequence.scheduled_s,
            first_token_s=sequence.first_token_s,
            finished_s=max(now_s, sequence.arrived_s),
        )

    def _drop(self, request_id: str, now_s: float) -> FinishedRequest:
        sequence = self._known[request_id]
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        return self._finish(sequence, "abort", now_s)
