"""Which backend has which of a prompt's KV blocks, as the backends themselves report it. Pure.

vLLM frees a sequence's blocks tail first, and whoever uses a block uses all before it, so what is left of a prompt is
always its beginning: the blocks that a backend has of it are the longest run of its first blocks. ``feeds`` has what
each engine reported, ``hopes`` what was placed and is not reported yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.block_keys import PromptBlocks
from gateway.routing.feeds import Feed, Knowledge, Shelf

# A prompt is looked at in so many places, and closer where a run ends.
LOOKS = 32
LEAST_STEP = 8
TRUST_WEIGHT = 0.1
LEAST_TRUST = 0.01
# Less says nothing about trust: the last token is never cached, nor what is part of a block.
LEAST_CHECKED_TOKENS = 256


@dataclass(slots=True)
class _Sized:
    """The feeds whose blocks are of one size: the backend of each, by bit; all feeds and all backends as masks, and
    the backends of which everything is known."""

    room_of: dict[int, int]
    feeds: int = 0
    rooms: int = 0
    exact: int = 0


class BlockIndex:
    """What all feeds have told. Backends are bits of a mask, given by ``room``; feeds have bits of their own."""

    def __init__(self) -> None:
        self.expected_tokens = 0
        self.confirmed_tokens = 0
        self._shelf = Shelf()
        self._feeds: dict[tuple[str, int], Feed] = {}
        self._rooms: dict[str, int] = {}
        self._by_size: dict[int, _Sized] = {}
        self._layout = self._exact = 0
        self._now_s = 0.0
        self.trusts: dict[int, float] = {}  # by bit, where answers told of it

    def __repr__(self) -> str:
        return f"<BlockIndex {len(self._shelf.holders)} blocks of {len(self._feeds)} engines>"

    @property
    def changes(self) -> int:
        """Goes up whenever a look-up may find something else."""
        return self._shelf.changes

    @property
    def silent(self) -> bool:
        """Whether no engine was ever asked for its events."""
        return not self._feeds

    def feed(self, backend: str, rank: int = 0) -> Feed:
        """The feed of an engine, made at the first call."""
        found = self._feeds.get((backend, rank))
        if found is None:
            found = self._feeds[backend, rank] = Feed(self._shelf, backend, rank)
            self._shelf.structured()
        return found

    def room(self, backend: str, bit: int) -> None:
        """That backend is that bit."""
        self._rooms[backend] = bit
        self._shelf.structured()

    def sizes(self) -> tuple[int, ...]:
        """Tokens in a block, of all that are known; empty while nothing can be looked up."""
        return tuple(sorted(self._sized()))

    def sweep(self, most_keys: int) -> bool:
        """Tidy up a bit. Returns whether there is more to do."""
        return self._shelf.sweep(most_keys)

    def refine(self, guessed: Mapping[int, int], blocks: PromptBlocks, mask: int) -> dict[int, int]:
        """``match``, where that is all a backend has; else, if it is more, what was guessed of the backend."""
        found, exact = self.match(blocks, mask)
        for bit, tokens in guessed.items():
            if not bit & exact and tokens > found.get(bit, 0):
                found[bit] = tokens
        return found

    def match(self, blocks: PromptBlocks, mask: int) -> tuple[dict[int, int], int]:
        """Tokens of the prompt that each backend of ``mask`` has, by bit, and the mask of those of which that is known
        to be all they have. Backends of which nothing is known are in neither."""
        found: dict[int, int] = {}
        exact = 0
        for size, sized in self._sized().items():
            keys = blocks.keys.get(size)
            if keys is None or not sized.rooms & mask:
                continue
            exact |= sized.exact & mask
            # The last token is computed anew whatever is cached.
            length = min(len(keys), max(0, blocks.tokens - 1) // size)
            for feeds, run in self._runs(keys, length, sized.feeds):
                while feeds:
                    feed = feeds & -feeds
                    feeds ^= feed
                    bit = sized.room_of[feed]
                    if bit & mask and run * size > found.get(bit, 0):
                        found[bit] = run * size
            if self._shelf.hopes:
                for bit, run in self._shelf.hopes.match(keys, length, sized.rooms & mask):
                    found[bit] = max(found.get(bit, 0), run * size)
        return found, exact

    def expect(self, bit: int, blocks: PromptBlocks, have_tokens: int = 0) -> None:
        """The prompt was placed there just now: until they are reported, its blocks beyond the first ``have_tokens``
        count as if they were."""
        for size, sized in self._sized().items():
            keys = blocks.keys.get(size)
            if keys is not None and sized.rooms & bit:
                self._shelf.hopes.add(bit, keys, have_tokens // size, self._now_s)
                self._shelf.changes += 1

    def expire(self, now_s: float) -> None:
        """It is that late: what was placed a while ago and not reported is not there."""
        self._now_s = now_s
        if self._shelf.hopes and self._shelf.hopes.expire(now_s):
            self._shelf.changes += 1

    def gone(self, bit: int) -> None:
        """That backend's process is another one: what was expected of it will not come."""
        self._shelf.hopes.drop(bit)
        self.trusts.pop(bit, None)
        self._shelf.changes += 1

    def knows(self, bit: int) -> bool:
        """Whether all that a backend has is known."""
        if self._layout != self._shelf.layouts:
            self._sized()
        return self._exact & bit != 0

    def check(self, bit: int, expected_tokens: int, cached_tokens: int) -> None:
        """An answer tells how much of its prompt was cached, where ``expected_tokens`` were reported."""
        if expected_tokens < LEAST_CHECKED_TOKENS:
            return
        self.expected_tokens += expected_tokens
        self.confirmed_tokens += min(expected_tokens, cached_tokens)
        trust = self.trust(bit)
        trust += TRUST_WEIGHT * (min(1.0, cached_tokens / expected_tokens) - trust)
        self.trusts[bit] = max(LEAST_TRUST, trust)

    def trust(self, bit: int) -> float:
        """How far that backend's reports came true, 0 to 1. Where sliding windows or recurrent states end a prefix
        earlier, the full-attention blocks that are looked at say too much."""
        return self.trusts.get(bit, 1.0)

    def _sized(self) -> dict[int, _Sized]:
        if self._layout == self._shelf.layouts:
            return self._by_size
        self._layout = self._shelf.layouts
        self._by_size = {}
        partial = 0
        for (name, _), feed in self._feeds.items():
            bit = self._rooms.get(f"{name}#{feed.rank}", self._rooms.get(name))  # where ranks are chosen, each is one
            if bit is None or not feed.size_tokens or feed.knowledge is Knowledge.NONE:
                continue
            sized = self._by_size.setdefault(feed.size_tokens, _Sized({}))
            sized.room_of[feed.bit] = feed.room = bit
            sized.feeds |= feed.bit
            sized.rooms |= bit
            if feed.knowledge is not Knowledge.EXACT:
                partial |= bit
        self._exact = 0
        for sized in self._by_size.values():
            sized.exact = sized.rooms & ~partial
            self._exact |= sized.exact
        return self._by_size

    def _runs(self, keys: Sequence[int], length: int, feeds: int) -> list[tuple[int, int]]:
        """Masks of ``feeds`` with the number of first blocks they have, if any."""
        runs: list[tuple[int, int]] = []
        holders = self._shelf.holders
        left = holders.get(keys[0], 0) & feeds if length else 0
        step = max(LEAST_STEP, length // LOOKS)
        have = 1  # blocks that all of ``left`` have
        while left and have < length:
            reach = min(length, have + step)
            gone = left & ~holders.get(keys[reach - 1], 0)
            if gone:
                left ^= gone
                self._ends(keys, have, reach, gone, runs)
            have = reach
        if left:
            runs.append((left, length))
        return runs

    def _ends(self, keys: Sequence[int], have: int, reach: int, feeds: int, runs: list[tuple[int, int]]) -> None:
        """Where the runs of ``feeds`` end: after ``have`` blocks or later, before ``reach``."""
        holders = self._shelf.holders
        while feeds:
            low, high, mask = have, reach, feeds
            while high - low > 1:
                middle = (low + high) // 2
                here = holders.get(keys[middle - 1], 0) & mask
                if here:
                    low, mask = middle, here
                else:
                    high = middle
            runs.append((mask, low))
            feeds &= ~mask
