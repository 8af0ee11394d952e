"""A request as the queue holds it: whom it may go to, in groups of rooms whose cost is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.routing.prefixes import thinned
from gateway.routing.rooms import Room
from gateway.types import Need, Offer, Waiter


class Place(Protocol):
    """Where an entry waits: a lane of the queue. ``kept_out``: its first would fit, but must leave room to others."""

    kept_out: bool

    def drop(self, entry: Entry, served: bool = False) -> bool:
        """Take it out. Returns whether it was the first."""

    def sort(self) -> None:
        """Order anew, after tags have changed."""


@dataclass(slots=True)
class Option:
    """Backends of one window: what the request needs there. ``places``: where in ``offers`` theirs are, by their bits.

    ``penalty_s`` is the price of taking that window; ``mixed``: of some the cache is unknown, so that costs cannot be
    compared. Only if no option of a lower ``tier`` has room is one of a higher looked at. Not to be changed: it is not
    frozen since one is made for each request.
    """

    offers: tuple[Offer, ...]
    places: Mapping[int, int]
    need: Need
    rooms: tuple[Room, ...]
    mask: int
    penalty_s: float
    tier: int
    mixed: bool


class Entry:
    """A waiter and its options. ``mask``: all their rooms. ``tokens`` are what its flow is charged.

    ``matched`` are tokens of its prompt by bit of the backend that has them, as of ``matched_at``, a state of the
    index. ``lanes_mask`` are the backends it waits for now. ``tag``, ``floor`` (the least its tag can be) and ``lane``
    belong to ``lanes``. ``handicap``: tokens it stands behind its tag, until it is ``aged``. ``seen_tokens`` of its
    prompt were seen before; ``None`` if nobody can tell.
    """

    __slots__ = (
        "aged", "chain", "floor", "flow", "handicap", "lane", "lanes_mask", "mask", "matched", "matched_at", "options",
        "seen_tokens", "tag", "tokens", "waiter",
    )  # fmt: skip

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.chain = thinned(waiter.chain, waiter.model)
        self.matched: dict[int, int] = {}
        self.matched_at = -1
        self.options: tuple[Option, ...] = ()
        self.mask = self.lanes_mask = 0
        self.tokens = max(1, waiter.groups[0].need.prompt_tokens) if waiter.groups else 1
        self.flow = (waiter.rank, waiter.flow)
        self.tag: float | None = waiter.tag
        self.floor = self.handicap = 0.0
        self.aged = False
        self.seen_tokens: int | None = None
        self.lane: Place | None = None

    def __lt__(self, other: Entry) -> bool:
        """Of one request that waits again and its former self, which a heap still holds, neither comes first."""
        return False

    def __repr__(self) -> str:
        return f"<Entry {self.waiter.sequence} of {self.waiter.flow!r}>"

    @property
    def key(self) -> tuple[int, float, int]:
        """Its place: class, tag, arrival."""
        return (self.waiter.rank, (self.tag or 0.0) + self.handicap, self.waiter.sequence)
