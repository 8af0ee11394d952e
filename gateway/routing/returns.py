"""What conversations leave in a backend's prefix cache, and how much of it is likely to be asked for again. Pure.

A conversation whose last answer is over holds nothing, but its prompt and answer stay in the cache until others need
the blocks. Most come back soon (an agent after its tool call, in seconds), and cost next to nothing then, if what they
left is still there. ``Returns`` reckons how many tokens were left by those that did not come back yet. Each loses half
its weight every ``HALF_S``: who stays away that long mostly stays away for good, or finds its blocks taken anyway.

How likely they come back is seen from what comes: the share of prompt tokens that had been seen before, whether they
were still cached or not. Where every prompt is a new one nothing need be kept.
"""

from __future__ import annotations

HALF_S = 20.0
# How fast the share of known prompt tokens follows: each request makes 1/64 of the past forgotten, a shorter one than
# so many tokens less. Else many tiny prompts would soon tell what nearly all tokens are not.
FORGET = 1.0 - 1.0 / 64
WHOLE_TOKENS = 1024


class Returns:
    """One backend's. Tokens and seconds of the caller's clock."""

    __slots__ = ("_asked_tokens", "_at_s", "_left_tokens", "_seen_tokens")

    def __init__(self) -> None:
        self._left_tokens = self._at_s = 0.0
        self._asked_tokens = self._seen_tokens = 0.0

    def __repr__(self) -> str:
        return f"<Returns {self._left_tokens:.0f} tokens left, {self.likelihood:.2f} known>"

    @property
    def likelihood(self) -> float:
        """The share of prompt tokens that had been seen before, of late; 0 while nothing was asked."""
        return self._seen_tokens / self._asked_tokens if self._asked_tokens else 0.0

    def asked(self, prompt_tokens: int, seen_tokens: int) -> None:
        """A prompt was placed, of which so many tokens had been seen before, there or elsewhere."""
        kept = FORGET ** min(1.0, prompt_tokens / WHOLE_TOKENS)
        self._asked_tokens = kept * self._asked_tokens + prompt_tokens
        self._seen_tokens = kept * self._seen_tokens + min(seen_tokens, prompt_tokens)

    def left(self, tokens: int, now_s: float, most_tokens: int | None = None) -> None:
        """A request is over, and leaves so many tokens that no other one in flight holds. ``most_tokens``: as many as
        the whole cache can hold."""
        left_tokens = self._faded(now_s) + tokens
        self._left_tokens = left_tokens if most_tokens is None else min(left_tokens, most_tokens)
        self._at_s = now_s

    def taken_up(self, tokens: int, now_s: float) -> None:
        """A request was placed that uses so many of them again."""
        self._left_tokens = max(0.0, self._faded(now_s) - tokens)
        self._at_s = now_s

    def clear(self) -> None:
        """The cache is empty."""
        self._left_tokens = 0.0

    def expected_tokens(self, now_s: float) -> float:
        """Tokens that are likely to be asked for again."""
        return self._faded(now_s) * self.likelihood

    def _faded(self, now_s: float) -> float:
        return float(self._left_tokens * 0.5 ** (max(0.0, now_s - self._at_s) / HALF_S))
