"""How fast one backend is, learned from the requests relayed to it: seconds a prompt token and an output token. Pure.

Prefill: from sending a request to its first byte pass ``base + tokens × rate`` seconds, where tokens are its own that
were not cached and those of ours that were ahead of it. A straight line through what was seen (least squares, old
points weigh less) parts the two. Output: from the first byte to the last, over the tokens in between.
"""

from __future__ import annotations

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


class Rates:
    """``prefill_s`` and ``output_s`` a token; ``None`` until there is enough to go by."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "output_s", "prefill_s")

    def __init__(self) -> None:
        self.prefill_s: float | None = None
        self.output_s: float | None = None
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def prefilled(self, tokens: int, took_s: float) -> None:
        """A first byte came ``took_s`` after sending, with ``tokens`` to be worked on until then."""
        if tokens <= 0 or took_s <= 0:
            return
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

    def generated(self, tokens: int, took_s: float) -> None:
        """After the first byte of an answer one sequence had ``tokens`` more in ``took_s``."""
        if tokens < LEAST_OUTPUT_TOKENS or took_s <= 0:
            return
        sample = took_s / tokens
        if self.output_s is None:
            self.output_s = sample
        else:
            self.output_s += OUTPUT_WEIGHT * (min(sample, MOST_SLOWER * self.output_s) - self.output_s)

    def forget(self) -> None:
        """Another process answers now."""
        self.prefill_s = self.output_s = None
        self._n = self._x = self._y = self._xx = self._xy = 0.0
