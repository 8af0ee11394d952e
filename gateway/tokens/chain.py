"""Hashes of a prompt's beginnings: equal beginnings have equal hashes, in every process and on every replica.

Routing compares them to send a request where most of its prompt is cached already. Not keyed: who can send requests can
make two prompts collide only by breaking SHA-256 cut to 64 bits, and would gain a worse placement.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# An entry at least so many tokens after the one before, and a text of more than so many tokens is divided.
LEAST_TOKENS = 256
MOST_TOKENS = 1024
# Of a text of which no parts are known.
_PIECE_CHARS = 2048
# As many as a million tokens have at their least distance.
MOST_ENTRIES = 4096

Entry = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Chain:
    """The chain up to a place in a prompt: ``tokens`` so far, a running hash, and the entries set so far."""

    tokens: int = 0
    digest: bytes = bytes(8)
    entries: tuple[Entry, ...] = ()

    def then(self, text: str, tokens: int) -> Chain:
        """The chain after ``text``, of ``tokens`` tokens. Within a long text, where tokens are is guessed by length."""
        parts = max(1, -(-tokens // MOST_TOKENS))
        step = -(-len(text) // parts)
        digest, entries = self.digest, self.entries
        last = entries[-1][1] if entries else 0
        grown: list[Entry] = []
        for part in range(parts):
            digest = _hashed(digest, text[part * step : (part + 1) * step])
            here = self.tokens + tokens * (part + 1) // parts
            if here - last >= LEAST_TOKENS and len(entries) + len(grown) < MOST_ENTRIES:
                grown.append((int.from_bytes(digest, "little"), here))
                last = here
        return Chain(self.tokens + tokens, digest, entries + tuple(grown) if grown else entries)


def entries_of_whole(text: str, tokens: int) -> tuple[Entry, ...]:
    """The entries of a text of which no parts are known, ``tokens`` long.

    It is cut every so many characters, so that one that goes on has the same hashes; where tokens are is guessed.
    """
    digest = bytes(8)
    entries: list[Entry] = []
    last = 0
    for start in range(0, len(text), _PIECE_CHARS):
        digest = _hashed(digest, text[start : start + _PIECE_CHARS])
        here = tokens * min(len(text), start + _PIECE_CHARS) // len(text)
        if here - last >= LEAST_TOKENS and len(entries) < MOST_ENTRIES:
            entries.append((int.from_bytes(digest, "little"), here))
            last = here
    return tuple(entries)


def _hashed(digest: bytes, piece: str) -> bytes:
    # Processors have instructions for SHA-256.
    return hashlib.sha256(digest + piece.encode("utf-8", "surrogatepass")).digest()[:8]
