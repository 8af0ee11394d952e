"""A lease: what one request holds at a backend, from its placement to its release."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.fleet.fleet import Backend
from gateway.fleet.reservation import Reservation
from gateway.relay.learning import Learner
from gateway.routing.rooms import PREFILL_S
from gateway.types import Placed, Waiter


class Lessor(Protocol):
    """Who gave a lease."""

    def let_go(self, lease: Lease) -> None:
        """A lease was released."""


class Lease:
    """A place on a backend: KV blocks are reserved there until ``release``, which may be called any number of times."""

    __slots__ = (
        "_begun", "_finished", "_learner", "_lessor", "_matched_tokens", "_need", "_output_tokens", "_own_tokens",
        "_prefill", "_reservation", "_waiter", "backend", "failed", "offer", "placed_s", "released", "tag", "waited_s",
    )  # fmt: skip

    def __init__(
        self,
        lessor: Lessor,
        learner: Learner,
        reservation: Reservation,
        backend: Backend,
        placed: Placed,
        waiter: Waiter,
        now_s: float,
    ) -> None:
        self._lessor = lessor
        self._learner = learner
        self._reservation = reservation
        self._waiter = waiter
        self._matched_tokens = placed.matched_tokens
        self._own_tokens = placed.own_tokens
        self._output_tokens = 0
        self._need = placed.need
        self._begun = False
        self._finished = False
        self.backend = backend
        self.offer = placed.offer
        self.placed_s = now_s
        self.waited_s = now_s - waiter.arrived_s
        self.tag = placed.tag
        self.released = False
        self._prefill: asyncio.TimerHandle | None = None
        self.failed = False  # the backend did not answer

    def __repr__(self) -> str:
        return f"<Lease {self.sequence} on {self.backend.name}{', released' if self.released else ''}>"

    @property
    def sequence(self) -> int:
        """Its number in the order of arrival."""
        return self._waiter.sequence

    @property
    def patience_s(self) -> float:
        """How much longer it would have waited for its place."""
        return self._waiter.deadline_s - self.placed_s

    @property
    def rank(self) -> int:
        """Its priority class."""
        return self._waiter.rank

    @property
    def expected_first_byte_s(self) -> float | None:
        """Seconds from its placement to its first byte, as far as the backend is known."""
        return self._reservation.expected_first_byte_s

    def outrun(self) -> None:
        """Another lease of the same request got its first byte before this one."""
        self._reservation.outrun()

    def expect_prefill(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the prompt for done when it should be: of what is not streamed no byte tells, and others would seem to
        wait behind it until the answer is whole."""
        expected_s = self._reservation.expected_first_byte_s
        if expected_s is None:
            expected_s = max(0, self._need.prompt_tokens - self._matched_tokens) * PREFILL_S
        self._prefill = loop.call_later(expected_s, self._reservation.prefilled)

    def first_byte(self) -> None:
        """The backend began to answer."""
        self._begun = True
        self._reservation.first_byte()

    def timed_out(self) -> None:
        """The backend sent nothing in all the time it had."""
        self._reservation.timed_out()

    def grow(self, tokens: int) -> None:
        """So many more tokens were generated, over all sequences."""
        self._reservation.grow(tokens)

    def finished(self, output_tokens: int | None, cached_tokens: int | None) -> None:
        """The answer came to its end; its usage tells so many output tokens, and cached ones of the prompt."""
        self._finished = True
        self._output_tokens = output_tokens or 0
        if cached_tokens is not None:
            self._reservation.cached_tokens = cached_tokens
        self._reservation.finished(cached_tokens is not None)
        if not self._waiter.streamed and output_tokens is not None:
            self._reservation.took(output_tokens, asyncio.get_running_loop().time() - self.placed_s)
        self._learner.answered(self._waiter, self.offer, self._need, self._matched_tokens, output_tokens, cached_tokens)

    def release(self) -> None:
        """Give the place back and let others have it."""
        if not self.released:
            self.released = True
            if self._prefill is not None:
                self._prefill.cancel()
            self._reservation.release()
            grown_tokens = self._reservation.grown_tokens
            if self._begun or self._finished:
                tokens = self._own_tokens + max(grown_tokens, self._output_tokens)
            else:  # what it came for, and others do not hold, is left as it was
                tokens = max(0, self._own_tokens + self._matched_tokens - self._need.prompt_tokens)
            if tokens:
                self._learner.left(self.offer, tokens, asyncio.get_running_loop().time())
            if not self._finished:
                self._learner.broken_off(
                    self._waiter, self.offer, self._need, self._matched_tokens, self._begun, grown_tokens
                )
            self._lessor.let_go(self)
