"""Which conversations were refused before: recognised by what stays fixed at their start. The clock is an argument."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass

# An agent that was refused comes back with a shorter conversation at once, or after a summary was written.
ADOPT_S = 300.0
# Others begin conversations with the same key and system prompt meanwhile, and an agent has several of its own. To take
# a few for refused ones costs each a refusal; to miss the one ends a session that bears but one.
MOST_ADOPTED = 4

# Claude Code's first system line changes with every request.
_CHANGING = re.compile(r"x-anthropic-billing-header[^\n\"]*")


@dataclass(frozen=True, slots=True)
class Identity:
    """``scope``: who speaks with what (key, model, system prompt). ``start``: a conversation within it."""

    scope: bytes
    start: bytes


def identity(*, key: str, model: str, session: str, system: str, first_user: str) -> Identity:
    """The identity of a conversation. ``session``: what the client calls it (OpenCode's ``X-Session-Id``), if it does;
    otherwise its first user message stands for it. Users without a key whose conversations begin alike share one: then
    the second is trimmed where it would have been refused once. Only hashes are kept.
    """
    scope = _hash(key, model, _CHANGING.sub("", system))
    return Identity(scope, _hash(key, model, "session", session) if session else _hash(scope.hex(), first_user))


class Conversations:
    """Conversations that were refused, at most ``most`` of them, each for ``expires_s`` after its last overflow.

    An agent that compacts may change the first user message. So the next conversations that fit and come from the same
    scope within ``ADOPT_S``, ``MOST_ADOPTED`` at most, are taken for what became of the refused one.
    """

    def __init__(self, most: int, expires_s: float) -> None:
        self._most = most
        self._expires_s = expires_s
        self._refused: OrderedDict[bytes, float] = OrderedDict()
        self._awaited: OrderedDict[bytes, tuple[float, int]] = OrderedDict()  # when refused, and how many to adopt

    def __len__(self) -> int:
        return len(self._refused)

    def overflowed(self, who: Identity, now_s: float) -> bool:
        """Whether an overflow of this conversation was refused before. If not, it is taken to be refused now."""
        before = self._refused.get(who.start)
        self._remember(who.start, now_s)
        if before is not None and now_s - before <= self._expires_s:
            return True
        self._awaited[who.scope] = now_s, MOST_ADOPTED
        self._awaited.move_to_end(who.scope)
        while len(self._awaited) > self._most:
            self._awaited.popitem(last=False)
        return False

    def fitted(self, who: Identity, now_s: float) -> None:
        """Note a request that fits: it may be a refused conversation under a new start."""
        if who.start in self._refused:  # it asks for a summary, say; what becomes of it is still to come
            return
        refused_s, adoptions = self._awaited.get(who.scope, (0.0, 0))
        fresh = adoptions > 0 and now_s - refused_s <= ADOPT_S
        if fresh:
            self._remember(who.start, now_s)
        if fresh and adoptions > 1:
            self._awaited[who.scope] = refused_s, adoptions - 1  # keeps its place in the order of time
        else:
            self._awaited.pop(who.scope, None)

    def awaits(self, now_s: float) -> bool:
        """Whether ``fitted`` would tell anything: a refused conversation may still come back."""
        while self._awaited:
            scope, (refused_s, _) = next(iter(self._awaited.items()))
            if now_s - refused_s <= ADOPT_S:
                return True
            del self._awaited[scope]
        return False

    def _remember(self, start: bytes, now_s: float) -> None:
        self._refused[start] = now_s
        self._refused.move_to_end(start)
        while self._refused and len(self._refused) > self._most:
            self._refused.popitem(last=False)
        while self._refused:
            oldest, seen_s = next(iter(self._refused.items()))
            if now_s - seen_s <= self._expires_s:
                return
            del self._refused[oldest]


def _hash(*parts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()
