"""An engine that can take many equal decoding steps at once, for an hour of traffic in seconds.

Between two events (a request comes, ends or runs out of blocks) every step of a decoding batch is the same: one token
more for each running request. ``LeapingEngine`` takes such a run of steps in one call, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.simulator.engine import Engine, EngineRequest


@dataclass(frozen=True, slots=True)
class Leap:
    """``steps`` decoding steps of ``running`` requests, each step ``step_s`` long."""

    steps: int
    running: int
    step_s: float


class LeapingEngine(Engine):
    """``Engine``, and ``leap`` for the steps in which nothing but decoding happens."""

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
        running = self._running
        if not running or self._aborting or len(running) > self.config.max_num_batched_tokens:
            return 0
        steps = self.config.max_model_len_tokens
        for sequence in running:
            if sequence.pending != 1 or sequence.produced == 0:
                return 0
            left = len(sequence.request.output_token_ids) - sequence.produced
            steps = min(steps, left - 1, self.config.max_model_len_tokens - len(sequence.tokens) - 1)
        if steps <= 0 or not self._all_wait():
            return 0
        return self._affordable(steps)

    def leap(self, steps: int) -> Leap:
        """Take ``steps`` decoding steps. Raises ``ValueError`` for more than ``steps_ahead`` allows."""
        if not 0 < steps <= self.steps_ahead():
            raise ValueError(f"{steps} steps cannot be taken at once")
        for sequence in self._running:
            planned = sequence.request.output_token_ids
            sequence.tokens.extend(planned[sequence.produced : sequence.produced + steps])
            if not self._grow(sequence, sequence.computed + steps):
                raise AssertionError("steps_ahead promised these blocks")
            sequence.computed += steps
            sequence.produced += steps
            if sequence.last_token_s is not None:
                sequence.last_token_s += steps * self.step_s
        self.counters.generation_tokens += steps * len(self._running)
        return Leap(steps, len(self._running), self.step_s)

    def produced(self) -> dict[str, int]:
        """Output tokens so far, by request that runs or waits."""
        return {name: sequence.produced for name, sequence in self._known.items()}

    def running_ids(self) -> list[str]:
        """The requests that run now."""
        return [sequence.request.request_id for sequence in self._running]

    def _all_wait(self) -> bool:
        """Whether the head of the queue stays where it is."""
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return True
        sequence = self._waiting[0]
        size = self.config.block_size_tokens
        cached = self._find_prefix(sequence)
        budget = self.config.max_num_batched_tokens - len(self._running)
        if budget <= 0:
            return True
        count = min(len(sequence.tokens) - len(cached) * size, budget)
        reach = len(sequence.tokens) if self.config.reserve_whole_prompt else len(cached) * size + count
        wanted = -(-reach // size) - len(cached)
        return wanted + self.pool.idle(cached) > self.pool.free_blocks

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
        size = self.config.block_size_tokens
        return sum(max(0, -(-(sequence.computed + steps) // size) - len(sequence.blocks)) for sequence in self._running)
