"""The ledger of KV blocks of one engine: what vLLM last reported, and what our own requests hold since. Pure.

``used = ours + extra``. ``ours`` are the footprints of the requests we have there, which grow as their answers pass
by; what they hold together, as far as the chains of their prompts tell, is counted once (``held``). ``extra`` is all
the ledger cannot know from itself, one signed number: blocks of traffic that is not ours (*foreign*, positive), less
blocks that our requests share beyond what their chains tell (*shared*, negative).

A scrape fixes ``extra`` between two bounds. The prompts of requests that have not begun to answer may or may not be in
the cache yet, and a request released while the scrape was under way may or may not have been counted. So

    scraped − (everything of ours it may include)  ≤  extra  ≤  scraped − (what it must include)

and ``extra`` moves no farther than into these bounds. Without unconfirmed requests both bounds are one number and the
scrape decides; with constant foreign traffic ``extra`` stays right whatever our requests do. The number of requests at
the engine is kept in the same way.

What is *reserved* is the use to come: the most that the requests there will hold together at any moment (``peaks``), or
if it is to be certain the sum of what each will hold at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gateway.fleet.capacity import KvCapacity
from gateway.fleet.held import Chain, Held
from gateway.fleet.peaks import Peaks, bucket_of
from gateway.types import KvView, footprint_blocks


@dataclass(slots=True)
class _Entry:
    """One request of ours. Tokens; ``blocks``, ``peak_blocks``: footprint now and when its expected output is there."""

    prompt_tokens: int
    expected_tokens: int
    budget_tokens: int | None
    n: int
    uncached_tokens: int
    chain: Chain = ()
    guessed: bool = False
    grown_tokens: int = 0
    begun: bool = False
    blocks: int = 0
    peak_blocks: int = 0
    bucket: int = 0  # of the tokens it has to go
    room_tokens: int = 0  # what it may still grow by before blocks or the expectation must be reckoned anew
    marked_blocks: int | None = None  # footprint when the scrape began, if confirmed by then


class Ledger:
    """KV blocks of one engine. Knows no clock: times are arguments, in seconds of any one clock."""

    def __init__(self, on_change: Callable[[], None] = lambda: None, certain: bool = False) -> None:
        """``on_change`` is called when what placing goes by has changed: what is reserved, what is pending, who is in
        flight. Growth within what was expected of a request is none of it. ``certain``: reserve for every request what
        it will hold at its end, since the others may not have ended by then."""
        self._on_change = on_change
        self._certain = certain
        self._capacity: KvCapacity | None = None
        self._entries: dict[Hashable, _Entry] = {}
        self.held = Held()
        self._peaks = Peaks()
        self._ours_blocks = 0  # sum of footprints, what is shared counted for each
        self._peak_blocks = 0
        self._pending_tokens = 0
        self._extra_blocks = 0
        self._released_blocks = 0  # of requests released since the scrape under way began
        self._sequences = self._extra_sequences = self._released_sequences = 0  # the same for their number
        self._observed_s: float | None = None
        self.changes = 0  # goes up with every change of what ``view`` would say, its age aside

    def __repr__(self) -> str:
        return (
            f"<Ledger {len(self._entries)} requests, ours {self._ours_blocks}, foreign {self.foreign_blocks}, "
            f"shared {self.shared_blocks}, reserved {self.reserved_blocks}>"
        )

    @property
    def capacity(self) -> KvCapacity | None:
        """What the engine has; ``None`` while unknown."""
        return self._capacity

    @property
    def requests(self) -> int:
        """Sequences that run or wait there, ours and others', as far as known."""
        return max(0, self._sequences + self._extra_sequences)

    @property
    def seen_blocks(self) -> int:
        """The most of our own blocks that the scrape under way may have seen, growth to come left out."""
        return self._ours_blocks - self.held.overlap_blocks + self._released_blocks

    @property
    def in_flight(self) -> int:
        """Requests of ours that were reserved and not released."""
        return len(self._entries)

    @property
    def pending_prompt_tokens(self) -> int:
        """Prompt tokens, less what should be cached, of our requests that have not begun to answer."""
        return self._pending_tokens

    @property
    def foreign_blocks(self) -> int:
        """Blocks used by others, as far as known."""
        return max(0, self._extra_blocks)

    @property
    def shared_blocks(self) -> int:
        """Blocks that several requests of ours hold together, beyond the first."""
        return self.held.overlap_blocks + max(0, -self._extra_blocks)

    @property
    def used_blocks(self) -> int:
        """Blocks in use now. Never less than our largest request holds alone that is certain to be here."""
        used = self._ours_blocks - self.held.overlap_blocks + self._extra_blocks
        if self._extra_blocks < 0:
            used = max(used, max((item.blocks for item in self._entries.values() if not item.guessed), default=0))
        return used

    @property
    def reserved_blocks(self) -> int:
        """``used_blocks`` and what use is still expected to grow by, if nobody comes."""
        return self.used_blocks + self._growth_blocks

    @property
    def _growth_blocks(self) -> int:
        growth = self._peak_blocks - self._ours_blocks
        if self._certain or len(self._entries) < 2 or self._capacity is None:
            return growth
        return min(growth, max(0, self._peaks.most_blocks(self._capacity.block_size_tokens) - self._ours_blocks))

    @property
    def observed_s(self) -> float | None:
        """When the last reconciled scrape began."""
        return self._observed_s

    def set_capacity(self, capacity: KvCapacity | None) -> None:
        """Take over what the backend is now known to have.

        Another capacity is another process: nothing but ours can be there until the next scrape says so, and ours stay
        until each is released, since requests sent to the new process may be among them.
        """
        if capacity == self._capacity:
            return
        self.changes += 1
        self._capacity = capacity
        self._extra_blocks = self._extra_sequences = 0
        self._observed_s = None
        self._ours_blocks = self._peak_blocks = self._released_blocks = self._released_sequences = 0
        for entry in self._entries.values():
            self._peaks.add(entry.bucket, -entry.blocks, 0)
            entry.blocks = entry.peak_blocks = 0
            entry.marked_blocks = None
            self._reckon(entry)
        size = capacity.block_size_tokens if capacity is not None else 1
        self.held.resize(size, [entry.chain for entry in self._entries.values()])
        self._on_change()

    def reserve(
        self,
        key: Hashable,
        prompt_tokens: int,
        expected_output_tokens: int,
        n: int = 1,
        budget_tokens: int | None = None,
        cached_tokens: int = 0,
        chain: Chain = (),
        guessed: bool = False,
    ) -> None:
        """Enter a request that is being sent. Output figures are per sequence; ``n`` sequences share the prompt.

        An expectation that is outgrown doubles, up to ``budget_tokens``. ``cached_tokens`` of the prompt should be in
        the cache already: its blocks are needed all the same, but not the time. ``chain``: beginnings of the prompt, to
        tell which blocks it shares with others of ours; empty where the backend keeps no prefixes. ``guessed``: it may
        be at another engine of the backend.
        Raises ``ValueError`` if ``key`` is in use.
        """
        if key in self._entries:
            raise ValueError(f"{key!r} is already in the ledger")
        uncached_tokens = max(0, prompt_tokens - cached_tokens)
        entry = _Entry(prompt_tokens, expected_output_tokens, budget_tokens, max(1, n), uncached_tokens, chain, guessed)
        self._enter(key, entry)
        self._on_change()

    def first_byte(self, key: Hashable) -> None:
        """The backend has begun to answer: the prompt is in its cache."""
        entry = self._entries.get(key)
        if entry is not None and not entry.begun:
            entry.begun = True
            self.changes += 1
            self._pending_tokens -= entry.uncached_tokens
            self._on_change()

    def prefilled(self, key: Hashable) -> None:
        """Its prompt should have been worked on by now, though no byte tells: nobody waits behind it any more."""
        entry = self._entries.get(key)
        if entry is not None and not entry.begun and entry.uncached_tokens:
            self._pending_tokens -= entry.uncached_tokens
            entry.uncached_tokens = 0
            self.changes += 1
            self._on_change()

    def grow(self, key: Hashable, tokens: int) -> None:
        """So many more tokens were generated, over all sequences of the request."""
        entry = self._entries.get(key)
        if entry is None or tokens <= 0:
            return
        entry.grown_tokens += tokens
        entry.room_tokens -= tokens
        if entry.room_tokens < 0:
            expected_tokens = entry.expected_tokens
            self._reckon(entry)
            if entry.expected_tokens != expected_tokens:
                self._on_change()

    def release(self, key: Hashable) -> None:
        """The request is over, however it ended. Releasing a key again does nothing."""
        entry = self._entries.get(key)
        if entry is None:
            return
        kept_blocks = self._leave(key, entry)
        self._released_sequences += entry.n
        self._released_blocks += (entry.blocks if entry.begun else entry.peak_blocks) - kept_blocks
        # Any of the rest may have been held by others of ours too, beyond what chains tell, and that stays. So the
        # release frees nothing for sure until as many blocks as were shared have left; the next scrape knows better.
        if self._extra_blocks < 0:
            self._extra_blocks = min(0, self._extra_blocks + entry.blocks - kept_blocks)
        self._on_change()

    def weight(self, key: Hashable) -> tuple[int, int | None]:
        """Blocks of a request now, and those that the scrape under way must have seen (``None``: perhaps none).
        Raises ``KeyError``."""
        entry = self._entries[key]
        return entry.blocks, entry.marked_blocks

    def misses(self, used_blocks: float) -> list[Hashable]:
        """The requests that are certain to be here and that the scrape under way must have seen, but that hold more
        than so many blocks."""
        return [
            key
            for key, entry in self._entries.items()
            if not entry.guessed and entry.marked_blocks is not None and entry.marked_blocks > used_blocks
        ]

    def doubt(self, key: Hashable) -> None:
        """A request that was certain to be here may be elsewhere. Raises ``KeyError``."""
        self._entries[key].guessed = True

    def take_over(self, key: Hashable, other: Ledger) -> None:
        """A request of ``other`` is at this engine: it was never there. Raises ``KeyError``."""
        entry = other._entries[key]
        other._leave(key, entry)
        other._on_change()
        entry.blocks = entry.peak_blocks = 0
        self._enter(key, entry)
        self._on_change()

    def begin_scrape(self) -> None:
        """A scrape starts: whoever has begun to answer by now must be in what it will report."""
        self._released_blocks = self._released_sequences = 0
        for entry in self._entries.values():
            entry.marked_blocks = entry.blocks if entry.begun else None

    def reconcile(self, used_blocks: int, started_s: float, requests: int | None = None) -> None:
        """Take in the use a scrape reported that began at ``started_s`` (with ``begin_scrape``), and how many sequences
        run or wait there by its account."""
        least = most = certain = 0
        for entry in self._entries.values():
            if entry.marked_blocks is not None:
                certain += entry.n
                least += entry.marked_blocks
                most += entry.blocks
            else:
                most += entry.peak_blocks
        overlap_blocks = self.held.overlap_blocks
        low = used_blocks - most + overlap_blocks - self._released_blocks
        high = used_blocks - max(0, least - overlap_blocks)
        self._extra_blocks = min(max(self._extra_blocks, low), high)
        if requests is not None:
            low = requests - self._sequences - self._released_sequences
            self._extra_sequences = min(max(self._extra_sequences, low), requests - certain)
        self._observed_s = started_s
        self._released_blocks = self._released_sequences = 0
        self.changes += 1
        self._on_change()

    def view(self, now_s: float) -> KvView | None:
        """The KV cache now; ``None`` while the capacity is unknown or no use was ever observed."""
        capacity = self._capacity
        if capacity is None or self._observed_s is None:
            return None
        used = self.used_blocks
        return KvView(
            capacity_blocks=capacity.blocks,
            engine_capacity_blocks=capacity.engine_blocks,
            block_size_tokens=capacity.block_size_tokens,
            used_blocks=used,
            reserved_blocks=used + self._growth_blocks,
            age_s=max(0.0, now_s - self._observed_s),
            held=self.held,
        )

    def _enter(self, key: Hashable, entry: _Entry) -> None:
        self._entries[key] = entry
        self.held.take(entry.chain)
        self._sequences += entry.n
        self._peaks.add(entry.bucket, 0, entry.n)
        if not entry.begun:
            self._pending_tokens += entry.uncached_tokens
        self._reckon(entry)

    def _leave(self, key: Hashable, entry: _Entry) -> int:
        """Take an entry out of the sums. Returns how many of its blocks others of ours hold still."""
        del self._entries[key]
        self.changes += 1
        self._sequences -= entry.n
        if not entry.begun:
            self._pending_tokens -= entry.uncached_tokens
        self._ours_blocks -= entry.blocks
        self._peak_blocks -= entry.peak_blocks
        self._peaks.add(entry.bucket, -entry.blocks, -entry.n)
        overlap_blocks = self.held.overlap_blocks
        self.held.drop(entry.chain)
        return overlap_blocks - self.held.overlap_blocks

    def _reckon(self, entry: _Entry) -> None:
        """Bring an entry's footprint, its expectation and the sums up to date."""
        self.changes += 1
        n = entry.n
        output = -(-entry.grown_tokens // n)
        while output > entry.expected_tokens:
            doubled = max(1, 2 * entry.expected_tokens)
            if entry.budget_tokens is not None:
                doubled = min(doubled, entry.budget_tokens)
            if doubled <= entry.expected_tokens:
                entry.expected_tokens = output
                break
            entry.expected_tokens = doubled
        size = self._capacity.block_size_tokens if self._capacity is not None else 1
        blocks = footprint_blocks(entry.prompt_tokens, output, n, size)
        peak = footprint_blocks(entry.prompt_tokens, entry.expected_tokens, n, size)
        self._ours_blocks += blocks - entry.blocks
        self._peak_blocks += peak - entry.peak_blocks
        bucket = bucket_of(entry.expected_tokens - output)
        self._peaks.add(entry.bucket, -entry.blocks, -n)
        self._peaks.add(bucket, blocks, n)
        entry.blocks, entry.peak_blocks, entry.bucket = blocks, peak, bucket
        tail = entry.prompt_tokens + output if n == 1 else entry.prompt_tokens % size + output
        to_boundary = -(-tail // size) * size - tail
        further = min(to_boundary, entry.expected_tokens - output)
        entry.room_tokens = (output + further) * n - entry.grown_tokens
