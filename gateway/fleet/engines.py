"""The engines of one backend: a ledger each, and at which of them each request of ours is. Pure.

A vLLM server may run several engines (data-parallel ranks), each with a KV cache and a queue of its own, and a request
lives in one of them. Which one is known if it was asked for, and the server heeds that. Else the server chooses: the
engine with the fewest requests, running and waiting, the rest left to chance (``v1/engine/core_client.py``). So a
request is booked where the server should have sent it, and that is a guess: at each scrape the guesses that an engine's
use contradicts are booked anew, where there is use that nobody explains. What is left unexplained after that is the
ledgers' ``extra``. A wrong guess hides no block and frees none too early: what is released at an engine that never had
it frees nothing there, since a scrape has taken it off that engine's ``extra``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from gateway.fleet.capacity import KvCapacity
from gateway.fleet.held import Chain
from gateway.fleet.ledger import Ledger

# A reading is some steps old, and its share of the cache is rounded: so much less than a request holds is as much.
LEAST_BLOCKS, LESS = 2, 1 / 8
# What of a prompt that is being read in must have been seen elsewhere before it is taken to be there.
MISSED = 1 / 4


class Engines:
    """The ledgers in the order of the ranks. There is one engine until more are heard of. Times are arguments."""

    def __init__(self, on_change: Callable[[int], None] = lambda rank: None, certain: bool = False) -> None:
        """``on_change``: as that of a ledger, with its rank; ``certain``: as there."""
        self._on_change = on_change
        self._certain = certain
        self._ledgers = [self._ledger(0)]
        self._capacity: KvCapacity | None = None
        self._ranks: dict[Hashable, int] = {}  # at which engine each request is booked
        self._chosen: dict[Hashable, None] = {}  # requests whose engine the server chose
        self._missed: frozenset[Hashable] = frozenset()  # not where they were asked for, by the last scrape
        self.disobeyed = 0  # requests that were not where they were asked for
        self._turn = 0

    def __repr__(self) -> str:
        return f"<Engines {self._ledgers}>"

    def __len__(self) -> int:
        return len(self._ledgers)

    def __getitem__(self, rank: int) -> Ledger:
        return self._ledgers[rank]

    @property
    def capacity(self) -> KvCapacity | None:
        """What all of them have together; ``None`` while unknown."""
        return self._capacity

    @property
    def changes(self) -> int:
        """Another number whenever a ledger would say something else."""
        ledgers = self._ledgers
        return ledgers[0].changes if len(ledgers) == 1 else sum([ledger.changes for ledger in ledgers])

    @property
    def in_flight(self) -> int:
        """Requests of ours at all of them."""
        return len(self._ranks)

    @property
    def used_blocks(self) -> int:
        """Blocks in use at all of them."""
        return sum(ledger.used_blocks for ledger in self._ledgers)

    @property
    def reserved_blocks(self) -> int:
        """``used_blocks`` and what our requests are still expected to grow by."""
        return sum(ledger.reserved_blocks for ledger in self._ledgers)

    def rank_of(self, key: Hashable) -> int | None:
        """Where a request is booked; ``None`` if it is nowhere."""
        return self._ranks.get(key)

    def next_rank(self) -> int:
        """The engine the server should send the next request to: the one with the fewest requests. Of several the
        fullest, since any of them may be it."""
        if len(self._ledgers) == 1:
            return 0
        return min(range(len(self._ledgers)), key=self._score)

    def set_capacity(self, count: int, capacity: KvCapacity | None) -> None:
        """Take over how many engines there are, and what they have together.

        Another number of them is another process: as for one ledger, ours stay until each is released. What was at an
        engine that is no more is booked at one of those that are.
        """
        engine = capacity
        if capacity is not None and capacity.engines > 1:
            engine = KvCapacity(1, capacity.engine_blocks, capacity.block_size_tokens, capacity.virtual)
        self._capacity = capacity
        if count != len(self._ledgers):
            self._turn = 0
            for ledger in self._ledgers:
                ledger.set_capacity(None)  # nothing of what was seen holds any longer
            while len(self._ledgers) < count:
                self._ledgers.append(self._ledger(len(self._ledgers)))
            for key, rank in list(self._ranks.items()):
                if rank >= count:
                    self._move(key, rank % count)
            del self._ledgers[count:]
            if count == 1:
                self._chosen.clear()
        for ledger in self._ledgers:
            ledger.set_capacity(engine)

    def reserve(
        self,
        key: Hashable,
        rank: int | None,
        prompt_tokens: int,
        expected_output_tokens: int,
        n: int = 1,
        budget_tokens: int | None = None,
        cached_tokens: int = 0,
        chain: Chain = (),
        heeded: bool = True,
    ) -> int:
        """Enter a request that is being sent, to engine ``rank`` if that is asked for, and there is one: else where the
        server should send it. ``heeded``: the server will obey. The rest is as in ``Ledger.reserve``. Returns the
        prompt tokens that are to be worked on there before its own."""
        if key in self._ranks:
            raise ValueError(f"{key!r} is already in the ledgers")
        count = len(self._ledgers)
        at, guessed = 0, False
        if count > 1:
            asked = rank is not None and 0 <= rank < count
            at = rank if asked and rank is not None else self._expected_rank()
            guessed = not (asked and heeded)
        ledger = self._ledgers[at]
        ahead_tokens = ledger.pending_prompt_tokens
        ledger.reserve(key, prompt_tokens, expected_output_tokens, n, budget_tokens, cached_tokens, chain, guessed)
        self._ranks[key] = at
        if guessed:
            self._chosen[key] = None
        return ahead_tokens

    def first_byte(self, key: Hashable) -> None:
        """The backend has begun to answer."""
        rank = self._ranks.get(key)
        if rank is not None:
            self._ledgers[rank].first_byte(key)

    def prefilled(self, key: Hashable) -> None:
        """Its prompt should have been worked on by now, though no byte tells."""
        rank = self._ranks.get(key)
        if rank is not None:
            self._ledgers[rank].prefilled(key)

    def grow(self, key: Hashable, tokens: int) -> None:
        """So many more tokens were generated, over all sequences of the request."""
        rank = self._ranks.get(key)
        if rank is not None:
            self._ledgers[rank].grow(key, tokens)

    def release(self, key: Hashable) -> None:
        """The request is over, however it ended. Releasing a key again does nothing."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            self._chosen.pop(key, None)
            self._ledgers[rank].release(key)

    def begin_scrape(self) -> None:
        """A scrape starts."""
        for ledger in self._ledgers:
            ledger.begin_scrape()

    def reconcile(self, used_blocks: Sequence[int], requests: Sequence[int] | None, started_s: float) -> None:
        """Take in what a scrape reported that began at ``started_s``: blocks in use, and requests that run or wait
        (``None``: unknown), both by rank. Raises ``ValueError`` if that is not one figure for each engine."""
        if len(used_blocks) != len(self._ledgers) or (requests is not None and len(requests) != len(self._ledgers)):
            raise ValueError(f"{len(used_blocks)} figures for {len(self._ledgers)} engines")
        if len(self._ledgers) > 1:
            self._look_for_disobedience(used_blocks)
        if self._chosen:
            self._book_anew(used_blocks)
        for rank, ledger in enumerate(self._ledgers):
            ledger.reconcile(used_blocks[rank], started_s, None if requests is None else requests[rank])

    def _look_for_disobedience(self, used_blocks: Sequence[int]) -> None:
        """A request that holds more than its engine uses, at two scrapes in a row, is not where it was asked for. Once
        may be chance: the server may have ended it a moment before we know. From then on its engine is a guess."""
        missed = frozenset(
            key
            for used, ledger in zip(used_blocks, self._ledgers, strict=True)
            for key in ledger.misses(used + max(LEAST_BLOCKS, used * LESS))
        )
        for key in missed & self._missed:
            self._ledgers[self._ranks[key]].doubt(key)
            self._chosen[key] = None
            self.disobeyed += 1
        self._missed = missed

    def _book_anew(self, used_blocks: Sequence[int]) -> None:
        """Book the requests whose engine the server chose where the use is that nothing else explains.

        Those that must be in what was read go first, the largest in front. Each stays where it is if that engine's use
        has room for it, by and large; else it goes where most is unexplained, but to no engine that uses less than it
        holds. The others may hold nothing yet: they move only from an engine whose use is explained without them to one
        where a good part of them would be missed.
        """
        left = [used - ledger.seen_blocks for used, ledger in zip(used_blocks, self._ledgers, strict=True)]
        certain: list[tuple[int, Hashable]] = []
        uncertain: list[tuple[int, Hashable]] = []
        for key in self._chosen:
            rank = self._ranks[key]
            blocks, seen_blocks = self._ledgers[rank].weight(key)
            left[rank] += blocks  # taken out of what is explained, to be put in again one by one
            if seen_blocks is None:
                uncertain.append((blocks, key))
            else:
                certain.append((seen_blocks, key))
        certain.sort(key=lambda item: -item[0])
        astray: list[tuple[int, Hashable]] = []
        for blocks, key in certain:
            rank = self._ranks[key]
            if left[rank] < _by_and_large(blocks):
                astray.append((blocks, key))
            else:
                left[rank] -= blocks
        for blocks, key in astray:
            rank = self._ranks[key]
            able = [index for index, used in enumerate(used_blocks) if used >= _by_and_large(blocks)]
            best = max(able or [rank], key=lambda index: (left[index], index == rank))
            self._move(key, best)
            left[best] -= blocks
        rest = [(blocks, key) for blocks, key in uncertain if left[self._ranks[key]] <= 0]
        for blocks, key in uncertain:
            if left[self._ranks[key]] > 0:
                left[self._ranks[key]] -= blocks
        for blocks, key in rest:
            best = max(range(len(left)), key=left.__getitem__)
            if left[best] > max(LEAST_BLOCKS, blocks * MISSED):
                self._move(key, best)
                left[best] -= blocks

    def _move(self, key: Hashable, rank: int) -> None:
        """Book a request at engine ``rank``."""
        if rank == self._ranks[key]:
            return
        self._ledgers[rank].take_over(key, self._ledgers[self._ranks[key]])
        self._ranks[key] = rank

    def _score(self, rank: int) -> tuple[int, int]:
        ledger = self._ledgers[rank]
        return ledger.requests, -ledger.reserved_blocks

    def _expected_rank(self) -> int:
        """Where the server sends a request now. Of engines with equally few vLLM 0.32 takes the first from one on that
        is another with each request: if nobody else asks it, and it has one API server, that is known, too."""
        count, turn = len(self._ledgers), self._turn
        self._turn = (turn + 1) % count
        return min(range(count), key=lambda rank: (self._ledgers[rank].requests, (rank - turn) % count))

    def _ledger(self, rank: int) -> Ledger:
        return Ledger(lambda: self._on_change(rank), self._certain)


def _by_and_large(blocks: int) -> float:
    return blocks - max(LEAST_BLOCKS, blocks * LESS)
