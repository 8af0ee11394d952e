"""Who is placed where now, who waits, who is refused. Pure: views and waiters in, decisions out; times are arguments.

The rules, for the requests in the order of the queue (``lanes``):

1. Its deadline has passed: refused, ``timeout``, or ``kept_out`` if it waited for what is kept (8).
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
8. If it would fit, but others are about to return to what they left there (``keeping``), it waits, too, and only who
   brings a prompt that is not cached waits behind it.

What was decided stays decided until something changes: the placer keeps who waits, and looks only at requests that are
first of their lane and at lanes whose backends have changed for the better. A decision costs the number of backends,
whatever the length of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from gateway.config import PlacingSettings
from gateway.routing.caches import Caches
from gateway.routing.costs import Bonds, Full, cheapest, home
from gateway.routing.entries import Entry, Option
from gateway.routing.keeping import LOOK_AGAIN_S, Keeper, kept_blocks
from gateway.routing.lanes import Domain, Lane, Lanes
from gateway.routing.layouts import Layouts
from gateway.routing.prefixes import Chain
from gateway.routing.rooms import Room, compare
from gateway.routing.times import Times
from gateway.types import BackendView, Decision, LoadView, Placed, Refused, Waiter


class Placer:
    """The queue and the rooms it waits for. ``see`` what changed, then ``add``, ``remove`` or ``decide``."""

    def __init__(self, settings: PlacingSettings) -> None:
        self._settings = settings
        self._rooms: dict[str, Room] = {}
        self._entries: dict[int, Entry] = {}
        self._layouts = Layouts(self._rooms)
        self._times = Times(self._entries)
        self._new: list[Entry] = []  # who waits and is in no lane yet
        self._lanes = Lanes()
        self._keeper = Keeper()
        self.caches = Caches()
        self.prefixes, self.blocks = self.caches.prefixes, self.caches.blocks
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
            if view.epoch != before.epoch:
                room.returns.clear()
            if changed or view.epoch != before.epoch or view.caches != before.caches:
                self._restructured = self._restructured or changed
                self.caches.changed(room, before)
            if better:
                self._better |= room.bit
            if view.output_s != before.output_s or view.prefill_s != before.prefill_s or view.first_s != before.first_s:
                self._rates_seen += 1
        if self._rates_seen > len(self._rooms) // 4:
            self._rates_seen = 0
            compare(self._rooms.values())

    def add(self, waiter: Waiter, now_s: float) -> list[Decision]:
        """A request arrives. The decisions that follow; if none is about it, it waits."""
        self._turn_to(now_s)
        if self._restructured:
            self.put([waiter])
            return self.decide(now_s)
        entry = Entry(waiter)
        nobody_waits = not self._entries and waiter.deadline_s > now_s  # the way of almost every request
        refusal = self._options(entry)
        if refusal is not None:
            return [refusal] if nobody_waits else [refusal, *self.decide(now_s)]
        bonds = self.caches.bonds(entry)
        self._keeper.closed, self._keeper.off = 0, False
        if nobody_waits:
            chosen = self._look_around(entry, bonds, now_s)
            if chosen is not None and entry.lanes_mask == entry.mask:
                domain = self._lanes.domain(entry.mask)
                domain.book(entry)
                return [self._place(entry, *chosen, domain)]
            self._hold_back(entry, now_s)
            lane = self._push(entry)
            if self._keeper.stopped and lane.domain.is_due(lane):
                return self.decide(now_s)  # nothing is kept from it
            lane.dirty = False  # it was looked at just now
            self._note_stop(lane)
            return []
        if bonds is not None and bonds.matched:
            self._look_around(entry, bonds, now_s)
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
            self._times.waits(entry)

    def decide(self, now_s: float) -> list[Decision]:
        """Decisions on all who wait; who is not mentioned waits on."""
        self._turn_to(now_s)
        decisions: list[Decision] = []
        if self._restructured:
            self._restructure(decisions, now_s)
        if self._closed or self._times.come(now_s):
            self._expire(now_s, decisions)
            self._release(now_s)
        if self._entries:
            again = self._times.again(now_s)
            for domain in self._lanes.domains():
                if not domain.idle:
                    self._serve(domain, decisions, again)
        self._better = 0
        return decisions

    def next_deadline_s(self) -> float | None:
        """When the next of those who wait will have waited long enough to be refused, or looked at otherwise."""
        return self._times.next_s()

    def answered(self, name: str, output_tokens: int, matched_tokens: int, cached_tokens: int | None) -> None:
        """A request placed with ``matched_tokens`` was answered; ``cached_tokens`` as its answer tells."""
        self.caches.answered(self._rooms[name].bit, output_tokens, matched_tokens, cached_tokens)

    def counted(self, name: str, guessed_tokens: int, cached_tokens: int, answers: int) -> None:
        """What a backend's prefix-cache counters say of the prompts of ``answers``, where those do not tell it."""
        room = self._rooms.get(name)
        if room is not None:
            self.caches.counted(room.bit, guessed_tokens, cached_tokens, answers)

    def left(self, name: str, tokens: int, now_s: float) -> None:
        """A request is over; it leaves so many tokens in the cache there that no other one in flight holds."""
        room = self._rooms[name]
        room.returns.left(tokens, now_s, room.capacity * room.size if room.known else None)

    def kept_blocks(self, now_s: float) -> dict[str, float]:
        """Blocks that each backend keeps now from a prompt of which nothing is cached, where its cache is known."""
        return {room.name: kept_blocks(room, now_s) for room in self._rooms.values() if room.known}

    def kept_out(self) -> int:
        """How many wait first of those for the same backends, and would fit, but must leave room to others."""
        return sum(lane.kept_out for domain in self._lanes.domains() for lane in domain.lanes)

    def unanswered(self, name: str, chain: Chain, model: str, matched_tokens: int) -> None:
        """It was never answered: its prompt is not in the cache there."""
        self.caches.unanswered(self._rooms[name].bit, chain, model, matched_tokens)

    def _room(self, name: str) -> Room:
        room = self._rooms[name] = Room(name, 1 << len(self._rooms), self._settings.keep_ratio)
        self.blocks.room(name, room.bit)
        self._restructured = True
        return room

    def _look_around(self, entry: Entry, bonds: Bonds | None, now_s: float) -> tuple[Option, Room] | None:
        """The cheapest room with room for a request that arrives. It is to wait for another one alone, if that is worth
        it for a while."""
        if bonds is None or not bonds.matched:
            return cheapest(entry.options, 0, self._keeper, bonds)
        full: Full = []
        chosen = cheapest(entry.options, 0, self._keeper, bonds, full)
        found = home(entry.options, chosen, bonds, full) if full else None
        if found is not None:
            entry.lanes_mask, patience_s = found
            self._times.waits_for_one(entry, now_s + patience_s)
        return chosen

    def _turn_to(self, now_s: float) -> None:
        self._keeper.now_s = now_s
        self.blocks.expire(now_s)

    def _note_stop(self, lane: Lane) -> bool:
        """The first of a lane was looked at and not placed. Was it kept out of a room it would fit into?"""
        lane.kept_out = bool(self._keeper.stopped & lane.mask)
        if lane.kept_out:
            self._times.look_again(self._keeper.now_s + LOOK_AGAIN_S)
        return lane.kept_out

    def _hold_back(self, entry: Entry, now_s: float) -> None:
        """Let shorter requests go first for a while, unless it was let in before, by a backend that failed."""
        until_s = entry.waiter.arrived_s + self._settings.short_first_s
        if until_s > now_s and entry.waiter.tag is None:
            self._times.hold_back(entry, until_s)

    def _release(self, now_s: float) -> None:
        """Whoever has waited long enough for one backend, or waits for one that rests now, waits for all of its own,
        and whoever was held back long enough stands where its tag says."""
        closed, self._closed = self._closed, 0
        for entry in self._times.released(now_s, closed):
            self._move(entry, entry.mask, entry.aged)
        for entry in self._times.aged(now_s):
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
        self._entries[entry.waiter.sequence] = entry
        self._times.waits(entry)
        return self._lanes.push(entry)

    def _expire(self, now_s: float, decisions: list[Decision]) -> None:
        """Refuse who has waited too long."""
        for entry in self._times.overdue(now_s):
            kept_out = entry.lane is not None and entry.lane.kept_out
            self.remove(entry.waiter.sequence)
            decisions.append(Refused(entry.waiter.sequence, "kept_out" if kept_out else "timeout"))

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

    def _serve(self, domain: Domain, decisions: list[Decision], again: bool) -> None:
        """Place the first of each lane of a domain as long as there is room, in the order of the queue. ``again``: time
        alone may have changed what is kept."""
        domain.settle()
        better, claimed, keeper, rank = self._better, 0, self._keeper, -1
        keeper.closed = 0
        order = [(domain.turn(lane), index) for index, lane in enumerate(domain.lanes) if lane.waiting]
        if len(order) > 1:
            heapq.heapify(order)
        while order:
            turn, index = heapq.heappop(order)
            lane = domain.lanes[index]
            if turn != domain.turn(lane):  # the others are to be served now
                heapq.heappush(order, (domain.turn(lane), index))
                continue
            if turn[0] != rank:  # another class: it passes nobody of those before
                rank, claimed = turn[0], claimed | keeper.closed
            due = lane.kept_out and domain.is_due(lane)
            if not (lane.dirty or lane.mask & better or due or (lane.kept_out and again)):
                if lane.kept_out:
                    keeper.closed |= lane.mask
                else:
                    claimed |= lane.mask
                continue
            entry = lane.first()
            keeper.stopped, keeper.off = 0, domain.is_due(lane)
            chosen = (
                cheapest(entry.options, claimed | ~lane.mask, keeper, self.caches.bonds(entry))
                if lane.mask & ~claimed
                else None
            )
            if chosen is None:
                lane.dirty = False
                claimed_all = not lane.kept_out
                if self._note_stop(lane):
                    keeper.closed |= lane.mask
                    if claimed_all:
                        better |= lane.mask  # who was held up by its claim may be let in now
                else:
                    claimed |= lane.mask
                continue
            lane.drop(entry, served=True)
            del self._entries[entry.waiter.sequence]
            decisions.append(self._place(entry, *chosen, domain))
            better |= lane.mask  # its claim is gone
            if lane.waiting:
                heapq.heappush(order, (domain.turn(lane), index))

    def _place(self, entry: Entry, option: Option, room: Room, domain: Domain) -> Placed:
        need = option.need
        matched_tokens = entry.matched.get(room.bit, 0) if entry.matched else 0
        shared_tokens = self._return(entry, room, need.prompt_tokens, matched_tokens)
        self._keeper.charge(room, need.prompt_tokens - matched_tokens)
        room.place(need, matched_tokens)
        domain.serve(entry)
        self.caches.placed(entry, room, need.prompt_tokens, matched_tokens)
        offer = option.offers[option.places[room.bit]]
        own_tokens = max(0, need.prompt_tokens - shared_tokens)
        return Placed(entry.waiter.sequence, offer, need, entry.tag or 0.0, matched_tokens, entry.chain, own_tokens)

    def _return(self, entry: Entry, room: Room, prompt_tokens: int, matched_tokens: int) -> int:
        """Somebody is placed in a room: perhaps it is one that was expected back there. Tokens that others hold."""
        shared_tokens = 0 if room.held is None else room.held.shared_tokens(entry.chain)
        returns = room.returns
        if matched_tokens > shared_tokens:
            returns.taken_up(matched_tokens - shared_tokens, self._keeper.now_s)
        first = entry.waiter.tag is None and not entry.waiter.excluded  # another attempt tells nothing of who returns
        if first and entry.seen_tokens is not None:
            returns.asked(prompt_tokens, entry.seen_tokens)
        return shared_tokens

    def _options(self, entry: Entry) -> Refused | None:
        """Look up where the request may go, or say why it can go nowhere."""
        waiter = entry.waiter
        entry.options, stands = self._layouts.options(waiter)
        mask = 0
        for option in entry.options:
            mask |= option.mask
        entry.mask = entry.lanes_mask = mask
        if not mask:
            return Refused(waiter.sequence, "too_large" if stands else "no_backend")
        if entry.chain or waiter.blocks:
            entry.matched_at = -1
            self.caches.match(entry)
            matched_tokens = max(entry.matched.values(), default=0)
            entry.tokens = max(1, waiter.groups[0].need.prompt_tokens - matched_tokens)
            entry.seen_tokens = max(matched_tokens, self.prefixes.seen(entry.chain))
        return None
