"""The most KV blocks that the requests under way will hold together at any moment, if nobody else comes. Pure.

Each of them grows by a token a step and sequence until it is done, and then frees what it holds. So the most that will
be held is not the sum of what each will hold at its end: the first are gone before the last have grown. Ordered by the
tokens each has still to generate, the sum is largest just before one of them ends, when it and all that go on longer
have grown by as much as it had to go; the peak is the largest of these sums ("past-future" scheduling: Gong et al.,
ASPLOS 2025, as in LightLLM).

Requests are kept in buckets of tokens to go, half an octave wide, of which the upper end counts: so a peak is never too
low for that, and costs the number of buckets in use.
"""

from __future__ import annotations

from bisect import bisect_left

STEPS = 2  # buckets an octave
BUCKETS = 2 + 21 * STEPS  # up to two million tokens


def _upper(bucket: int) -> int:
    """The most tokens to go of a request in ``bucket``."""
    return bucket if bucket < 2 else int(2.0 ** ((bucket - 1) / STEPS))


_UPPER = tuple(_upper(bucket) for bucket in range(BUCKETS))


def bucket_of(tokens: int) -> int:
    """The bucket of requests that have so many tokens to go a sequence."""
    return min(BUCKETS - 1, bisect_left(_UPPER, tokens))


class Peaks:
    """Blocks and sequences of the requests of one engine, by tokens to go."""

    __slots__ = ("_blocks", "_most", "_sequences", "_used")

    def __init__(self) -> None:
        self._blocks = [0] * BUCKETS
        self._sequences = [0] * BUCKETS
        self._used = 0  # bits of the buckets with sequences
        self._most: tuple[int, int] | None = None  # size and peak that were asked for last, if they still hold

    def __repr__(self) -> str:
        return f"<Peaks {sum(self._sequences)} sequences, {sum(self._blocks)} blocks>"

    def add(self, bucket: int, blocks: int, sequences: int) -> None:
        """Requests of ``bucket`` hold so many blocks and sequences more; less, if negative."""
        self._blocks[bucket] += blocks
        count = self._sequences[bucket] = self._sequences[bucket] + sequences
        if count:
            self._used |= 1 << bucket
        else:
            self._used &= ~(1 << bucket)
        self._most = None

    def most_blocks(self, size: int) -> int:
        """The most blocks of ``size`` tokens that all of them will hold at one time."""
        if self._most is not None and self._most[0] == size:
            return self._most[1]
        most = held = sequences = 0
        blocks, counts = self._blocks, self._sequences
        left = self._used
        while left:
            bucket = left.bit_length() - 1
            left ^= 1 << bucket
            held += blocks[bucket]
            sequences += counts[bucket]
            then = held + sequences * -(-_UPPER[bucket] // size)
            if then > most:
                most = then
        self._most = (size, most)
        return most
