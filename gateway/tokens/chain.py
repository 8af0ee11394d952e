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
            piece = text[part * step : (part + 1) * step].encode("utf-8", "surrogatepass")
            digest = hashlib.sha256(digest + piece).digest()[:8]  # processors have instructions for it
            here = self.tokens + tokens * (part + 1) // parts
            if here - last >= LEAST_TOKENS and len(entries) + len(grown) < MOST_ENTRIES:
                grown.append((int.from_bytes(digest, "little"), here))
                last = here
        return Chain(self.tokens + tokens, digest, entries + tuple(grown) if grown else entries)
