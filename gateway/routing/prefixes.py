"""Which backend has which prompt prefixes in its cache, as far as can be told from what was sent there. Pure.

A prompt is a chain of ``(hash of everything up to here, tokens up to here)``. Each backend has an LRU of chain links,
bounded by the tokens its KV cache holds. A link is used before those it follows are: the oldest are the ends of old
chains, so what is left of a chain is always its beginning, as in vLLM's prefix cache (blocks are freed tail first).

An entry is a guess: it is made when a request is placed (its prompt will be there) and taken back when the request ends
without an answer. ``trust`` is how far the guesses for a backend came true, by the cached tokens its answers told.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from functools import lru_cache

Chain = tuple[tuple[int, int], ...]

# A link for less than this, or than so large a part of the prompt so far, is not worth its memory.
LEAST_LINK_TOKENS = 64
LINK_SHIFT = 5  # 1/32

# For a backend whose cache is unknown.
UNKNOWN_CAPACITY_TOKENS = 200_000

TRUST_WEIGHT = 0.1
LEAST_TRUST = 0.01  # never so low that nothing more is sent to find out
# Guesses for less than this say nothing about trust: whole blocks are cached, and the last token never is.
LEAST_CHECKED_TOKENS = 256

MOST_SESSIONS = 8192
# Links that no cache has any more are remembered, so many for each that one has, and no fewer than the least.
GONE_LINKS = 4
LEAST_GONE_LINKS = 16384


def thinned(chain: Chain, model: str) -> Chain:
    """The links of ``chain`` that are kept, salted with the model: each model has its own cache.

    Which are kept depends on nothing behind them, so a longer prompt keeps the same ones.
    """
    if not chain:
        return ()
    salt = _salt(model)
    kept: list[tuple[int, int]] = []
    next_tokens = LEAST_LINK_TOKENS
    for link, tokens in chain:
        if tokens >= next_tokens:
            kept.append((link ^ salt, tokens))
            step = tokens >> LINK_SHIFT
            next_tokens = tokens + (step if step > LEAST_LINK_TOKENS else LEAST_LINK_TOKENS)
    return tuple(kept)


class _Shelf:
    """What one backend has: links with the tokens each adds, least recently used first. ``loose`` are tokens of answers
    too short for a link each."""

    __slots__ = ("capacity_tokens", "links", "loose", "tokens")

    def __init__(self) -> None:
        self.links: OrderedDict[int, int] = OrderedDict()
        self.tokens = self.loose = 0
        self.capacity_tokens = UNKNOWN_CAPACITY_TOKENS


class PrefixIndex:
    """The shelves of all backends. Backends are bits of a mask."""

    def __init__(self) -> None:
        self._shelves: dict[int, _Shelf] = {}
        self._holders: dict[int, int] = {}  # mask of the backends that have a link
        self._gone: OrderedDict[int, None] = OrderedDict()  # links that nobody has any more, oldest first
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._answers = 0  # links of answers are negative, those of prompts are not
        self.changes = 0  # goes up whenever a look-up may find something else
        self.trusts: dict[int, float] = {}  # by bit, where it is not 1
        self.matched_tokens = 0
        self.confirmed_tokens = 0

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._holders)} links>"

    def match(self, chain: Chain, mask: int) -> dict[int, int]:
        """Tokens of ``chain`` that each backend of ``mask`` has, by bit."""
        found: dict[int, int] = {}
        if not chain:
            return found
        holders = self._holders
        left = holders.get(chain[0][0], 0) & mask
        for link, tokens in reversed(chain):
            if not left:
                break
            here = holders.get(link, 0) & left
            if here:
                left ^= here
                found.update(dict.fromkeys(bits_of(here), tokens))
        return found

    def seen(self, chain: Chain) -> int:
        """Tokens of ``chain`` that were placed somewhere before, whether a backend has them still or not."""
        holders, gone = self._holders, self._gone
        for link, tokens in reversed(chain):
            if link in holders or link in gone:
                return tokens
        return 0

    def add(self, bit: int, chain: Chain) -> None:
        """The prompt of ``chain`` will be in that backend's cache."""
        if not chain:
            return
        self.changes += 1
        shelf, holders = self._shelf(bit), self._holders
        links = shelf.links
        move_to_end = links.move_to_end
        place = len(chain)
        for link, tokens in reversed(chain):  # the first ends as the one most recently used
            place -= 1
            try:
                move_to_end(link)
            except KeyError:
                added = links[link] = tokens - (chain[place - 1][1] if place else 0)
                shelf.tokens += added
                holders[link] = holders.get(link, 0) | bit
        self._trim(bit, shelf)

    def forget(self, bit: int, chain: Chain, from_tokens: int) -> None:
        """A prompt was placed and never answered: what of it was not there before is not there now."""
        shelf = self._shelf(bit)
        for link, tokens in chain:
            if tokens > from_tokens and link in shelf.links:
                self._drop(bit, shelf, link, known=False)

    def occupy(self, bit: int, tokens: int) -> None:
        """So many tokens of answers went into that backend's cache, too."""
        shelf = self._shelf(bit)
        shelf.loose += tokens
        if (
            shelf.loose < LEAST_LINK_TOKENS
        ):  # a link for each token of short answers would take a hundred times its room
            return
        self._answers -= 1
        shelf.links[self._answers] = shelf.loose
        shelf.tokens += shelf.loose
        shelf.loose = 0
        self._trim(bit, shelf)

    def check(self, bit: int, guessed_tokens: int, cached_tokens: int) -> None:
        """An answer tells how much of its prompt was cached, where ``guessed_tokens`` (trust aside) were expected."""
        if guessed_tokens < LEAST_CHECKED_TOKENS:
            return
        self._confirm(bit, guessed_tokens, cached_tokens, TRUST_WEIGHT)

    def check_counters(self, bit: int, guessed_tokens: int, cached_tokens: int, answers: int) -> None:
        """The backend's counters tell how much of the prompts of several answers was cached, where ``guessed_tokens``
        were expected: as if each answer had told its part."""
        if guessed_tokens < LEAST_CHECKED_TOKENS:
            return
        self._confirm(bit, guessed_tokens, cached_tokens, 1.0 - (1.0 - TRUST_WEIGHT) ** answers)

    def trust(self, bit: int) -> float:
        """How far guesses for that backend came true, 0 to 1."""
        return self.trusts.get(bit, 1.0)

    def clear(self, bit: int, capacity_tokens: int | None) -> None:
        """The backend has a new, empty cache of that size; ``None``: not known."""
        shelf = self._shelf(bit)
        for link in list(shelf.links):
            self._drop(bit, shelf, link)
        shelf.loose = 0
        shelf.capacity_tokens = capacity_tokens or UNKNOWN_CAPACITY_TOKENS
        self.trusts.pop(bit, None)

    def went(self, session: str, bit: int, tokens: int) -> None:
        """A session's request of so many tokens was placed there."""
        if session:
            self.changes += 1
            self._sessions[session] = (bit, tokens)
            self._sessions.move_to_end(session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def last(self, session: str) -> tuple[int, int]:
        """The backend the session's last request was placed on, and its tokens; zeros if there is none."""
        return self._sessions.get(session, (0, 0)) if session else (0, 0)

    def tokens(self, bit: int) -> int:
        """Tokens on that backend's shelf."""
        return self._shelf(bit).tokens

    def _confirm(self, bit: int, guessed_tokens: int, cached_tokens: int, weight: float) -> None:
        self.matched_tokens += guessed_tokens
        self.confirmed_tokens += min(guessed_tokens, cached_tokens)
        trust = self.trust(bit)
        trust = max(LEAST_TRUST, trust + weight * (min(1.0, cached_tokens / guessed_tokens) - trust))
        if trust == 1.0:
            self.trusts.pop(bit, None)
        else:
            self.trusts[bit] = trust

    def _shelf(self, bit: int) -> _Shelf:
        shelf = self._shelves.get(bit)
        if shelf is None:
            shelf = self._shelves[bit] = _Shelf()
        return shelf

    def _trim(self, bit: int, shelf: _Shelf) -> None:
        while shelf.tokens > shelf.capacity_tokens and shelf.links:
            self._drop(bit, shelf, next(iter(shelf.links)))

    def _drop(self, bit: int, shelf: _Shelf, link: int, known: bool = True) -> None:
        self.changes += 1
        shelf.tokens -= shelf.links.pop(link)
        left = self._holders.get(link, 0) & ~bit
        if left:
            self._holders[link] = left
        else:
            self._holders.pop(link, None)
            if known and link >= 0:  # no answer's
                self._gone[link] = None
                self._gone.move_to_end(link)
                over = len(self._gone) - max(LEAST_GONE_LINKS, GONE_LINKS * len(self._holders))
                for _ in range(min(2, over)):  # two for one: it shrinks when caches do, and not at once
                    self._gone.popitem(last=False)


@lru_cache(maxsize=1024)
def bits_of(mask: int) -> tuple[int, ...]:
    """The bits of a mask, lowest first. Many prompts begin alike, on the same backends: the masks are few."""
    bits = []
    while mask:
        bit = mask & -mask
        mask ^= bit
        bits.append(bit)
    return tuple(bits)


@lru_cache(maxsize=1024)
def _salt(model: str) -> int:
    return int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "big") >> 1
