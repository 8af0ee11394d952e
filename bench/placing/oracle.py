"""What a prefix cache could have held: bounds that a policy's cache hits are measured by.

``Boundless`` has seen every prompt and answer so far and forgets nothing: no fleet can do better. ``Pooled`` has the
fleet's whole KV memory as one cache that every backend can read, least recently used first out: what placing could
reach if each block were kept once and at the right place. It is no bound in the strict sense, since a policy may
happen to keep what is asked for next; in practice none comes near it under pressure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from bench.placing.traffic import BLOCK_TOKENS


class Boundless:
    """Every block that was ever seen."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def asked(self, hashes: Sequence[int]) -> int:
        """Leading tokens of a prompt that were seen before; all of it is from now on."""
        known = self._known
        fresh = next((place for place in range(len(hashes)) if hashes[place] not in known), len(hashes))
        known.update(hashes[fresh:])
        return fresh * BLOCK_TOKENS

    def said(self, hashes: Sequence[int], prompt_blocks: int) -> None:
        """A conversation's hashes with its answer, of which the first were asked before."""
        self._known.update(hashes[prompt_blocks:])


class Pooled:
    """As many blocks as the fleet has."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def asked(self, hashes: Sequence[int]) -> int:
        """Leading tokens of a prompt that are cached; all of it is from now on."""
        blocks = self._blocks
        found = next((place for place in range(len(hashes)) if hashes[place] not in blocks), len(hashes))
        self.said(hashes, 0)
        return found * BLOCK_TOKENS

    def said(self, hashes: Sequence[int], prompt_blocks: int) -> None:
        """Use what follows the first ``prompt_blocks``: its end first, so that it is the first to be forgotten."""
        blocks = self._blocks
        for value in reversed(hashes[prompt_blocks:]):
            blocks[value] = None
            blocks.move_to_end(value)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)
