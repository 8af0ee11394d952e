"""The pool of KV blocks: allocation, sharing by content, eviction of idle cached blocks, least recently used first.

Follows vLLM's ``v1/core/block_pool.py``: block 0 is the null block and never usable; a block nobody refers to is free
even while its content is still findable, and is only forgotten when it is handed out again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = 0
ROOT_HASH = 0x5EED


def block_hashes(tokens: Sequence[int], block_size_tokens: int, known: list[int], extra: object = None) -> list[int]:
    """Extend ``known``, the chained hashes of the leading full blocks of ``tokens``, in place and return it.

    Each hash covers everything before it. ``extra`` (a LoRA name or a cache salt) sets apart prompts that must not
    share blocks although their tokens are equal.
    """
    parent = known[-1] if known else (ROOT_HASH if extra is None else hash((ROOT_HASH, extra)))
    for start in range(len(known) * block_size_tokens, len(tokens) - block_size_tokens + 1, block_size_tokens):
        parent = hash((parent, *tokens[start : start + block_size_tokens]))
        known.append(parent)
    return known


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that became findable, by their hashes: ``tokens`` are theirs, ``parent`` the hash of the block before."""

    values: Sequence[int]
    parent: int | None
    tokens: Sequence[int]
    cache_key: object = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block that is no longer findable by its hash."""

    value: int


@dataclass(frozen=True, slots=True)
class BlockCleared:
    """No block is findable."""


class BlockPool:
    """``num_blocks`` blocks, the null block included, so ``num_blocks - 1`` can hold anything.

    ``unfindable_first``: freed blocks that no hash leads to are handed out before all others (vLLM 0.28 on).
    ``journal``: what became findable and what no longer is, where it is a list; whoever reads it empties it.
    """

    def __init__(self, num_blocks: int, *, caching: bool = True, unfindable_first: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs at least two blocks: the null block and one to use")
        self.num_blocks = num_blocks
        self.caching = caching
        self._unfindable_first = unfindable_first
        self.journal: list[BlockStored | BlockRemoved | BlockCleared] | None = None
        self._references = [0] * num_blocks
        self._hash_of: dict[int, int] = {}
        self._first_of: dict[int, int] = {}  # the block that is found by a hash ...
        self._more_of: dict[int, dict[int, None]] = {}  # ... and others of the same content, in order
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    def __repr__(self) -> str:
        return f"<BlockPool {self.used_blocks}/{self.num_blocks - 1} used, {self.cached_blocks} cached>"

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated, idle cached ones included."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks somebody refers to."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Blocks whose content can be found by hash, in use or idle."""
        return len(self._hash_of)

    def find(self, hashes: Iterable[int]) -> list[int]:
        """The blocks that hold the longest cached prefix of ``hashes``. Takes no reference."""
        found = list(map(self._first_of.get, hashes))  # one pass in C: prompts have thousands of blocks
        return found[: found.index(None)] if None in found else found  # type: ignore[return-value]

    def doubled(self, hashes: Iterable[int]) -> bool:
        """Whether any of ``hashes`` is the content of more than one block."""
        return not self._more_of.keys().isdisjoint(hashes)

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are free now, so that touching them takes them out of the free blocks."""
        return [self._references[block] for block in blocks].count(0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Take a reference on cached blocks."""
        references, free = self._references, self._free
        for block in blocks:
            count = references[block]
            if not count:
                del free[block]
            references[block] = count + 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; their old content is forgotten. ``ValueError`` if too many."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        pop, hash_of, references = self._free.popitem, self._hash_of, self._references
        taken = [pop(last=False)[0] for _ in range(count)]
        for block in taken:
            references[block] = 1
            if block in hash_of:
                value = hash_of.pop(block)
                self._forget(block, value)
                if self.journal is not None:
                    self.journal.append(BlockRemoved(value))
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back, tail first, so the blocks of a shared prefix are the last to be evicted."""
        references, free = self._references, self._free
        for block in reversed(blocks):
            count = references[block] - 1
            if count < 0:
                raise ValueError(f"block {block} is released more often than taken")
            references[block] = count
            if not count:
                free[block] = None
                if self._unfindable_first and block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def remember(self, block: int, value: int) -> None:
        """Make a full block findable by its hash."""
        self.remember_all((block,), (value,))

    def remember_all(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """``remember`` each of the blocks."""
        if not self.caching:
            return
        hash_of, first_of = self._hash_of, self._first_of
        for block, value in zip(blocks, hashes, strict=True):
            if block in hash_of:
                continue
            hash_of[block] = value
            if first_of.setdefault(value, block) != block:
                self._more_of.setdefault(value, {})[block] = None

    def forget_all(self) -> bool:
        """Empty the prefix cache (``/reset_prefix_cache``); refused while blocks are in use."""
        if self.used_blocks:
            return False
        self._hash_of.clear()
        self._first_of.clear()
        self._more_of.clear()
        if self.journal is not None:
            self.journal.append(BlockCleared())
        return True

    def _forget(self, block: int, value: int) -> None:
        if value not in self._more_of:
            del self._first_of[value]
            return
        more = self._more_of[value]
        if block in more:
            del more[block]
        else:
            self._first_of[value] = next(iter(more))
            del more[self._first_of[value]]
        if not more:
            del self._more_of[value]
