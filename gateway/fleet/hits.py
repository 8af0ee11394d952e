"""What a backend's prefix-cache counters say of our guesses, where its answers do not tell their cached tokens. Pure.

``prefix_cache_queries`` and ``_hits`` count tokens of everybody's prompts. Between two readings they are held against
our own requests that began to be answered in between: what their prompts had, and what of them was expected to be
cached. Only where the queries are ours, all but a few, do the hits say anything of our guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

# Less than this says nothing, and what could not be compared within so long never will be.
LEAST_TOKENS = 4096
LEAST_ANSWERS = 4
LONGEST_S = 60.0
# Queries and our prompts may differ by this share: at the edges a prompt is looked up before one reading and answered
# after it.
TOLERANCE = 0.15
# Half of what was found this long ago counts in the ratio that is shown.
HALF_LIFE_S = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of ``expected_tokens`` of ``answers`` prompts ``cached_tokens`` were found, at most."""

    expected_tokens: int
    cached_tokens: int
    answers: int


class Hits:
    """One backend's counters and our requests beside them. Times are arguments."""

    __slots__ = (
        "_answers", "_began_s", "_expected", "_hit", "_prompts", "_queried", "_read_s", "_recent_hits",
        "_recent_queries", "_start", "_unclear",
    )  # fmt: skip

    def __init__(self) -> None:
        self.forget()

    @property
    def ratio(self) -> float | None:
        """The share of everybody's prompt tokens that was found lately; ``None`` while there were none."""
        return self._recent_hits / self._recent_queries if self._recent_queries >= 1.0 else None

    def forget(self) -> None:
        """Another process answers now."""
        self._queried: float | None = None
        self._hit = 0.0
        self._start: tuple[float, float] | None = None  # counters where the comparison begins
        self._recent_queries = self._recent_hits = 0.0
        self._read_s: float | None = None
        self._unclear: bool = False
        self._reset(0.0)

    def answered(self, prompt_tokens: int, expected_tokens: int, clear: bool = True) -> None:
        """A request of ours begins to be answered, ``expected_tokens`` of whose prompt should be cached. Not ``clear``:
        how often its prompt was looked up, or whether its answer tells more than we could learn here, is another
        matter."""
        self._prompts += prompt_tokens
        self._expected += min(expected_tokens, prompt_tokens)
        self._answers += 1
        self._unclear = self._unclear or not clear

    def read(self, queried_tokens: float | None, hit_tokens: float | None, now_s: float) -> Verdict | None:
        """Take in a reading of the counters. What they say of our guesses since the last verdict, if anything."""
        if queried_tokens is None or hit_tokens is None:
            return None
        if self._queried is not None and queried_tokens >= self._queried and hit_tokens >= self._hit:
            self._fade(queried_tokens - self._queried, hit_tokens - self._hit, now_s)
        else:
            self._start = None
        self._queried, self._hit, self._read_s = queried_tokens, hit_tokens, now_s
        if self._start is None:
            self._start = (queried_tokens, hit_tokens)
            self._reset(now_s)
            return None
        queried, hit = queried_tokens - self._start[0], hit_tokens - self._start[1]
        verdict = None
        enough = queried >= LEAST_TOKENS and self._answers >= LEAST_ANSWERS
        if enough and not self._unclear and abs(queried - self._prompts) <= TOLERANCE * queried:
            verdict = Verdict(self._expected, int(hit), self._answers)
        elif not self._unclear and now_s - self._began_s < LONGEST_S:
            return None  # go on: over more requests the edges weigh less
        self._start = (queried_tokens, hit_tokens)
        self._reset(now_s)
        return verdict

    def _fade(self, queries: float, hits: float, now_s: float) -> None:
        kept = 0.5 ** (max(0.0, now_s - self._read_s) / HALF_LIFE_S) if self._read_s is not None else 1.0
        self._recent_queries = self._recent_queries * kept + queries
        self._recent_hits = self._recent_hits * kept + hits

    def _reset(self, now_s: float) -> None:
        self._began_s = now_s
        self._prompts = self._expected = self._answers = 0
        self._unclear = False
