"""Who is placed where now, who waits, who is refused. Pure: views and waiters in, decisions out; times are arguments.

The rules, for the requests in the order of the queue (``lanes``):

1. Its deadline has passed: refused, ``timeout``.
2. Every backend it may go to is down or draining: refused at once, ``no_backend``. A client that is told so in a
   millisecond tries again sooner than one that hangs, and the fleet's breaker needs several failures to call a backend
   down. A backend not looked at yet, or one that is being tried after a failure, is worth waiting for.
3. Its prompt is larger than the whole cache of every backend left: refused, ``too_large``.
4. KV fits if ``reserved + need ≤ capacity × (1 − headroom)``, where need includes the expected output. Of the backends
   where it fits the cheapest is taken. Cost is in seconds: until the prompt is prefilled, behind the prompts before it;
   a barrier that rises as the cache fills; and a price for a larger window than the smallest that is comfortable, so
   that large windows stay free for those who need them. Windows that are not comfortable come last, one by one.
5. A backend with nothing running or waiting takes any request whose prompt its cache can hold (*drip*): no estimate
   can wedge the queue.
6. If a backend that is full has more of its prompt than the one chosen, the request waits for that one for a while
   instead: to compute the prompt anew elsewhere would take longer, and push others' prompts out of the cache there.
7. Else it waits, and keeps a claim on all its backends: nobody behind it takes KV there, so it cannot starve.
   Backends whose KV cache is unknown are never full; among them the one with the fewest requests in flight is taken.

What was decided stays decided until something changes: the placer keeps who waits, and looks only at requests that are
first of their lane and at lanes whose backends have changed for the better. A decision costs the number of backends,
whatever the length of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf, log2

from gateway.config import PlacingSettings
from gateway.routing.blocks import BlockIndex
from gateway.routing.costs import SESSION_S, WINDOW_S, Bonds, Full, adapter_s, cheapest, home
from gateway.routing.entries import Entry, Option
from gateway.routing.lanes import Domain, Lane, Lanes
from gateway.routing.prefixes import Chain, PrefixIndex, thinned
from gateway.routing.rooms import PREFILL_S, Room
from gateway.types import BackendView, Decision, Group, LoadView, Placed, Refused, Waiter

# How often a request's own uncached tokens count while it is held back for shorter ones.
SHORT_FIRST = 32.0
MOST_LAYOUTS = 512
# Times noted for requests that have left are swept out when there are so many of them.
MOST_STALE = 256


class _Layout:
    """The rooms of one group of offers, as long as no backend changes its windows, its cache or its being there."""

    __slots__ = ("holds_tokens", "mask", "mixed", "rooms", "stands")

    def __init__(self, rooms: tuple[Room, ...]) -> None:
        self.stands = bool(rooms)
        self.rooms = rooms
        self.mask = _mask(rooms)
        self.mixed = not all(room.known for room in rooms)
        self.holds_tokens = min((room.holds_tokens for room in rooms), default=inf)


class Placer:
    """The queue and the rooms it waits for. ``see`` what changed, then ``add``, ``remove`` or ``decide``."""

    def __init__(self, settings: PlacingSettings) -> None:
        self._settings = settings
        self._rooms: dict[str, Room] = {}
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        self._entries: dict[int, Entry] = {}
        self._new: list[Entry] = []  # who waits and is in no lane yet
        self._lanes = Lanes()
        self._deadlines: list[tuple[float, int]] = []
        self._homes: list[tuple[float, int]] = []  # until when a request waits for one backend only
        self._handicaps: list[tuple[float, int]] = []  # until when it is held back for shorter ones
        self.prefixes = PrefixIndex()
        self.blocks = BlockIndex()
        self._caching = 0  # rooms that keep prefixes
        self._rates_seen = 0
        self._better = 0  # rooms that may hold what they could not
        self._closed = 0  # rooms that began to rest: nobody waits for one of them alone
        self._restructured = False

    def __repr__(self) -> str:
        return f"<Placer {len(self._entries)} waiting for {len(self._rooms)} backends>"

    def __len__(self) -> int:
        return len(self._entries)

    def see(self, views: Iterable[BackendView | LoadView]) -> None:
        """Take in how backends look now: those that changed, or all; of one that was seen its load may be enough.

        Placements made here are overwritten: the caller enters each into its ledger, which the next view tells of.
        """
        headroom_ratio = self._settings.headroom_ratio
        for view in views:
            if isinstance(view, LoadView):
                room = self._rooms[view.name]
                if room.load(view):
                    self._better |= room.bit
                continue
            room = self._rooms.get(view.name) or self._room(view.name)
            before = room.view
            if before.accepting and not view.accepting:
                self._closed |= room.bit
            changed, better = room.update(view, headroom_ratio)
            if changed or view.epoch != before.epoch or view.caches != before.caches:
                self._structured(room, before, changed)
            if better:
                self._better |= room.bit
            if view.output_s != before.output_s or view.prefill_s != before.prefill_s:
                self._rates_seen += 1
        if self._rates_seen > len(self._rooms) // 4:
            self._compare()

    def add(self, waiter: Waiter, now_s: float) -> list[Decision]:
        """A request arrives. The decisions that follow; if none is about it, it waits."""
        self.blocks.expire(now_s)
        entry = Entry(waiter)
        if not self._entries and not self._restructured and waiter.deadline_s > now_s:
            # Nobody waits: the way of almost every request.
            refusal = self._options(entry)
            if refusal is not None:
                return [refusal]
            chosen = self._look_around(entry, now_s)
            if chosen is not None and entry.lanes_mask == entry.mask:
                domain = self._lanes.domain(entry.mask)
                domain.book(entry)
                return [self._place(entry, *chosen, domain)]
            self._hold_back(entry, now_s)
            self._push(entry).dirty = False  # it was looked at just now
            return []
        if self._restructured:
            self.put([waiter])
            return self.decide(now_s)
        refusal = self._options(entry)
        if refusal is not None:
            return [refusal, *self.decide(now_s)]
        self._look_around(entry, now_s)
        self._hold_back(entry, now_s)
        self._push(entry)
        return self.decide(now_s)

    def remove(self, sequence: int) -> None:
        """A waiting request leaves. Its claim goes with it: ``decide`` afterwards."""
        entry = self._entries.pop(sequence, None)
        if entry is not None and entry.lane is not None and entry.lane.drop(entry):
            self._better |= entry.mask

    def put(self, waiters: Iterable[Waiter]) -> None:
        """Requests that wait from now on, to be looked at by the next ``decide``: many that arrive together, or some
        whose placing could not be carried out."""
        self._restructured = True
        for waiter in waiters:
            entry = self._entries[waiter.sequence] = Entry(waiter)
            self._new.append(entry)
            heapq.heappush(self._deadlines, (waiter.deadline_s, waiter.sequence))
        self._sweep()

    def decide(self, now_s: float) -> list[Decision]:
        """Decisions on all who wait; who is not mentioned waits on."""
        self.blocks.expire(now_s)
        decisions: list[Decision] = []
        if self._restructured:
            self._restructure(decisions, now_s)
        self._expire(now_s, decisions)
        self._release(now_s)
        if self._entries:
            for domain in self._lanes.domains():
                if not domain.idle:
                    self._serve(domain, decisions)
        self._better = 0
        return decisions

    def next_deadline_s(self) -> float | None:
        """When the next of those who wait will have waited long enough to be refused, or looked at otherwise."""
        firsts = []
        for ends in (self._deadlines, self._homes, self._handicaps):
            while ends and ends[0][1] not in self._entries:
                heapq.heappop(ends)
            firsts += ends[:1]
        return min(firsts)[0] if firsts else None

    def answered(self, name: str, output_tokens: int, matched_tokens: int, cached_tokens: int | None) -> None:
        """A request placed with ``matched_tokens`` was answered; ``cached_tokens`` as its answer tells."""
        bit = self._rooms[name].bit
        if output_tokens:
            self.prefixes.occupy(bit, output_tokens)
        if cached_tokens is not None:
            index = self.blocks if self.blocks.knows(bit) else self.prefixes
            index.check(bit, matched_tokens, cached_tokens)

    def counted(self, name: str, guessed_tokens: int, cached_tokens: int, answers: int) -> None:
        """What a backend's prefix-cache counters say of the prompts of ``answers``, where those do not tell it."""
        room = self._rooms.get(name)
        if room is not None and not self.blocks.knows(room.bit):
            self.prefixes.check_counters(room.bit, guessed_tokens, cached_tokens, answers)

    def unanswered(self, name: str, chain: Chain, model: str, matched_tokens: int) -> None:
        """It was never answered: its prompt is not in the cache there."""
        if chain:
            self.prefixes.forget(self._rooms[name].bit, thinned(chain, model), matched_tokens)

    def _room(self, name: str) -> Room:
        room = self._rooms[name] = Room(name, 1 << len(self._rooms))
        self.blocks.room(name, room.bit)
        self._restructured = True
        return room

    def _structured(self, room: Room, before: BackendView, changed: bool) -> None:
        """A backend is another one than before: its offers are looked at anew, and its cache is empty."""
        view = room.view
        self._restructured = self._restructured or changed
        self._caching = self._caching | room.bit if view.caches else self._caching & ~room.bit
        size = (0, 0) if before.kv is None else (before.kv.capacity_blocks, before.kv.block_size_tokens)
        if view.epoch != before.epoch or size != (room.capacity, room.size):
            self.prefixes.clear(room.bit, room.capacity * room.size * view.engines)
        if view.epoch != before.epoch:
            self.blocks.gone(room.bit)

    def _compare(self) -> None:
        """Price all backends beside each other, now that rates were learned."""
        self._rates_seen = 0
        views = [room.view for room in self._rooms.values()]
        prefill = [view.prefill_s for view in views if view.prefill_s is not None]
        output = [view.output_s for view in views if view.output_s is not None]
        mean_s = sum(prefill) / len(prefill) if prefill else PREFILL_S
        fastest_s = min(output, default=0.0)
        for room in self._rooms.values():
            room.compare(mean_s, fastest_s)

    def _match(self, entry: Entry) -> None:
        """Look up which backends have the prompt's beginning, if that may have changed."""
        state = self.prefixes.changes + self.blocks.changes
        if entry.matched_at == state:
            return
        entry.matched_at = state
        waiter, mask = entry.waiter, entry.mask & self._caching
        if entry.chain:
            entry.matched = self.prefixes.match(entry.chain, mask)
        elif waiter.session:
            bit, tokens = self.prefixes.last(waiter.session)
            entry.matched = {bit: min(tokens, waiter.groups[0].need.prompt_tokens)} if bit & mask else {}
        if waiter.blocks is not None:
            entry.matched = self.blocks.refine(entry.matched, waiter.blocks, mask)

    def _trusted(self, matched: dict[int, int]) -> dict[int, int]:
        """What was found of a prompt, as far as what is known of each backend's cache came true."""
        guessed, reported = self.prefixes.trusts, self.blocks.trusts
        if not (guessed or reported):
            return matched
        if self.blocks.silent and not reported:
            return {bit: int(tokens * guessed.get(bit, 1.0)) for bit, tokens in matched.items()}
        knows = self.blocks.knows
        return {
            bit: int(tokens * (reported if knows(bit) else guessed).get(bit, 1.0)) for bit, tokens in matched.items()
        }

    def _bonds(self, entry: Entry) -> Bonds | None:
        """What ties the request to some backends; ``None`` if nothing can."""
        waiter = entry.waiter
        if not (entry.chain or waiter.blocks or waiter.session or waiter.adapter):
            return None
        self._match(entry)
        matched = self._trusted(entry.matched)
        extra_s: dict[int, float] = {}
        if waiter.adapter:
            for option in entry.options:
                extra_s.update((room.bit, adapter_s(room, waiter.model)) for room in option.rooms)
        if waiter.session:
            bit = self.prefixes.last(waiter.session)[0]
            extra_s[bit] = extra_s.get(bit, 0.0) - SESSION_S
        return Bonds(matched, extra_s, entry.chain)

    def _choose(self, entry: Entry, claimed: int) -> tuple[Option, Room] | None:
        """The cheapest room with room for the request."""
        return cheapest(entry.options, claimed, self._bonds(entry))

    def _look_around(self, entry: Entry, now_s: float) -> tuple[Option, Room] | None:
        """The cheapest room with room for a request that arrives. It is to wait for another one alone, if that is worth
        it for a while."""
        bonds = self._bonds(entry)
        if bonds is None or not bonds.matched:
            return cheapest(entry.options, 0, bonds)
        full: Full = []
        chosen = cheapest(entry.options, 0, bonds, full)
        found = home(entry.options, chosen, bonds, full) if full else None
        if found is not None:
            entry.lanes_mask, patience_s = found
            heapq.heappush(self._homes, (now_s + patience_s, entry.waiter.sequence))
        return chosen

    def _hold_back(self, entry: Entry, now_s: float) -> None:
        """Let shorter requests go first for a while."""
        until_s = entry.waiter.arrived_s + self._settings.short_first_s
        if until_s > now_s:
            entry.handicap = SHORT_FIRST * entry.tokens
            heapq.heappush(self._handicaps, (until_s, entry.waiter.sequence))

    def _release(self, now_s: float) -> None:
        """Whoever has waited long enough for one backend, or waits for one that rests now, waits for all of its own,
        and whoever was held back long enough stands where its tag says."""
        closed, self._closed = self._closed, 0
        if closed:
            for _, sequence in self._homes:
                entry = self._entries.get(sequence)
                if entry is None or entry.lane is None or entry.lanes_mask == entry.mask:
                    continue
                if not entry.lanes_mask & ~closed:
                    self._move(entry, entry.mask, entry.aged)
        while self._homes and self._homes[0][0] <= now_s:
            entry = self._entries.get(heapq.heappop(self._homes)[1])
            if entry is not None and entry.lane is not None and entry.lanes_mask != entry.mask:
                self._move(entry, entry.mask, entry.aged)
        while self._handicaps and self._handicaps[0][0] <= now_s:
            entry = self._entries.get(heapq.heappop(self._handicaps)[1])
            if entry is not None and entry.lane is not None and entry.handicap:
                self._move(entry, entry.lanes_mask, True)

    def _move(self, entry: Entry, mask: int, aged: bool) -> None:
        """Take a waiting request from its place to another."""
        assert entry.lane is not None
        if entry.lane.drop(entry, served=True):
            self._better |= entry.lanes_mask
        entry.lanes_mask, entry.aged = mask, aged
        entry.handicap = 0.0 if aged else entry.handicap
        self._lanes.push(entry)

    def _push(self, entry: Entry) -> Lane:
        waiter = entry.waiter
        self._entries[waiter.sequence] = entry
        heapq.heappush(self._deadlines, (waiter.deadline_s, waiter.sequence))
        self._sweep()
        return self._lanes.push(entry)

    def _sweep(self) -> None:
        """Forget the times of requests that left long before them: a flood of those that hang up must not stay."""
        most = 2 * len(self._entries) + MOST_STALE
        for ends in (self._deadlines, self._homes, self._handicaps):
            if len(ends) > most:
                ends[:] = [end for end in ends if end[1] in self._entries]
                heapq.heapify(ends)

    def _expire(self, now_s: float, decisions: list[Decision]) -> None:
        """Refuse who has waited too long."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, sequence = heapq.heappop(self._deadlines)
            entry = self._entries.get(sequence)
            # One that waits again after a failure has another deadline than the first time.
            if entry is not None and entry.waiter.deadline_s <= now_s:
                self.remove(sequence)
                decisions.append(Refused(sequence, "timeout"))

    def _restructure(self, decisions: list[Decision], now_s: float) -> None:
        """Backends came, went or changed their windows: everybody's options are looked up anew."""
        self._restructured = False
        self._layouts.clear()
        new, self._new = self._new, []
        entries = [*self._lanes.clear(), *(entry for entry in new if entry.waiter.sequence in self._entries)]
        entries.sort(key=lambda entry: entry.waiter.sequence)
        for entry in entries:
            refusal = self._options(entry)
            if refusal is None:
                if entry.tag is None:
                    self._hold_back(entry, now_s)
                self._lanes.push(entry)
            else:
                del self._entries[entry.waiter.sequence]
                decisions.append(refusal)
        self._better = -1

    def _serve(self, domain: Domain, decisions: list[Decision]) -> None:
        """Place the first of each lane of a domain as long as there is room, in the order of the queue."""
        domain.settle()
        better, claimed = self._better, 0
        order = [(domain.turn(lane), index) for index, lane in enumerate(domain.lanes) if lane.waiting]
        if len(order) > 1:
            heapq.heapify(order)
        while order:
            turn, index = heapq.heappop(order)
            lane = domain.lanes[index]
            if turn != domain.turn(lane):  # the others are to be served now
                heapq.heappush(order, (domain.turn(lane), index))
                continue
            if not (lane.dirty or lane.mask & better):
                claimed |= lane.mask
                continue
            entry = lane.first()
            chosen = self._choose(entry, claimed | ~lane.mask) if lane.mask & ~claimed else None
            if chosen is None:
                claimed |= lane.mask
                lane.dirty = False
                continue
            lane.drop(entry, served=True)
            del self._entries[entry.waiter.sequence]
            decisions.append(self._place(entry, *chosen, domain))
            better |= lane.mask  # its claim is gone
            if lane.waiting:
                heapq.heappush(order, (domain.turn(lane), index))

    def _place(self, entry: Entry, option: Option, room: Room, domain: Domain) -> Placed:
        waiter = entry.waiter
        matched_tokens = 0
        if entry.matched:
            matched_tokens = entry.matched.get(room.bit, 0)
        room.place(option.need, matched_tokens)
        domain.serve(entry)
        if entry.chain:
            self.prefixes.add(room.bit, entry.chain)
        if waiter.blocks is not None:
            self.blocks.expect(room.bit, waiter.blocks, matched_tokens)
        if waiter.session:
            self.prefixes.went(waiter.session, room.bit, option.need.prompt_tokens)
        name = room.name
        offer = next(offer for offer in option.offers if offer.backend == name)
        return Placed(waiter.sequence, offer, option.need, entry.tag or 0.0, matched_tokens, entry.chain)

    def _options(self, entry: Entry) -> Refused | None:
        """Look up where the request may go, or say why it can go nowhere."""
        waiter = entry.waiter
        options: list[Option] = []
        stands = False
        mask = tier = 0
        first_tokens = last_tokens = 0
        for group in waiter.groups:
            window_tokens = group.window_tokens
            if not first_tokens:
                first_tokens = window_tokens
            elif window_tokens < last_tokens or tier:
                tier += 1
            last_tokens = window_tokens
            layout = self._layout(group, waiter)
            stands = stands or layout.stands
            if group.need.prompt_tokens > layout.holds_tokens:
                rooms = tuple(room for room in layout.rooms if group.need.prompt_tokens <= room.holds_tokens)
                layout = _Layout(rooms)
            if layout.mask:
                penalty_s = WINDOW_S * log2(window_tokens / first_tokens) if not tier and first_tokens else 0.0
                options.append(
                    Option(group.offers, group.need, layout.rooms, layout.mask, penalty_s, tier, layout.mixed)
                )
                mask |= layout.mask
        entry.options, entry.mask, entry.lanes_mask = tuple(options), mask, mask
        if mask:
            if entry.chain or waiter.blocks:
                entry.matched_at = -1
                self._match(entry)
                entry.tokens = max(1, waiter.groups[0].need.prompt_tokens - max(entry.matched.values(), default=0))
            return None
        return Refused(waiter.sequence, "too_large" if stands else "no_backend")

    def _layout(self, group: Group, waiter: Waiter) -> _Layout:
        """The rooms of a group that are there and still serve the model with that window."""
        names = tuple([offer.backend for offer in group.offers])
        window_tokens = group.window_tokens
        key = (waiter.model, window_tokens, names, waiter.excluded)
        layout = self._layouts.get(key)
        if layout is None:
            rooms = []
            for name in names:
                room = self._rooms.get(name)
                if room is None or room.gone or name in waiter.excluded:
                    continue
                if room.serves(waiter.model, window_tokens):
                    rooms.append(room)
            layout = _Layout(tuple(rooms))
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout


def _mask(rooms: Iterable[Room]) -> int:
    mask = 0
    for room in rooms:
        mask |= room.bit
    return mask
