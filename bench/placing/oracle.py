"""What a prefix cache could have held: bounds that a policy's cache hits are measured by.

``Boundless`` has seen every prompt and answer so far and forgets nothing: no fleet can do better. ``Pooled`` has the
fleet's whole KV memory as one cache that every backend can read, least recently used first out: what placing could
reach if each block were kept once and at the right place. It is no bound in the strict sense, since a policy may
happen to keep what is asked for next; in practice none comes near it under pressure.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.placing.lru import RecentBlocks
from bench.placing.traffic import BLOCK_TOKENS


class Boundless:
    """Every block that was ever seen."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def asked(self, hashes: Sequence[int]) -> int:
        """Leading tokens of a prompt that were seen before; all of it is from now on."""
        seen = list(map(self._known.__contains__, hashes))
        fresh = seen.index(False) if False in seen else len(seen)
        self._known.update(hashes[fresh:])
        return fresh * BLOCK_TOKENS

    def said(self, hashes: Sequence[int], prompt_blocks: int) -> None:
        """A conversation's hashes with its answer, of which the first were asked before."""
        self._known.update(hashes[prompt_blocks:])


class Pooled:
    """As many blocks as the fleet has."""

    def __init__(self, capacity_blocks: int) -> None:
        self._blocks = RecentBlocks(capacity_blocks)

    def asked(self, hashes: Sequence[int]) -> int:
        """Leading tokens of a prompt that are cached; all of it is from now on."""
        found = self._blocks.leading(hashes)
        self._blocks.use(hashes)
        return found * BLOCK_TOKENS

    def said(self, hashes: Sequence[int]) -> None:
        """A conversation's hashes with its answer: all of it was in use until now."""
        self._blocks.use(hashes)
