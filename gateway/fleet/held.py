"""Prompt beginnings that requests in flight hold together: vLLM keeps their blocks once, however many use them. Pure.

A prompt is a chain of links, ``(hash of everything up to here, tokens up to here)``. Whoever holds a link holds all
before it, so what two prompts share is the chain up to their last common link.
"""

from __future__ import annotations

Chain = tuple[tuple[int, int], ...]


class Held:
    """The links that requests of one engine hold. ``overlap_blocks`` are counted more than once if each request's
    footprint is taken for itself: they must be taken off the sum."""

    __slots__ = ("_links", "overlap_blocks", "size")

    def __init__(self, block_size_tokens: int = 1) -> None:
        self._links: dict[int, int] = {}  # link to the number of requests that hold it
        self.size = block_size_tokens
        self.overlap_blocks = 0

    def __repr__(self) -> str:
        return f"<Held {len(self._links)} links, {self.overlap_blocks} blocks shared>"

    def __len__(self) -> int:
        return len(self._links)

    def take(self, chain: Chain) -> None:
        """A request holds the prompt of ``chain`` from now on."""
        links, size, before = self._links, self.size, 0
        for link, tokens in chain:
            count = links.get(link, 0)
            if count:
                self.overlap_blocks += tokens // size - before // size
            links[link] = count + 1
            before = tokens

    def drop(self, chain: Chain) -> None:
        """A request that held the prompt of ``chain`` is over."""
        links, size, before = self._links, self.size, 0
        for link, tokens in chain:
            count = links[link] - 1
            if count:
                links[link] = count
                self.overlap_blocks -= tokens // size - before // size
            else:
                del links[link]
            before = tokens

    def shared_links(self, chain: Chain, guess: int = 0) -> int:
        """How many links at the beginning of ``chain`` somebody holds now. ``guess``: it may be as many as that, which
        is soon seen: many engines hold one and the same beginning."""
        links, length = self._links, len(chain)
        if not links or not chain or chain[0][0] not in links:
            return 0
        if guess and chain[guess - 1][0] in links and (guess == length or chain[guess][0] not in links):
            return guess
        low, high = 0, length - 1
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle][0] in links:
                low = middle
            else:
                high = middle - 1
        return low + 1

    def shared_tokens(self, chain: Chain) -> int:
        """Tokens at the beginning of ``chain`` that somebody holds now."""
        links = self.shared_links(chain)
        return chain[links - 1][1] if links else 0

    def resize(self, block_size_tokens: int, chains: list[Chain]) -> None:
        """Begin anew with another block size and the chains of all who are there."""
        self._links.clear()
        self.overlap_blocks = 0
        self.size = block_size_tokens
        for chain in chains:
            self.take(chain)
