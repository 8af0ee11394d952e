"""The order of the queue: strict between classes, fair between flows, short requests first within limits. Pure.

Requests that may go to the same backends wait in one *lane*. Only the first of a lane is ever looked at: if it has to
wait, so has everybody behind it. So the queue costs nothing, however long it is.

Between the flows of a class the order is that of deficit round robin, kept in virtual time instead of rounds
(start-time fair queueing; Goyal, Vin, Cheng 1996). Each request has a *tag*: the tokens its flow was served and asked
for before it, but no less than what others were served on average by the time it came (``Domain.served``). Lowest tag
first. So a flow gains nothing by flooding and saves nothing up while it is away. Lanes that share backends share the
account (a *domain*), so that sending to two of them earns no second share.

To that is added for a while what a request itself is going to take, several times over: its tokens that are in no cache
(``Entry.handicap``). Under pressure this decides how many are served in time: those whose prompts are cached go while
they are, and one long prompt does not hold up a hundred short ones.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from gateway.routing.entries import Entry

# Accounts of flows that do not wait are kept up to this many.
MOST_ACCOUNTS = 4096
# Entries of a heap that mean nothing any more are swept out when there are so many of them.
MOST_STALE = 64
# Lanes nobody waits in are kept up to this many.
MOST_LANES = 256

Key = tuple[int, float, int]
Turn = tuple[int, bool, float, int]
Flow = tuple[int, str]


class Domain:
    """The account of what each flow was served or has asked for, over all lanes that share backends. Tokens.

    ``served`` is the virtual time: it grows by each request's tokens over the number of flows that wait, so whatever
    comes later, a tag that stands is reached in the end. It does not follow the tags of who is served while others
    wait: short requests go before their turn, and a flow that floods would take time along with it.

    Those that were held back long enough (``Entry.aged``) and whose turn it is go first, and then the others until they
    have had as many tokens: under an overload that lasts, everybody long is held back, and would leave the others
    nothing. Who waits for requests of its own flow was not held back for others' sake.
    """

    __slots__ = ("_accounts", "_flows", "_left", "_owed_tokens", "lanes", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self._owed_tokens = 0.0  # to the others, for what was served to those held back before
        self.lanes: list[Lane] = []
        self._accounts: dict[Flow, float] = {}
        self._flows: dict[Flow, OrderedDict[int, Entry]] = {}  # who waits, by arrival
        self._left: set[Flow] = set()  # flows of which somebody left unserved

    def turn(self, lane: Lane) -> Turn:
        """Where a lane's first request stands among all lanes now. Raises ``IndexError`` if nobody waits."""
        rank, tag, sequence = lane.key()
        due = lane.aged and tag <= self.served
        return (rank, not due if self._owed_tokens <= 0 else due, tag, sequence)

    def is_due(self, lane: Lane) -> bool:
        """Whether the turn of a lane's first request has come, size and all. Raises ``IndexError`` if nobody waits."""
        return lane.key()[1] <= self.served

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not any(lane.waiting for lane in self.lanes)

    def book(self, entry: Entry) -> None:
        """Give a request its tag, and its flow's account the tokens. Who has a tag from before keeps it."""
        if entry.tag is None:
            flow = entry.flow
            entry.floor = self.served
            entry.tag = max(self.served, self._accounts.get(flow, 0.0))
            self._accounts[flow] = entry.tag + entry.tokens
            if len(self._accounts) > MOST_ACCOUNTS:
                kept = {key: value for key, value in self._accounts.items() if value > self.served}
                self._accounts = kept

    def enter(self, entry: Entry) -> None:
        """A request with a tag waits."""
        waiting = self._flows.get(entry.flow)
        if waiting is None:
            waiting = self._flows[entry.flow] = OrderedDict()
        waiting[entry.waiter.sequence] = entry

    def leave(self, entry: Entry, served: bool) -> None:
        """It waits no more. What an unserved one was booked for goes back to its flow at the next ``settle``."""
        flow = entry.flow
        waiting = self._flows[flow]
        if not served and entry.waiter.tag is None:
            if next(reversed(waiting.values())) is entry:
                assert entry.tag is not None
                self._accounts[flow] = entry.tag  # nobody is behind it
            else:
                self._left.add(flow)
        del waiting[entry.waiter.sequence]
        if not waiting:
            del self._flows[flow]

    def serve(self, entry: Entry) -> None:
        """A request with a tag is placed: time goes on."""
        assert entry.tag is not None
        if entry.aged and entry.tag <= self.served:
            self._owed_tokens += entry.tokens
        else:
            self._owed_tokens = max(0.0, self._owed_tokens - entry.tokens)
        if entry.waiter.tag is None:
            if not self._flows:
                self.served = max(self.served, entry.tag)
            self.served += entry.tokens / max(1, len(self._flows))

    def settle(self) -> None:
        """Let those behind requests that left unserved move up."""
        lanes = set()
        for flow in self._left:
            finish: float | None = None
            for entry in self._flows.get(flow, {}).values():
                if entry.waiter.tag is not None:
                    continue
                assert entry.tag is not None
                tag = entry.tag if finish is None else min(entry.tag, max(entry.floor, finish))
                if finish is None:
                    tag = min(entry.tag, max(entry.floor, self.served))
                if tag != entry.tag:
                    entry.tag = tag
                    lanes.add(entry.lane)
                finish = tag + entry.tokens
            if finish is not None:
                self._accounts[flow] = finish
        self._left.clear()
        for lane in lanes:
            if lane is not None:
                lane.sort()

    def take_in(self, other: Domain) -> None:
        """Two domains turn out to share backends: go on with one account, each flow as far ahead as it was."""
        self.settle()
        other.settle()
        shift = self.served - other.served
        for flow, tokens in other._accounts.items():
            self._accounts[flow] = max(self._accounts.get(flow, 0.0), tokens + shift)
        for flow, waiting in other._flows.items():
            for entry in waiting.values():
                assert entry.tag is not None
                entry.tag += shift
                entry.floor += shift
            merged = sorted([*self._flows.get(flow, {}).items(), *waiting.items()])
            self._flows[flow] = OrderedDict(merged)
        for lane in other.lanes:
            lane.domain = self
            lane.sort()
        self.lanes += other.lanes

    def clear(self) -> None:
        """Nobody waits any more; the account stays."""
        self.lanes = []
        self._flows = {}


class Lane:
    """Requests that may go to the same backends, those in ``mask``; ``aged`` as they all are or are not. ``dirty``: its
    first was not looked at yet. ``kept_out``: its first would fit, but must leave room to others (``keeping``)."""

    __slots__ = ("_heap", "aged", "dirty", "domain", "kept_out", "mask", "waiting")

    def __init__(self, mask: int, domain: Domain, aged: bool) -> None:
        self.mask = mask
        self.aged = aged
        self.domain = domain
        self.waiting = 0
        self.dirty = self.kept_out = False
        self._heap: list[tuple[Key, Entry]] = []
        domain.lanes.append(self)

    def __repr__(self) -> str:
        return f"<Lane {self.mask:b} {self.waiting} waiting>"

    def __iter__(self) -> Iterator[Entry]:
        return (entry for key, entry in self._heap if self._stands(key, entry))

    def key(self) -> Key:
        """Where its first request stands among all of its age. Raises ``IndexError`` if nobody waits."""
        return self._top()[0]

    def first(self) -> Entry:
        """The request to be served next. Raises ``IndexError`` if nobody waits."""
        return self._top()[1]

    def push(self, entry: Entry) -> None:
        """Let a request wait that has its tag."""
        entry.lane = self
        self.waiting += 1
        heapq.heappush(self._heap, (entry.key, entry))
        self.domain.enter(entry)
        if len(self._heap) > 2 * self.waiting + MOST_STALE:
            self.sort()
        if self.first() is entry:
            self.dirty = True

    def drop(self, entry: Entry, served: bool = False) -> bool:
        """Take a request out. Returns whether it was the first."""
        was_first = self.first() is entry
        self.waiting -= 1
        entry.lane = None
        self.domain.leave(entry, served)
        if was_first:
            self.dirty, self.kept_out = True, False
        return was_first

    def sort(self) -> None:
        """Order anew, after tags have changed."""
        first = self._heap[0][1] if self._heap else None
        self._heap = [(entry.key, entry) for _, entry in self._heap if entry.lane is self]
        heapq.heapify(self._heap)
        self.dirty = self.dirty or (bool(self._heap) and self._heap[0][1] is not first)

    def _top(self) -> tuple[Key, Entry]:
        heap = self._heap
        while not self._stands(*heap[0]):
            heapq.heappop(heap)
        return heap[0]

    def _stands(self, key: Key, entry: Entry) -> bool:
        return entry.lane is self and key == entry.key


class Lanes:
    """All lanes, by the mask of their backends and their age, and the domains they fall into."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, bool], Lane] = {}
        self._domains: list[tuple[int, Domain]] = []  # masks are disjoint

    def domains(self) -> list[Domain]:
        """Every domain."""
        return [domain for _, domain in self._domains]

    def domain(self, mask: int) -> Domain:
        """The domain of those backends."""
        return self._lane(mask).domain

    def push(self, entry: Entry) -> Lane:
        """Let a request wait in the lane of the backends it waits for."""
        lane = self._lane(entry.lanes_mask, entry.aged)
        lane.domain.book(entry)
        lane.push(entry)
        return lane

    def clear(self) -> list[Entry]:
        """Let everybody out, to be put into other lanes; accounts and tags stay."""
        entries = [entry for lane in self._lanes.values() for entry in lane]
        for entry in entries:
            entry.lane = None
        self._lanes = {}
        for _, domain in self._domains:
            domain.clear()
        return entries

    def _lane(self, mask: int, aged: bool = False) -> Lane:
        lane = self._lanes.get((mask, aged))
        if lane is None:
            if len(self._lanes) >= MOST_LANES:
                self._prune()
            lane = self._lanes[mask, aged] = Lane(mask, self._domain(mask), aged)
        return lane

    def _prune(self) -> None:
        """Forget the lanes nobody waits in."""
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.waiting}
        for _, domain in self._domains:
            domain.lanes = [lane for lane in domain.lanes if lane.waiting]

    def _domain(self, mask: int) -> Domain:
        """The domain of those backends; several that are joined by them become one."""
        joined: Iterable[tuple[int, Domain]] = [pair for pair in self._domains if pair[0] & mask]
        if not joined:
            self._domains.append((mask, Domain()))
            return self._domains[-1][1]
        (whole, first), *others = joined
        for known, domain in others:
            first.take_in(domain)
            whole |= known
        rest = [pair for pair in self._domains if not pair[0] & mask]
        self._domains = [*rest, (whole | mask, first)]
        return first
