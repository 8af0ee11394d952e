"""How fast one backend is, learned from the requests relayed to it: seconds a prompt token, an output token, and until
any first byte. Pure.

Prefill: from sending a request to its first byte pass ``base + tokens × rate`` seconds, where tokens are its own that
were not cached and those of ours that were ahead of it. A straight line through what was seen (least squares, old
points weigh less) tells the rate. The base is what the quickest quarter of the last requests took beyond it: whatever
else a request may have waited for only adds to it. Output: from the first byte to the last, over the tokens between.

Of a backend that is avoided for being slow nothing new is learned. So what is known of it is believed less and less
while requests go elsewhere, until it looks good enough for one, a *trial*: from then on it is believed again, unless
the trial was far quicker, which has it learned anew.
"""

from __future__ import annotations

from collections import deque
from math import inf

# A point weighs so much less with each that follows it: about the last 30 count.
DECAY = 0.97
LEAST_POINTS = 5.0
# No GPU is faster or slower than this: 1 million and 50 tokens a second.
FASTEST_S, SLOWEST_S = 1e-6, 2e-2
# Prompts must differ by this many tokens (standard deviation) before they tell a slope from a base.
LEAST_SPREAD_TOKENS = 64.0
OUTPUT_WEIGHT = 0.1
# An answer whose client read slowly must not count as a slow backend.
MOST_SLOWER = 4.0
LEAST_OUTPUT_TOKENS = 8
# The base: of so many requests at least and at most.
LEAST_FIRSTS, MOST_FIRSTS = 4, 12
# A prompt token until more is known: one of 8,000 a second. Only the order of first bytes depends on it.
STAND_IN_S = 1 / 8000
# Half as much is believed after each so many seconds in which as many requests for each backend went elsewhere: trials
# are a request in a hundred at most, however slow the traffic, and one in a minute or so, however fast.
HALF_LIFE_S, HALF_LIFE_ROUNDS = 10.0, 8.0
# A trial in less than this part of the time that was expected tells of another backend than the one that was known.
QUICKER = 0.5


class Rates:
    """``prefill_s`` and ``output_s`` a token; ``None`` until there is enough to go by.

    ``first_s``: seconds to a first byte with ``first_tokens`` to be worked on, which are none once ``prefill_s`` is
    known.
    """

    __slots__ = (
        "_firsts", "_n", "_rounds", "_sent_s", "_x", "_xx", "_xy", "_y", "first_s", "first_tokens", "output_s",
        "prefill_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prefill_s: float | None = None
        self.output_s: float | None = None
        self.first_s: float | None = None
        self.first_tokens = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._firsts: deque[tuple[int, float]] = deque(maxlen=MOST_FIRSTS)
        self._sent_s, self._rounds = inf, inf

    def sent(self, now_s: float, rounds: float) -> bool:
        """A request is sent there; returns whether it is a trial. ``rounds``: requests sent for each backend so far."""
        trial = self.trust(now_s, rounds) < 1.0
        self._sent_s, self._rounds = now_s, rounds
        return trial

    def trust(self, now_s: float, rounds: float) -> float:
        """How much of what is known is to be believed: 1, less by half after each time that others were preferred."""
        times = min((now_s - self._sent_s) / HALF_LIFE_S, (rounds - self._rounds) / HALF_LIFE_ROUNDS)
        return 0.5 ** int(times) if times >= 1.0 else 1.0

    def prefilled(self, tokens: int, took_s: float, queued: bool = False, trial: bool = False) -> None:
        """A first byte came ``took_s`` after sending, with ``tokens`` to be worked on until then. ``queued``: others
        waited at the server, so that its queue may be part of it. ``trial``: what ``sent`` said."""
        if tokens <= 0 or took_s <= 0:
            return
        if trial:
            self.tried(tokens, took_s)
        self._learn_rate(tokens, took_s)
        if not queued:
            self._firsts.append((tokens, took_s))
        self._learn_first()

    def tried(self, tokens: int, took_s: float) -> None:
        """A trial with ``tokens`` to be worked on had its first byte, or even all of its answer, after ``took_s``."""
        if self.first_s is None:
            return
        rate_s = STAND_IN_S if self.prefill_s is None else self.prefill_s
        if took_s < QUICKER * (self.first_s + (tokens - self.first_tokens) * rate_s):
            # Without the delay of before a few points may tell no rate for a while.
            kept_s = self.prefill_s if took_s >= QUICKER * tokens * rate_s else None
            self._forget_prefill()
            self.prefill_s = kept_s

    def _learn_rate(self, tokens: int, took_s: float) -> None:
        x, y = float(tokens), took_s
        self._n = self._n * DECAY + 1.0
        self._x = self._x * DECAY + x
        self._y = self._y * DECAY + y
        self._xx = self._xx * DECAY + x * x
        self._xy = self._xy * DECAY + x * y
        if self._n < LEAST_POINTS:
            return
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread < LEAST_SPREAD_TOKENS**2:
            return
        slope = (self._xy / self._n - mean_x * mean_y) / spread
        if slope > 0:
            self.prefill_s = min(SLOWEST_S, max(FASTEST_S, min(slope, mean_y / mean_x)))

    def expected_s(self, tokens: int) -> float | None:
        """Seconds until a first byte with ``tokens`` to be worked on; ``None`` if nothing like it was seen."""
        if self._n < LEAST_POINTS:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        if self.prefill_s is not None:
            return max(0.0, mean_y + (tokens - mean_x) * self.prefill_s)
        return mean_y if tokens <= 2 * mean_x else None  # all were of about one size

    @property
    def base_s(self) -> float | None:
        """Seconds until any first byte, beside those of its tokens; ``None`` until that is known."""
        if self.first_s is None:
            return None
        return max(0.0, self.first_s - self.first_tokens * STAND_IN_S)

    def _learn_first(self) -> None:
        firsts, rate_s = self._firsts, STAND_IN_S if self.prefill_s is None else self.prefill_s
        if len(firsts) < LEAST_FIRSTS:
            return
        bases = sorted([(took_s - tokens * rate_s, tokens, took_s) for tokens, took_s in firsts])
        base_s, tokens, took_s = bases[(len(bases) - 1) // 4]
        if self.prefill_s is None:
            self.first_s, self.first_tokens = took_s, float(tokens)
        else:
            self.first_s, self.first_tokens = max(0.0, base_s), 0.0

    def generated(self, tokens: int, took_s: float, trial: bool = False) -> None:
        """After the first byte of an answer one sequence had ``tokens`` more in ``took_s``."""
        if tokens < LEAST_OUTPUT_TOKENS or took_s <= 0:
            return
        sample = took_s / tokens
        if self.output_s is None or (trial and sample < QUICKER * self.output_s):
            self.output_s = sample
        else:
            self.output_s += OUTPUT_WEIGHT * (min(sample, MOST_SLOWER * self.output_s) - self.output_s)

    def forget(self) -> None:
        """Another process answers now."""
        self.output_s = None
        self._forget_prefill()

    def _forget_prefill(self) -> None:
        self.prefill_s = self.first_s = None
        self.first_tokens = 0.0
        self._firsts.clear()
        self._n = self._x = self._y = self._xx = self._xy = 0.0
