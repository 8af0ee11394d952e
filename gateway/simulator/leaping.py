"""An engine that takes many equal steps at once, for an hour of traffic in seconds.

Between two events (a request comes, ends or runs out of blocks) every step of a decoding batch is the same: one token
more for each running request. So requests that decode are not touched step by step. They share one counter of steps;
who needs a block when is known from where each stood in its last block, and who ends when from what is left of its
answer. Tokens and block hashes are written out when somebody needs them: when the request ends or loses its blocks,
and when a waiting one's prefix may go on in them. ``move`` takes a step at the cost of what is new in it, ``leap`` many
steps in which nothing is new. The outcome is that of ``Engine.step``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.simulator.blocks import block_hashes
from gateway.simulator.engine import Engine, EngineConfig, EngineRequest, FinishedRequest, StepResult, _Sequence


@dataclass(frozen=True, slots=True)
class Leap:
    """``steps`` decoding steps of ``running`` requests, each step ``step_s`` long."""

    steps: int
    running: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """A step in short. ``first``: who got a first token, with its cached tokens. ``gaps``: (seconds, how many tokens).

    ``idle``: nothing could be scheduled.
    """

    ended_s: float
    idle: bool
    first: tuple[tuple[str, int], ...]
    finished: tuple[FinishedRequest, ...]
    gaps: tuple[tuple[float, int], ...]


class LeapingEngine(Engine):
    """``Engine``, and ``move`` and ``leap``, which do as its steps do for less."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._tick = 0  # steps taken by those that decode
        self._last_s = 0.0  # when each of them got its last token
        self._decoding: dict[_Sequence, int] = {}  # since which tick its tokens are not written out
        self._by_phase: list[dict[_Sequence, None]] = [{} for _ in range(config.block_size_tokens)]
        self._ends: list[tuple[int, int, _Sequence]] = []  # heap of (last tick, order, who)
        self._enrolled = 0
        self._changes = 0  # of what is cached and in use
        self._stuck: tuple[_Sequence, int] | None = None  # a head that found no room, at which change

    def add_hashed(self, request: EngineRequest, now_s: float, hashes: Sequence[int]) -> None:
        """``add`` a request whose leading block hashes are known (``block_hashes`` of its prompt)."""
        self.add(request, now_s)
        self._known[request.request_id].hashes = list(hashes)

    @property
    def step_s(self) -> float:
        """How long a step takes that only decodes."""
        return 1.0 / self.config.decode_tokens_per_s

    def steps_ahead(self) -> int:
        """Steps that would decode and do nothing else: nobody ends, is admitted or preempted in them. May be 0.

        The waiting stay out during these: blocks only become fewer until somebody ends.
        """
        if not self._decoding or len(self._decoding) < len(self._running) or self._aborting:
            return 0
        steps = self._ends[0][0] - self._tick - 1
        if steps <= 0 or not self._all_wait():
            return 0
        return self._affordable(steps)

    def leap(self, steps: int) -> Leap:
        """Take ``steps`` decoding steps. Raises ``ValueError`` for more than ``steps_ahead`` allows."""
        if not 0 < steps <= self.steps_ahead():
            raise ValueError(f"{steps} steps cannot be taken at once")
        for phase, sequences in enumerate(self._by_phase):
            blocks = self._boundaries(phase, steps)
            if blocks:
                for sequence in sequences:
                    sequence.blocks.extend(self.pool.allocate(blocks))
        self._tick += steps
        self._last_s += steps * self.step_s
        self.counters.generation_tokens += steps * len(self._running)
        return Leap(steps, len(self._running), self.step_s)

    def move(self, now_s: float) -> Move:
        """``step``, told in short."""
        size = self.config.block_size_tokens
        due = self._by_phase[self._tick % size]
        decoding = len(self._decoding)
        if self._aborting or len(self._running) - decoding > 1 or len(due) > self.pool.free_blocks:
            return _in_short(self.step(now_s))
        for sequence in due:
            sequence.blocks.extend(self.pool.allocate(1))
        budget = self.config.max_num_batched_tokens - decoding
        batch: list[tuple[_Sequence, int]] = []
        preempted: list[str] = []
        if len(self._running) > decoding and budget > 0:  # the last one's prompt is not done
            sequence = self._running[-1]
            count = min(sequence.pending, budget)
            if self._make_room(sequence, count, preempted):
                batch.append((sequence, count))
                budget -= count
        if not preempted:
            self._admit(batch, budget, now_s)
        prefill = sum(count for sequence, count in batch if not self._decodes(sequence, count))
        decode = decoding + sum(count for _, count in batch) - prefill
        ended_s = now_s + (prefill / self.config.prefill_tokens_per_s + bool(decode) / self.config.decode_tokens_per_s)
        gaps = [(ended_s - self._last_s, decoding)] if decoding else []
        self._tick += 1
        self._last_s = ended_s
        self.counters.generation_tokens += decoding
        finished = self._end_due(ended_s)
        outputs, _, more = self._sample(batch, ended_s, finished)
        gaps.extend((gap_s, 1) for gap_s in more)
        for sequence, _ in batch:
            self._enrol(sequence)
        first = tuple((item.request_id, item.cached_tokens) for item in outputs)
        return Move(ended_s, not (prefill or decode), first, tuple(finished), tuple(gaps))

    def step(self, now_s: float) -> StepResult:
        """``Engine.step``, with everybody's tokens written out before it."""
        for sequence in self._decoding:
            self._write(sequence)
        self._decoding.clear()
        self._ends.clear()
        for sequences in self._by_phase:
            sequences.clear()
        result = super().step(now_s)
        self._last_s = result.ended_s
        if len(self._running) <= self.config.max_num_batched_tokens:
            for sequence in self._running:
                self._enrol(sequence)
        return result

    def produced(self) -> dict[str, int]:
        """Output tokens so far, by request that runs or waits."""
        counts = {name: sequence.produced for name, sequence in self._known.items()}
        for sequence, since in self._decoding.items():
            counts[sequence.request.request_id] += self._tick - since
        return counts

    def running_ids(self) -> list[str]:
        """The requests that run now."""
        return [sequence.request.request_id for sequence in self._running]

    # Those that decode

    def _enrol(self, sequence: _Sequence) -> None:
        """Touch this one no more while it decodes."""
        if not sequence.blocks or sequence.pending != 1 or sequence.last_token_s != self._last_s:
            return
        left = min(
            len(sequence.request.output_token_ids) - sequence.produced,
            self.config.max_model_len_tokens - len(sequence.tokens),
        )
        self._decoding[sequence] = self._tick
        self._by_phase[self._phase(sequence)][sequence] = None
        self._enrolled += 1
        heapq.heappush(self._ends, (self._tick + left, self._enrolled, sequence))

    def _end_due(self, ended_s: float) -> list[FinishedRequest]:
        """End those whose last token this step brought, in the order they run."""
        due: list[_Sequence] = []
        while self._ends and self._ends[0][0] <= self._tick:
            due.append(heapq.heappop(self._ends)[2])
        if len(due) > 1:
            due.sort(key=self._running.index)
        finished = []
        for sequence in due:
            self._write(sequence)
            del self._by_phase[self._phase(sequence)][sequence]
            del self._decoding[sequence]
            reason = self._end_of(sequence)
            if reason is None:
                raise AssertionError("its last token was counted wrongly")
            finished.append(self._finish(sequence, reason, ended_s))
        return finished

    def _phase(self, sequence: _Sequence) -> int:
        """It needs a block in the steps from ticks that are this modulo the block size."""
        return (self._decoding[sequence] - sequence.computed) % self.config.block_size_tokens

    def _write(self, sequence: _Sequence, ahead: int = 0) -> None:
        """Write out its tokens, and make its full blocks findable, those that the next ``ahead`` tokens fill too."""
        steps = self._tick - self._decoding[sequence]
        if steps:
            planned = sequence.request.output_token_ids
            sequence.tokens.extend(planned[sequence.produced : sequence.produced + steps])
            sequence.produced += steps
            sequence.computed += steps
            sequence.last_token_s = self._last_s
            self._decoding[sequence] = self._tick
        full = min((sequence.computed + ahead) // self.config.block_size_tokens, len(sequence.blocks))
        if full > sequence.remembered and self.config.enable_prefix_caching:
            self._remember(sequence, full)

    def _remember(self, sequence: _Sequence, full: int) -> None:
        size = self.config.block_size_tokens
        hashes = block_hashes(sequence.tokens, size, sequence.hashes, sequence.request.cache_key)
        fresh = slice(sequence.remembered, full)
        self.pool.remember_all(sequence.blocks[fresh], hashes[fresh])
        sequence.remembered = full
        self._changes += 1

    def _write_shared(self, sequence: _Sequence) -> bool:
        """Write out those whose text the prompt of this one may go on with. Whether there are any."""
        if not self.config.enable_prefix_caching:
            return False
        size = self.config.block_size_tokens
        hashes = block_hashes(sequence.tokens, size, sequence.hashes, sequence.request.cache_key)
        most = len(hashes)
        found = [
            other
            for other in self._decoding
            if other.remembered < most and _at(hashes, other.remembered) == _at(other.hashes, other.remembered)
        ]
        for other in found:
            self._write(other, ahead=1)
        return bool(found)

    # Those that wait

    def _all_wait(self) -> bool:
        """Whether the head of the queue stays where it is."""
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return True
        budget = self.config.max_num_batched_tokens - len(self._running)
        if budget <= 0:
            return True
        sequence = self._waiting[0]
        if self._stuck == (sequence, self._changes):
            return True
        size = self.config.block_size_tokens
        cached = self._find_prefix(sequence)
        if self._write_shared(sequence) or self.pool.doubled(sequence.hashes[: len(cached)]):
            return False  # what others say may be what it begins with, and then it needs less by and by
        count = min(len(sequence.tokens) - len(cached) * size, budget)
        reach = len(sequence.tokens) if self.config.reserve_whole_prompt else len(cached) * size + count
        wanted = -(-reach // size) - len(cached)
        if wanted + self.pool.idle(cached) <= self.pool.free_blocks:
            return False
        if self.config.reserve_whole_prompt:
            self._stuck = (sequence, self._changes)
        return True

    def _admit(self, batch: list[tuple[_Sequence, int]], budget: int, now_s: float) -> None:
        """Not to be tried while the head is known to find no room: blocks became fewer, and nothing else changed."""
        if self._waiting and self._stuck == (self._waiting[0], self._changes):
            return
        super()._admit(batch, budget, now_s)

    def _find_prefix(self, sequence: _Sequence) -> list[int]:
        if not sequence.request.skip_cache:
            self._write_shared(sequence)
        return super()._find_prefix(sequence)

    def _grow(self, sequence: _Sequence, tokens: int) -> bool:
        if self._decoding:
            self._write_shared(sequence)
        remembered = sequence.remembered
        grown = super()._grow(sequence, tokens)
        if sequence.remembered != remembered:
            self._changes += 1
        return grown

    def _free(self, sequence: _Sequence) -> None:
        self._changes += 1
        super()._free(sequence)

    def _affordable(self, steps: int) -> int:
        """The most of ``steps`` steps that the free blocks suffice for."""
        if self._blocks_for(steps) <= self.pool.free_blocks:
            return steps
        least, most = 0, steps
        while most - least > 1:
            middle = (least + most) // 2
            if self._blocks_for(middle) <= self.pool.free_blocks:
                least = middle
            else:
                most = middle
        return least

    def _blocks_for(self, steps: int) -> int:
        """Each needs one every block size of tokens, and those one more that are at the end of a block in the rest."""
        size = self.config.block_size_tokens
        whole, rest = divmod(steps, size)
        phases = (self._by_phase[(self._tick + ahead) % size] for ahead in range(rest))
        return whole * len(self._decoding) + sum(map(len, phases))

    def _boundaries(self, phase: int, steps: int) -> int:
        """How many of the next ``steps`` steps begin at ticks of this phase."""
        size = self.config.block_size_tokens
        return (steps - 1 - (phase - self._tick) % size) // size + 1


def _at(hashes: Sequence[int], count: int) -> int | None:
    return hashes[count - 1] if count else None


def _in_short(result: StepResult) -> Move:
    gaps = tuple((gap_s, 1) for gap_s in result.inter_token_latencies_s)
    first = tuple((item.request_id, item.cached_tokens) for item in result.outputs)
    return Move(result.ended_s, result.idle, first, result.finished, gaps)
