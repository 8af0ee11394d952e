"""One method decides over the whole queue: who is placed where now, who waits, who is refused. Pure.

Rules, in the order they are tried for each waiter, oldest first:

1. Its deadline has passed: refused, ``timeout``.
2. Every backend it may go to is down or draining: refused at once, ``no_backend``. A client that is told so in a
   millisecond tries again sooner than one that hangs, and the fleet's breaker needs several failures to call a backend
   down. A backend not looked at yet, or one that is being tried after a failure, is worth waiting for.
3. Its prompt is larger than the whole cache of every backend left: refused, ``too_large``.
4. Offers are tried in their order (``guard`` puts the smallest fitting window first); neighbours of equal window
   compete by cost. KV fits if ``reserved + need ≤ capacity × (1 − headroom)``, where need includes the expected
   output. So a larger window is used when the smaller ones are full, and a waiting request takes what frees first.
5. A backend with nothing running or waiting takes any request whose prompt its cache can hold (*drip*): no estimate
   can wedge the queue.
6. Else it waits, and keeps a claim on all its backends: nobody behind it takes KV there, so it cannot starve.
   Backends whose KV cache is unknown are never full; among them the one with the fewest requests in flight is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from gateway.config import PlacingSettings
from gateway.types import BackendView, Decision, Health, Need, Offer, Placed, Refused, Waiter

# Stand-ins until both are learned per backend. The rate only ranks backends of one window against each other.
PREFILL_TOKENS_PER_S = 8000.0
KV_PENALTY_S = 0.15
FULLEST = 0.999


def assign(
    queue: Sequence[Waiter], views: Mapping[str, BackendView], now_s: float, settings: PlacingSettings
) -> list[Decision]:
    """Decisions for ``queue`` (sorted by ``sequence``); who is not mentioned waits on.

    ``views`` are of one moment; what is placed here is added to them as it goes, so decisions never overlap. The cost
    is linear: O(1) a waiter behind a blocked one of the same backends, O(its backends) else.
    """
    rooms: dict[str, _Room] = {}
    fates: dict[frozenset[str], _Fate] = {}
    decisions: list[Decision] = []
    for waiter in queue:
        if waiter.deadline_s <= now_s:
            decisions.append(Refused(waiter.sequence, "timeout"))
            continue
        names = waiter.backends or frozenset(offer.backend for offer in waiter.offers) - waiter.excluded
        fate = fates.get(names)
        if fate is None:
            fate = fates[names] = _Fate([_room(name, views, rooms, settings) for name in names])
        if fate.blocked:
            continue
        decision = _decide(waiter, names, fate, rooms)
        if decision is not None:
            decisions.append(decision)
    return decisions


class _Room:
    """One backend while decisions are made: its view, and what was placed since."""

    __slots__ = ("capacity", "claimed", "closed", "in_flight", "limit", "pending_tokens", "reserved", "size", "view")

    def __init__(self, view: BackendView, settings: PlacingSettings) -> None:
        self.view = view
        self.claimed = False
        self.closed = False
        self.in_flight = view.in_flight
        self.pending_tokens = view.pending_prompt_tokens
        kv = view.kv
        self.size = kv.block_size_tokens if kv is not None else 0
        self.capacity = kv.capacity_blocks if kv is not None else 0
        self.reserved = kv.reserved_blocks if kv is not None else 0
        self.limit = self.capacity * (1.0 - settings.headroom_ratio)

    @property
    def gone(self) -> bool:
        """Nothing will be placed here until somebody acts."""
        return self.view.health is Health.DOWN or self.view.draining

    @property
    def open(self) -> bool:
        """Requests may be placed here now."""
        view = self.view
        return view.health is Health.UP and view.accepting and not (view.draining or self.claimed or self.closed)

    def serves(self, model: str, window_tokens: int) -> bool:
        """Whether the offer still stands: a backend may have come back with other models or a smaller window."""
        windows = self.view.windows
        most = windows.get(model, 0) if model else max(windows.values(), default=0)
        return most >= window_tokens

    def holds(self, need: Need) -> bool:
        """Whether an empty cache would hold the prompt: a sequence lives in one engine."""
        kv = self.view.kv
        return kv is None or -(-need.prompt_tokens // self.size) <= kv.engine_capacity_blocks

    def fits(self, need: Need) -> bool:
        """Whether prompt and expected output fit beside all that is reserved, or nothing at all is here."""
        if self.view.kv is None or self.reserved + need.blocks(self.size) <= self.limit:
            return True
        return self.in_flight == 0 and not self.view.running and not self.view.waiting

    def cost_s(self, need: Need) -> float:
        """Seconds until the prompt is prefilled, and a barrier that rises as the cache fills."""
        queued_s = (self.pending_tokens + need.prompt_tokens) / PREFILL_TOKENS_PER_S
        if not self.capacity:
            return queued_s
        k = min(FULLEST, (self.reserved + need.blocks(self.size)) / self.capacity)
        return queued_s + KV_PENALTY_S * k / (1.0 - k)

    def place(self, need: Need) -> None:
        """Count a request that was placed here. A recovering backend gets one to try it, and no second."""
        self.closed = self.view.trial
        self.in_flight += 1
        self.pending_tokens += need.prompt_tokens
        if self.size:
            self.reserved += need.blocks(self.size)


class _Fate:
    """What waiters of the same backends have in common."""

    __slots__ = ("_rooms", "blocked", "lost")

    def __init__(self, rooms: list[_Room]) -> None:
        self._rooms = rooms
        self.lost = all(room.gone for room in rooms)
        self.blocked = False

    def refresh(self) -> None:
        """See whether any of the backends is left to those who come later."""
        self.blocked = not any(room.open for room in self._rooms)


def _room(name: str, views: Mapping[str, BackendView], rooms: dict[str, _Room], settings: PlacingSettings) -> _Room:
    room = rooms.get(name)
    if room is None:
        view = views.get(name) or BackendView(name, "", Health.DOWN, {}, 0)
        room = rooms[name] = _Room(view, settings)
    return room


def _decide(waiter: Waiter, names: frozenset[str], fate: _Fate, rooms: dict[str, _Room]) -> Decision | None:
    """The decision for one waiter, ``None`` to wait. Places it in its room, or claims all it could use."""
    if fate.lost:
        return Refused(waiter.sequence, "no_backend")
    standing = [offer for offer in waiter.offers if offer.backend in names and not rooms[offer.backend].gone]
    standing = [offer for offer in standing if _stands(waiter, offer, rooms[offer.backend])]
    if not standing:
        return Refused(waiter.sequence, "no_backend")
    possible = [offer for offer in standing if rooms[offer.backend].holds(waiter.need[offer.backend])]
    if not possible:
        return Refused(waiter.sequence, "too_large")
    offer = _best(waiter, possible, rooms)
    if offer is not None:
        rooms[offer.backend].place(waiter.need[offer.backend])
        return Placed(waiter.sequence, offer)
    for offer in possible:
        rooms[offer.backend].claimed = True
    fate.refresh()
    return None


def _stands(waiter: Waiter, offer: Offer, room: _Room) -> bool:
    """Whether the offer is still good. One of a backend that nobody has looked at yet is taken on trust."""
    return room.view.health is Health.UNKNOWN or room.serves(waiter.model, offer.window_tokens)


def _best(waiter: Waiter, offers: Iterable[Offer], rooms: dict[str, _Room]) -> Offer | None:
    """The first group of equal windows with room, and the cheapest in it."""
    for group in _groups(offers):
        free = [offer for offer in group if rooms[offer.backend].open]
        free = [offer for offer in free if rooms[offer.backend].fits(waiter.need[offer.backend])]
        if not free:
            continue
        if len(free) == 1:
            return free[0]
        if any(rooms[offer.backend].view.kv is None for offer in free):
            return min(free, key=lambda offer: rooms[offer.backend].in_flight)
        return min(free, key=lambda offer: rooms[offer.backend].cost_s(waiter.need[offer.backend]))
    return None


def _groups(offers: Iterable[Offer]) -> Iterator[list[Offer]]:
    for _, group in groupby(offers, key=attrgetter("window_tokens")):
        yield list(group)
