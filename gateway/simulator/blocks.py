"""The pool of KV blocks: allocation, sharing by content, eviction of idle cached blocks, least recently used first.

Follows vLLM's ``v1/core/block_pool.py``: block 0 is the null block and never usable; a block nobody refers to is free
even while its content is still findable, and is only forgotten when it is handed out again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

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


class BlockPool:
    """``num_blocks`` blocks, the null block included, so ``num_blocks - 1`` can hold anything."""

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs at least two blocks: the null block and one to use")
        self.num_blocks = num_blocks
        self.caching = caching
        self._references = [0] * num_blocks
        self._hash_of: dict[int, int] = {}
        self._blocks_of: dict[int, dict[int, None]] = {}
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
        found: list[int] = []
        for value in hashes:
            holders = self._blocks_of.get(value)
            if not holders:
                break
            found.append(next(iter(holders)))
        return found

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are free now, so that touching them takes them out of the free blocks."""
        return sum(1 for block in blocks if not self._references[block])

    def touch(self, blocks: Iterable[int]) -> None:
        """Take a reference on cached blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; their old content is forgotten. ``ValueError`` if too many."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._references[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back, tail first, so the blocks of a shared prefix are the last to be evicted."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than taken")
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None

    def remember(self, block: int, value: int) -> None:
        """Make a full block findable by its hash."""
        if self.caching and block not in self._hash_of:
            self._hash_of[block] = value
            self._blocks_of.setdefault(value, {})[block] = None

    def forget_all(self) -> bool:
        """Empty the prefix cache (``/reset_prefix_cache``); refused while blocks are in use."""
        if self.used_blocks:
            return False
        self._hash_of.clear()
        self._blocks_of.clear()
        return True

    def _forget(self, block: int) -> None:
        value = self._hash_of.pop(block, None)
        if value is None:
            return
        holders = self._blocks_of[value]
        del holders[block]
        if not holders:
            del self._blocks_of[value]
