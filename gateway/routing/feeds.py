"""What one engine of a backend has told of the KV blocks in its cache. Pure.

A *feed* holds each of its blocks by vLLM's hash, with the key of our own (``block_keys``) that its token ids have. It
is ``exact`` if it was heard from the publisher's first event on, or since its cache was last cleared; ``partial`` if
something was missed: what it has is there, but there may be more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.block_keys import ID_BYTES, next_key, root_key
from gateway.routing.hopes import Hopes

# Blocks of one engine that are kept at most, about 200 bytes each, where its cache's size is unknown.
MOST_BLOCKS = 1 << 20
# An engine cannot hold more blocks than it has: so much beyond it, what was heard is wrong.
BEYOND_CAPACITY = 1.02
# Of a cache: with so much of it known, next to nothing of what was missed before can be left.
ALL_BUT = 0.9
# Keys of an emptied feed that are taken out of the shelf with each event. All at once would hold up the loop.
SWEEP_KEYS = 64


class Knowledge(StrEnum):
    """How much of an engine's cache is known."""

    NONE = "none"
    PARTIAL = "partial"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of ``size_tokens`` each that an engine has put into its cache, one after the other.

    ``hashes`` are vLLM's, ``parent`` that of the block before the first (``None``: they begin a prompt), ``ids`` their
    token ids (``id_bytes``), all of them. ``extras`` set single blocks apart (images), one each or none at all.
    ``group`` is the KV cache group of a hybrid model.
    """

    hashes: Sequence[int]
    parent: int | None
    ids: bytes
    size_tokens: int
    adapter: str = ""
    salt: str = ""
    extras: Sequence[str] = ()
    group: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are no longer in the cache."""

    hashes: Sequence[int]
    group: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The cache is empty."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class Shelf:
    """The keys of all feeds: ``holders`` maps each to a mask of those that have the block; ``hopes`` are those that are
    expected.

    ``changes`` goes up whenever a look-up may find something else, ``layouts`` whenever feeds themselves are others.
    """

    __slots__ = ("_bits", "_free", "_stale", "changes", "holders", "hopes", "layouts")

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.hopes = Hopes()
        self.changes = self.layouts = 0
        self._bits = 0
        self._free: list[int] = []
        self._stale: deque[tuple[int, dict[int, int]]] = deque()

    def bit(self) -> int:
        """A bit that no feed has."""
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << (self._bits - 1)

    def structured(self) -> None:
        """Feeds, their block sizes or what is known of them changed."""
        self.layouts += 1
        self.changes += 1

    def retire(self, bit: int, keys: dict[int, int]) -> None:
        """Nobody has that bit any more; the values of ``keys`` still bear it, and are swept by and by."""
        self._stale.append((bit, keys))

    def sweep(self, most_keys: int = SWEEP_KEYS) -> bool:
        """Take retired bits off some keys. Returns whether any are left."""
        holders = self.holders
        while self._stale and most_keys > 0:
            bit, keys = self._stale[0]
            while keys and most_keys > 0:
                most_keys -= 1
                _, key = keys.popitem()
                left = holders.get(key, 0) & ~bit
                if left:
                    holders[key] = left
                else:
                    holders.pop(key, None)
            if not keys:
                self._stale.popleft()
                self._free.append(bit)
        return bool(self._stale)


class Feed:
    """One engine's blocks. ``bit`` is its own in masks of feeds, ``room`` its backend's in masks of backends.

    ``orphans`` are blocks that were told of without what stands before them, so that they have no key; ``odd`` events
    could not be understood; after ``overflows`` there were more blocks than the engine has, and all was forgotten.
    """

    __slots__ = (
        "_copied", "_copies", "_keys", "_limit", "_shelf", "backend", "bit", "capacity_blocks", "group", "knowledge",
        "odd", "orphans", "overflows", "rank", "room", "size_tokens",
    )  # fmt: skip

    def __init__(self, shelf: Shelf, backend: str, rank: int) -> None:
        self._shelf = shelf
        self.backend = backend
        self.rank = rank
        self.bit = shelf.bit()
        self.room = 0
        self.knowledge = Knowledge.NONE
        self.size_tokens = 0
        self.group: int | None = None
        self.capacity_blocks: int | None = None
        self.orphans = self.odd = self.overflows = 0
        self._keys: dict[int, int] = {}  # vLLM's hash to our key
        self._copies: dict[int, int] = {}  # blocks with the same hash beyond the first
        self._copied = 0
        self._limit = MOST_BLOCKS

    def __repr__(self) -> str:
        return f"<Feed {self.backend}/{self.rank} {self.knowledge} {len(self._keys)} blocks>"

    @property
    def blocks(self) -> int:
        """Different blocks known to be there."""
        return len(self._keys)

    def sized(self, capacity_blocks: int | None) -> None:
        """The engine has so many blocks; ``None``: not known."""
        self.capacity_blocks = capacity_blocks
        beyond = MOST_BLOCKS if capacity_blocks is None else int(capacity_blocks * BEYOND_CAPACITY) + 1
        self._limit = min(MOST_BLOCKS, beyond)

    def restart(self, knowledge: Knowledge) -> None:
        """Forget all; from now on so much is known."""
        self._empty()
        self.size_tokens, self.group = 0, None
        self.knowledge = knowledge
        self._shelf.structured()

    def know(self, knowledge: Knowledge) -> None:
        """So much is known now."""
        if knowledge is not self.knowledge:
            self.knowledge = knowledge
            self._shelf.structured()

    def apply(self, event: BlockEvent) -> None:
        """Take in what the engine tells."""
        self._shelf.sweep()
        if isinstance(event, BlocksStored):
            self._store(event)
        elif isinstance(event, BlocksRemoved):
            if event.group == self.group:
                self._remove(event.hashes)
        else:
            self._empty()
            self.knowledge = Knowledge.EXACT
            self._shelf.structured()
        self._shelf.changes += 1

    def _store(self, event: BlocksStored) -> None:
        size, hashes, ids = event.size_tokens, event.hashes, event.ids
        step = size * ID_BYTES
        if step <= 0 or len(ids) != len(hashes) * step:
            self.odd += 1  # blocks with gaps between them
            return
        if not self.size_tokens:
            self.size_tokens, self.group = size, event.group
            self._shelf.structured()
        if event.group != self.group:
            return
        if size != self.size_tokens:
            self.odd += 1  # part of a block
            return
        keys = self._keys
        if event.parent is None:
            key = root_key(event.adapter, event.salt)
        else:
            found = keys.get(event.parent)
            if found is None:
                self.orphans += len(hashes)
                return
            key = found
        holders, bit, extras = self._shelf.holders, self.bit, event.extras
        hoped = self._shelf.hopes.masks
        start = 0
        for place, value in enumerate(hashes):
            known = keys.get(value)
            if known is not None:  # the same block once more: two requests computed it side by side
                self._copies[value] = self._copies.get(value, 0) + 1
                self._copied += 1
                key = known
            else:
                key = next_key(key, ids[start : start + step], extras[place] if extras else "")
                keys[value] = key
                holders[key] = holders.get(key, 0) | bit
                if key in hoped:
                    self._shelf.hopes.heard(key, self.room)
            start += step
        self._weigh(len(keys) + self._copied)

    def _weigh(self, held: int) -> None:
        """Hold the number of blocks against what the engine has."""
        if held > self._limit:
            self.overflows += 1
            self.restart(Knowledge.PARTIAL)
        elif self.knowledge is Knowledge.PARTIAL and self.capacity_blocks and held >= ALL_BUT * self.capacity_blocks:
            self.know(Knowledge.EXACT)

    def _remove(self, hashes: Sequence[int]) -> None:
        holders, bit, keys, copies = self._shelf.holders, self.bit, self._keys, self._copies
        for value in hashes:
            if value in copies:
                self._copied -= 1
                copies[value] -= 1
                if not copies[value]:
                    del copies[value]
                continue
            key = keys.pop(value, None)
            if key is None:
                continue
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def _empty(self) -> None:
        """Have nothing, by bearing another bit: taking each key off at once would take milliseconds."""
        if self._keys:
            self._shelf.retire(self.bit, self._keys)
            self._keys, self.bit = {}, self._shelf.bit()
            self._shelf.structured()
        self._copies = {}
        self._copied = 0
