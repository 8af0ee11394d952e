"""Blocks that are expected of placements whose prompts have not been reported yet. Pure; times are arguments.

What is expected of a block ends with the first report of it, and with time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

# A placement's blocks are reported when its prompt is begun; of one that waits there for longer nothing is expected.
EXPECTED_S = 5.0
MOST_EXPECTED = 4096


def _marks(most: int) -> tuple[int, ...]:
    """Numbers of first blocks at which a prompt is marked: close together where it begins, 1/16 of it further on."""
    marks, place = [], 1
    while place <= most:
        marks.append(place)
        place += max(1, place >> 4)
    return tuple(marks)


_MARKS = _marks(1 << 20)


class Hopes:
    """What placements of the last seconds will have put into which backend's cache. Backends are bits of a mask."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}  # key to the mask of the backends where it is expected
        self._counts: dict[tuple[int, int], int] = {}
        self._due: deque[tuple[float, int, tuple[int, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, bit: int, keys: Sequence[int], have: int, now_s: float) -> None:
        """A prompt with blocks of these keys was placed there; the first ``have`` are there already."""
        marks = tuple(
            [keys[place - 1] for place in _MARKS[bisect_right(_MARKS, have) : bisect_right(_MARKS, len(keys))]]
        )
        if not marks:
            return
        for key in marks:
            self.masks[key] = self.masks.get(key, 0) | bit
            self._counts[key, bit] = self._counts.get((key, bit), 0) + 1
        self._due.append((now_s + EXPECTED_S, bit, marks))
        if len(self._due) > MOST_EXPECTED:
            self._give_up()

    def heard(self, key: int, bit: int) -> None:
        """That block was reported: what was expected of it there has come."""
        if self._counts.pop((key, bit), None) is not None:
            self._lift(key, bit)

    def expire(self, now_s: float) -> bool:
        """Time has passed. Returns whether something is expected no longer."""
        before = len(self._due)
        while self._due and self._due[0][0] <= now_s:
            self._give_up()
        return len(self._due) != before

    def drop(self, bit: int) -> None:
        """Nothing is expected of that backend."""
        kept = [each for each in self._due if each[1] != bit]
        if len(kept) != len(self._due):
            gone = [each for each in self._due if each[1] == bit]
            self._due = deque([*gone, *kept])
            for _ in gone:
                self._give_up()

    def match(self, keys: Sequence[int], length: int, mask: int) -> list[tuple[int, int]]:
        """Backends of ``mask`` with the number of first blocks, of ``length``, expected there."""
        found: list[tuple[int, int]] = []
        left = mask
        for place in reversed(_MARKS[: bisect_right(_MARKS, length)]):
            here = self.masks.get(keys[place - 1], 0) & left
            if here:
                left &= ~here
                while here:
                    bit = here & -here
                    here ^= bit
                    found.append((bit, place))
                if not left:
                    break
        return found

    def _give_up(self) -> None:
        _, bit, marks = self._due.popleft()
        for key in marks:
            count = self._counts.pop((key, bit), 0)
            if count > 1:
                self._counts[key, bit] = count - 1
            elif count:
                self._lift(key, bit)

    def _lift(self, key: int, bit: int) -> None:
        left = self.masks[key] & ~bit
        if left:
            self.masks[key] = left
        else:
            del self.masks[key]
