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
    """One backend while decisions are made: its view, and what was placed since.

    ``gone``: nothing will be placed here until somebody acts. ``open``: requests may be placed here now. ``idle``:
    nothing runs or waits here. ``size``, ``capacity``, ``reserved`` and ``limit`` are 0 where ``known`` is false.
    """

    __slots__ = (
        "capacity", "engine_capacity", "gone", "idle", "in_flight", "known", "limit", "open", "pending_tokens",
        "reserved", "size", "trusted", "view", "window",
    )  # fmt: skip

    def __init__(self, view: BackendView, settings: PlacingSettings) -> None:
        self.view = view
        self.gone = view.health is Health.DOWN or view.draining
        self.open = view.health is Health.UP and view.accepting and not view.draining
        self.trusted = view.health is Health.UNKNOWN
        self.window = max(view.windows.values(), default=0)
        self.in_flight = view.in_flight
        self.idle = view.in_flight == 0 and not view.running and not view.waiting
        self.pending_tokens = view.pending_prompt_tokens
        kv = view.kv
        self.known = kv is not None
        self.size = kv.block_size_tokens if kv is not None else 0
        self.capacity = kv.capacity_blocks if kv is not None else 0
        self.engine_capacity = kv.engine_capacity_blocks if kv is not None else 0
        self.reserved = kv.reserved_blocks if kv is not None else 0
        self.limit = self.capacity * (1.0 - settings.headroom_ratio)

    def serves(self, model: str, window_tokens: int) -> bool:
        """Whether an offer still stands: a backend may have come back with other models or a smaller window.

        One that nobody has looked at yet is taken on trust.
        """
        most = self.view.windows.get(model, 0) if model else self.window
        return most >= window_tokens or self.trusted

    def holds(self, need: Need) -> bool:
        """Whether an empty cache would hold the prompt: a sequence lives in one engine."""
        return not self.known or -(-need.prompt_tokens // self.size) <= self.engine_capacity

    def cost_s(self, prompt_tokens: int, blocks: int) -> float:
        """Seconds until the prompt is prefilled, and a barrier that rises as the cache fills."""
        k = min(FULLEST, (self.reserved + blocks) / self.capacity)
        return (self.pending_tokens + prompt_tokens) / PREFILL_TOKENS_PER_S + KV_PENALTY_S * k / (1.0 - k)

    def place(self, need: Need) -> None:
        """Count a request that was placed here. A recovering backend gets one to try it, and no second."""
        self.idle = False
        self.open = not self.view.trial
        self.in_flight += 1
        self.pending_tokens += need.prompt_tokens
        if self.known:
            self.reserved += need.blocks(self.size)


class _Fate:
    """What waiters of the same backends have in common: none of those is left to them (``lost``) or to those behind
    somebody who waits (``blocked``)."""

    __slots__ = ("_rooms", "blocked", "lost")

    def __init__(self, rooms: list[_Room]) -> None:
        self._rooms = rooms
        self.lost = all(room.gone for room in rooms)
        self.blocked = False

    def refresh(self) -> None:
        """Look again, after backends were claimed."""
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
    standing = [pair for pair in _rooms_of(waiter, names, rooms) if pair[1].serves(waiter.model, pair[0].window_tokens)]
    if not standing:
        return Refused(waiter.sequence, "no_backend")
    need_of = waiter.need
    possible = [pair for pair in standing if pair[1].holds(need_of[pair[0].backend])]
    if not possible:
        return Refused(waiter.sequence, "too_large")
    offer = _best(waiter, possible)
    if offer is not None:
        rooms[offer.backend].place(need_of[offer.backend])
        return Placed(waiter.sequence, offer)
    for _, room in possible:
        room.open = False
    fate.refresh()
    return None


def _rooms_of(waiter: Waiter, names: frozenset[str], rooms: Mapping[str, _Room]) -> Iterator[tuple[Offer, _Room]]:
    """The offers in order, each with its backend, without those excluded or gone."""
    for offer in waiter.offers:
        name = offer.backend
        if name in names and not (room := rooms[name]).gone:
            yield offer, room


def _best(waiter: Waiter, pairs: Iterable[tuple[Offer, _Room]]) -> Offer | None:
    """The first offer of a window with room; among those of equal window that follow it, the cheapest.

    If the cache of one of these is unknown, costs cannot be compared and the fewest requests in flight decide.
    """
    cheapest = calmest = None
    least_s = least_in_flight = 0.0
    comparable = True
    last: Need | None = None
    size = blocks = 0
    for offer, room in pairs:
        if not room.open:
            continue
        if calmest is not None and offer.window_tokens != calmest.window_tokens:
            break
        if room.known:
            need = waiter.need[offer.backend]
            if need is not last or room.size != size:
                last, size = need, room.size
                blocks = need.blocks(size)
            if room.reserved + blocks > room.limit and not room.idle:
                continue
            cost_s = room.cost_s(need.prompt_tokens, blocks)
            if cheapest is None or cost_s < least_s:
                cheapest, least_s = offer, cost_s
        else:
            comparable = False
        if calmest is None or room.in_flight < least_in_flight:
            calmest, least_in_flight = offer, room.in_flight
    return cheapest if comparable else calmest
