"""Until when those who wait do so: their deadline, how long for one backend alone, how long behind shorter ones. Pure.

The times of a request that leaves are dropped when they come, or when there are many like that: to look for them at
once would cost the length of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from gateway.routing.entries import Entry

# How often a request's own uncached tokens count while it is held back for shorter ones.
SHORT_FIRST = 64.0
# Times noted for requests that have left are swept out when there are so many of them.
MOST_STALE = 256

Ends = list[tuple[float, int]]  # a heap of times with the sequence of the request


class Times:
    """The times of those who wait. Seconds of the caller's clock."""

    def __init__(self, entries: Mapping[int, Entry]) -> None:
        """``entries`` are those who wait, by sequence; the caller's own: not copied."""
        self._entries = entries
        self._deadlines: Ends = []
        self._homes: Ends = []
        self._handicaps: Ends = []
        self._again_s: float | None = None

    def __repr__(self) -> str:
        return f"<Times {len(self)} of {len(self._entries)} waiting>"

    def __len__(self) -> int:
        return len(self._deadlines) + len(self._homes) + len(self._handicaps)

    def waits(self, entry: Entry) -> None:
        """It waits until its deadline."""
        heapq.heappush(self._deadlines, (entry.waiter.deadline_s, entry.waiter.sequence))
        if len(self._entries) == 1:
            self._again_s = None  # whoever waited for that has left
        most = 2 * len(self._entries) + MOST_STALE
        for ends in (self._deadlines, self._homes, self._handicaps):
            if len(ends) > most:
                ends[:] = [end for end in ends if end[1] in self._entries]
                heapq.heapify(ends)

    def waits_for_one(self, entry: Entry, until_s: float) -> None:
        """Until then it waits for one backend alone."""
        heapq.heappush(self._homes, (until_s, entry.waiter.sequence))

    def hold_back(self, entry: Entry, until_s: float) -> None:
        """Let shorter ones go first until then."""
        entry.handicap = SHORT_FIRST * entry.tokens
        heapq.heappush(self._handicaps, (until_s, entry.waiter.sequence))

    def look_again(self, at_s: float) -> None:
        """Somebody waits for what time alone may change: look again then, if not before."""
        if self._again_s is None:
            self._again_s = at_s

    def again(self, now_s: float) -> bool:
        """Whether that time has come. It is forgotten then."""
        if self._again_s is None or self._again_s > now_s:
            return False
        self._again_s = None
        return True

    def next_s(self) -> float | None:
        """The first time to come; ``None`` if nobody waits."""
        firsts: Ends = []
        for ends in (self._deadlines, self._homes, self._handicaps):
            while ends and ends[0][1] not in self._entries:
                heapq.heappop(ends)
            firsts += ends[:1]
        if not firsts:
            return None
        first_s = min(firsts)[0]
        return first_s if self._again_s is None else min(first_s, self._again_s)

    def come(self, now_s: float) -> bool:
        """Whether any of these times has come."""
        deadlines, homes, handicaps = self._deadlines, self._homes, self._handicaps
        return (
            (len(deadlines) > 0 and deadlines[0][0] <= now_s)
            or (len(handicaps) > 0 and handicaps[0][0] <= now_s)
            or (len(homes) > 0 and homes[0][0] <= now_s)
        )

    def overdue(self, now_s: float) -> Iterator[Entry]:
        """Those who have waited too long, the first to be late in front. They may be taken out meanwhile."""
        for entry in self._over(self._deadlines, now_s):
            # One that waits again after a failure has another deadline than the first time.
            if entry.waiter.deadline_s <= now_s:
                yield entry

    def released(self, now_s: float, closed: int) -> Iterator[Entry]:
        """Those who have waited for one backend alone for long enough, or for one of the mask ``closed``. They are to
        wait for all of their own from now on."""
        if closed:
            for _, sequence in self._homes:
                entry = self._entries.get(sequence)
                if entry is None or entry.lane is None or entry.lanes_mask == entry.mask:
                    continue
                if not entry.lanes_mask & ~closed:
                    yield entry
        for entry in self._over(self._homes, now_s):
            if entry.lane is not None and entry.lanes_mask != entry.mask:
                yield entry

    def aged(self, now_s: float) -> Iterator[Entry]:
        """Those who were held back long enough."""
        for entry in self._over(self._handicaps, now_s):
            if entry.lane is not None and entry.handicap:
                yield entry

    def _over(self, ends: Ends, now_s: float) -> Iterator[Entry]:
        """Those of ``ends`` whose time has come. Their times are forgotten."""
        while ends and ends[0][0] <= now_s:
            entry = self._entries.get(heapq.heappop(ends)[1])
            if entry is not None:
                yield entry
