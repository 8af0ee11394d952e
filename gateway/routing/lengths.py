"""How long answers get, learned per model and flow from those that ended. Pure.

Many answers are cut off by their output budget, or by a client that leaves: all that is known of them is that they were
longer. To leave them out, or to take them for ends, would make answers look short. So the share that goes on beyond a
length is estimated from both (Kaplan and Meier's estimator over buckets a sixth of an octave wide).
"""

from __future__ import annotations

from collections import OrderedDict
from math import log2

STEPS = 6  # buckets an octave
BUCKETS = 21 * STEPS  # up to two million tokens
# Each answer makes all before it weigh so much less: about the last 500 count.
DECAY = 0.998
# Less than this is not enough to go by.
LEAST_ANSWERS = 30.0
MOST_KNOWN = 1024


class _Lengths:
    """Weights of answers by length: those that ended there, and those cut off there."""

    __slots__ = ("_cut", "_ended", "_high", "_low", "_scale", "answers", "known")

    def __init__(self) -> None:
        self._ended = [0.0] * BUCKETS
        self._cut = [0.0] * BUCKETS
        self._low, self._high = BUCKETS, 0  # the buckets in use: from that one to before this one
        self._scale = 1.0  # the weight of the next answer: instead of making the others lighter
        self.answers = 0.0
        self.known: dict[float, int | None] = {}

    def add(self, tokens: int, ended: bool) -> None:
        self._scale /= DECAY
        bucket = _bucket(tokens)
        (self._ended if ended else self._cut)[bucket] += self._scale
        self._low, self._high = min(self._low, bucket), max(self._high, bucket + 1)
        self.answers = self.answers * DECAY + 1.0
        self.known.clear()
        if self._scale > 1e12:
            self._ended = [weight / self._scale for weight in self._ended]
            self._cut = [weight / self._scale for weight in self._cut]
            self._scale = 1.0

    def quantile(self, share: float) -> int | None:
        """The length that ``share`` of the answers do not exceed; ``None`` if too many were cut off to tell."""
        if share not in self.known:
            self.known[share] = self._quantile(share)
        return self.known[share]

    def _quantile(self, share: float) -> int | None:
        at_risk = sum(self._ended) + sum(self._cut)
        going_on = 1.0
        for bucket in range(self._low, self._high):
            ended, cut = self._ended[bucket], self._cut[bucket]
            if ended:
                going_on *= 1.0 - ended / at_risk
                if going_on <= 1.0 - share + 1e-9:
                    return _upper(bucket)
            at_risk -= ended + cut
            if at_risk <= 1e-9:
                return None
        return None


class OutputLengths:
    """Learned lengths by model, and by model and flow where there are enough of that flow alone."""

    def __init__(self) -> None:
        self._by: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()

    def note(self, model: str, flow: str, tokens: int, ended: bool) -> None:
        """An answer of so many tokens came to its end, or was cut off there."""
        for key in {(model, ""), (model, flow)}:
            lengths = self._by.get(key)
            if lengths is None:
                lengths = self._by[key] = _Lengths()
                if len(self._by) > MOST_KNOWN:
                    self._by.popitem(last=False)
            else:
                self._by.move_to_end(key)
            lengths.add(tokens, ended)

    def expected(self, model: str, flow: str, share: float) -> int | None:
        """Tokens that ``share`` of the answers of that model, to that flow, do not exceed; ``None`` if not known."""
        for key in ((model, flow), (model, "")):
            lengths = self._by.get(key)
            if lengths is not None and lengths.answers >= LEAST_ANSWERS:
                return lengths.quantile(share)
        return None

    def learned(self, share: float) -> dict[str, int]:
        """What is expected by model, where something is known."""
        found = {model: self.expected(model, "", share) for model, flow in self._by if not flow}
        return {model: tokens for model, tokens in found.items() if tokens is not None}


def _bucket(tokens: int) -> int:
    return min(BUCKETS - 1, int(log2(max(1, tokens)) * STEPS))


def _upper(bucket: int) -> int:
    """The longest length of a bucket."""
    return max(1, int(2.0 ** ((bucket + 1) / STEPS)))
