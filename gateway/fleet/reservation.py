"""What one request holds on a backend, and what its answer tells of how fast the backend is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.types import Need

if TYPE_CHECKING:
    from gateway.fleet.backend import WatchedBackend

# The most the prompt may have taken of a whole answer's time for the rest to tell the pace of its output, and the most
# its output may have for the rest to tell of the prompt.
WHOLE_SHARE = 0.25
NO_NEED = Need(0, 0)


class Reservation:
    """What one request holds on a backend, from the moment it is placed until ``release``.

    ``ahead_tokens``: prompt tokens to be worked on before its first byte, its own left out. ``timed``: the moments at
    which it is told of bytes tell how fast the backend is. ``trial``, ``queued``: as ``Rates``
    knows them.
    """

    __slots__ = (
        "_ahead_tokens",
        "_backend",
        "_counted",
        "_first_s",
        "_grown_tokens",
        "_key",
        "_need",
        "_placed_s",
        "_queued",
        "_trial",
        "cached_tokens",
    )

    def __init__(
        self,
        backend: WatchedBackend,
        key: int,
        need: Need = NO_NEED,
        ahead_tokens: int = 0,
        cached_tokens: int = 0,
        timed: bool = False,
        trial: bool = False,
        queued: bool = False,
    ) -> None:
        self._backend = backend
        self._trial = trial
        self._queued = queued
        self._key = key
        self._need = need
        self._ahead_tokens = ahead_tokens
        self.cached_tokens = cached_tokens
        self._placed_s = backend.now_s() if timed else None
        self._first_s: float | None = None
        self._grown_tokens = 0
        self._counted = False
        if timed:
            own_tokens = max(0, need.prompt_tokens - cached_tokens)
            backend.availability.recent.placed(key, ahead_tokens + own_tokens, backend.now_s())

    @property
    def grown_tokens(self) -> int:
        """Tokens generated so far, over all sequences."""
        return self._grown_tokens

    @property
    def expected_first_byte_s(self) -> float | None:
        """Seconds from its placement to its first byte, as far as the backend is known."""
        own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
        return self._backend.rates.expected_s(self._ahead_tokens + own_tokens)

    def outrun(self) -> None:
        """Another backend began to answer the same request first: this one takes longer than until now, at least."""
        if self._placed_s is not None and self._first_s is None:
            own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
            took_s = self._backend.now_s() - self._placed_s
            self._backend.rates.prefilled(self._ahead_tokens + own_tokens, took_s, self._queued)
            self.timed_out()

    def prefilled(self) -> None:
        """The prompt should be done by now: of what is not streamed no byte tells."""
        self._backend.engines.prefilled(self._key)

    def took(self, output_tokens: int, seconds: float) -> None:
        """A whole answer of so many tokens, over all sequences, came after ``seconds``. It tells how long the prompt
        took if the output was no great part of it, and the pace of the output if the prompt was none."""
        rates = self._backend.rates
        own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
        if self._trial:
            rates.tried(self._ahead_tokens + own_tokens, seconds)
        prompt_s = rates.expected_s(self._ahead_tokens + own_tokens)
        each_tokens = output_tokens // self._need.n
        output_s = 0.0 if each_tokens <= 1 else None if rates.output_s is None else (each_tokens - 1) * rates.output_s
        if output_s is not None and output_s <= WHOLE_SHARE * seconds:
            rates.prefilled(self._ahead_tokens + own_tokens, seconds - output_s, self._queued, self._trial)
        elif prompt_s is not None and prompt_s <= WHOLE_SHARE * seconds:
            rates.generated(each_tokens - 1, seconds - prompt_s, self._trial)
        self._backend.touched()

    def first_byte(self) -> None:
        """The backend began to answer."""
        self._backend.engines.first_byte(self._key)
        if self._placed_s is not None and self._first_s is None:
            self._first_s = self._backend.now_s()
            self._queued = self._queued or self._backend.queues()
            self._backend.availability.recent.began(self._key, self._first_s)
        self._looked_up()

    def timed_out(self) -> None:
        """The first byte was waited for in vain."""
        self._backend.availability.recent.timed_out(self._key, self._backend.now_s())

    def finished(self, told: bool) -> None:
        """The answer came to its end; ``told``: with the cached tokens of its prompt."""
        self._looked_up()
        self._backend.tells_cached = self._backend.tells_cached or told

    def _looked_up(self) -> None:
        """The prompt was looked up in the prefix cache: it is among what the backend's counters have counted."""
        if not self._counted:
            self._counted = True
            need = self._need
            self._backend.witness.hits.answered(need.prompt_tokens, self.cached_tokens, clear=need.n == 1)

    def grow(self, tokens: int) -> None:
        """So many more tokens were generated."""
        self._grown_tokens += tokens
        self._backend.engines.grow(self._key, tokens)

    def release(self) -> None:
        """Let go of everything. Doing so again changes nothing."""
        if self._placed_s is not None and self._first_s is not None:
            own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
            rates = self._backend.rates
            took_s, output_s = self._first_s - self._placed_s, self._backend.now_s() - self._first_s
            rates.prefilled(self._ahead_tokens + own_tokens, took_s, self._queued, self._trial)
            rates.generated(self._grown_tokens // self._need.n - 1, output_s, self._trial)
            self._backend.touched()
        if self._placed_s is not None:
            self._backend.availability.recent.gone(self._key)
        self._placed_s = None
        self._backend.engines.release(self._key)
        self._backend.availability.breaker.released(self._key)
