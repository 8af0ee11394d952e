"""A set of block hashes that forgets the least recently used beyond its capacity, whole prompts at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence


class RecentBlocks:
    """At most ``capacity_blocks`` hashes. Of what was used at once, the end is forgotten before the beginning.

    A prompt is used by stamping all its hashes in one call; who has the oldest stamp is found by walking through the
    prompts in the order they were used, skipping what was stamped anew since.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._stamps: dict[int, int] = {}
        self._used: deque[list[int]] = deque()
        self._oldest = 0  # the stamp of the first of them

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, value: int) -> bool:
        return value in self._stamps

    def leading(self, hashes: Sequence[int]) -> int:
        """How many of ``hashes`` are known before the first that is not.

        By halving: who used a block used all before it, so what is known of a prompt is a beginning of it.
        """
        return bisect_left(hashes, True, key=lambda value: value not in self._stamps)

    def use(self, hashes: Sequence[int]) -> None:
        """Know ``hashes``, the prompt's beginning first, as the most recently used."""
        self._stamps.update(dict.fromkeys(hashes, self._oldest + len(self._used)))
        self._used.append(list(hashes))
        stamps = self._stamps
        while (surplus := len(stamps) - self._capacity) > 0:
            first, oldest = self._used[0], self._oldest
            left = [value for value, stamp in zip(first, map(stamps.get, first), strict=True) if stamp == oldest]
            for value in left[-surplus:]:
                del stamps[value]
            if len(left) > surplus:
                self._used[0] = left[:-surplus]
            else:
                self._used.popleft()
                self._oldest += 1
