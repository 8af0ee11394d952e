"""One backend as placing sees it: its newest view, and what was placed there since. Pure.

A room is looked at for every request and written for few, so all that its cost needs is reckoned when it changes.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import NamedTuple

from gateway.routing.returns import Returns
from gateway.types import BackendView, Health, LoadView, Need

# A stand-in until some backend's own is learned.
PREFILL_S = 1 / 8000
# Weight of the barrier in seconds: 0.15 at half a cache, 0.35 at 70 %, 2.85 at 95 %.
KV_PENALTY_S = 0.15
# The barrier is finite in a full cache; an idle backend may be given more than it can hold (drip).
BEYOND_FULL = 1.001
# Output is generated side by side, and its rate moves with the load: a slower backend is charged so much of what it
# takes longer, and only for more than half as long again as the fastest. Less would chase the load around.
OUTPUT_WEIGHT = 0.25
ALIKE = 1.5
# A prompt that is prefilled holds up all who decode there. Their time counts so much of the request's own. It is what
# keeps conversations where their prefixes are when caches are full and moving seems free (``bench.placing``).
DELAY_WEIGHT = 1.0
FULL_S = KV_PENALTY_S / (BEYOND_FULL - 1)


class Others(NamedTuple):
    """What all backends take: ``prefill_s`` a prompt token on average, and the fastest ``fastest_s``, ``output_s`` an
    output token and ``first_s`` a first byte beyond what its tokens do; infinite while nobody's is known, and 0 for the
    latter while somebody's is not."""

    prefill_s: float
    fastest_s: float
    output_s: float
    first_s: float


NO_OTHERS = Others(PREFILL_S, PREFILL_S, inf, inf)


class Room:
    """A backend. ``bit`` is its own in masks of backends.

    ``gone``: nothing will be placed here until somebody acts. ``open``: requests may be placed here now. ``drips``: it
    is open and nothing runs or waits here. ``spare`` blocks are left for placing, none if it is not open. ``size`` and
    blocks are 0 where ``known`` is false. ``held`` tells which prompt beginnings requests in flight hold here,
    ``returns`` what others left here; at most ``most_kept`` blocks are kept for those who left it (``keeping``), from
    ``pass_s`` on not from the first who comes.

    The cost in seconds of a request of so many uncached prompt tokens, output tokens and blocks is
    ``base_s + tokens × work_s + output × output_s + barrier_s ÷ (rest − blocks)``; the last is the barrier
    λ·k/(1 − k), but for its constant, which is in ``base_s``. ``work_s`` is ``token_s``, the seconds a prompt token
    takes, for itself and for each request in flight, which it delays. ``later_s``, a part of ``base_s``, is what every
    first byte takes longer than at the fastest backend. All is divided by the backend's share.
    """

    __slots__ = (
        "barrier_s", "base_s", "bit", "capacity", "drips", "engine_capacity", "gone", "held", "idle", "in_flight",
        "keep_ratio", "known", "later_s", "limit", "most_kept", "name", "open", "others", "output_s", "pass_s",
        "pending_tokens", "reserved", "rest", "returns", "size", "spare", "structure", "token_s", "trial", "view",
        "windows", "work_s",
    )  # fmt: skip

    def __init__(self, name: str, bit: int, keep_ratio: float = 0.0) -> None:
        self.name = name
        self.bit = bit
        self.keep_ratio = keep_ratio
        self.returns = Returns()
        self.pass_s = 0.0
        self.structure: tuple[object, ...] = ()
        self.windows: object = None
        self.open = self.idle = False
        self.limit = 0.0
        self.reserved = 0
        self.others = NO_OTHERS
        self.output_s = 0.0
        self.view = BackendView(name, "", Health.DOWN, {}, 0)
        self.update(self.view, 0.0)

    def __repr__(self) -> str:
        state = "gone" if self.gone else "open" if self.open else "closed"
        return f"<Room {self.name} {state} {self.reserved}/{self.capacity}>"

    def update(self, view: BackendView, headroom_ratio: float) -> tuple[bool, bool]:
        """Take over what is known now. Returns whether its offers must be looked at anew (windows, size of the cache,
        gone or back) and whether somebody may fit who did not before."""
        kv = view.kv
        known = kv is not None
        size = kv.block_size_tokens if kv is not None else 0
        engine_capacity = kv.engine_capacity_blocks if kv is not None else 0
        gone = view.health is Health.DOWN or view.draining
        is_open = view.health is Health.UP and view.accepting and not view.draining
        idle = view.in_flight == 0 and not view.running and not view.waiting
        capacity = kv.capacity_blocks if kv is not None else 0
        reserved = kv.reserved_blocks if kv is not None else 0
        limit = capacity * (1.0 - headroom_ratio) * view.warmth  # a long queue would fill it at once
        structure = (gone, view.health is Health.UNKNOWN, known, size, engine_capacity)
        changed = structure != self.structure or (view.windows is not self.windows and view.windows != self.windows)
        better = changed
        if not changed:
            better = (is_open and not self.open) or (idle and not self.idle)
            better = better or limit - reserved > self.limit - self.reserved
        doubted = view.trust != self.view.trust
        self.view, self.windows, self.structure = view, view.windows, structure
        self.gone, self.open, self.idle, self.trial = gone, is_open, idle, view.trial
        self.known, self.size, self.engine_capacity = known, size, engine_capacity
        self.held = kv.held if kv is not None else None
        self.capacity, self.reserved, self.limit = capacity, reserved, limit
        self.most_kept = self.keep_ratio * limit if view.caches else 0.0
        self.in_flight = view.in_flight
        self.pending_tokens = view.pending_prompt_tokens
        self._weigh(output=doubted)  # else it stays until all are compared: output's pace moves with the load
        self.barrier_s = KV_PENALTY_S * capacity * BEYOND_FULL / view.share
        self._price()
        return changed, better

    def load(self, load: LoadView) -> bool:
        """Take over the load alone. Returns whether somebody may fit who did not before."""
        view = self.view
        idle = load.in_flight == 0 and not view.running and not view.waiting
        better = (idle and not self.idle) or load.reserved_blocks < self.reserved
        self.idle, self.in_flight = idle, load.in_flight
        self.pending_tokens = load.pending_prompt_tokens
        if self.known:
            self.reserved = load.reserved_blocks
        self._price()
        return better

    def compare(self, others: Others) -> None:
        """Be priced beside the others from now on."""
        self.others = others
        self._weigh(output=True)
        self._price()

    def serves(self, model: str, window_tokens: int) -> bool:
        """Whether an offer still stands: a backend may have come back with other models or a smaller window.

        One that nobody has looked at yet is taken on trust.
        """
        windows = self.view.windows
        most = windows.get(model, 0) if model else max(windows.values(), default=0)
        return most >= window_tokens or self.view.health is Health.UNKNOWN

    @property
    def holds_tokens(self) -> float:
        """The longest prompt an empty cache would hold: a sequence lives in one engine."""
        return self.engine_capacity * self.size if self.known else float("inf")

    def place(self, need: Need, cached_tokens: int) -> None:
        """Count a request that was placed here, ``cached_tokens`` of whose prompt are in the cache.

        A recovering backend gets one to try it, and no second.
        """
        self.idle = False
        self.open = self.open and not self.trial
        self.in_flight += 1
        self.pending_tokens += max(0, need.prompt_tokens - cached_tokens)
        if self.known:
            self.reserved += need.blocks(self.size)
        self._price()

    def _weigh(self, output: bool) -> None:
        """Hold what was learned against the others, and believe it as far as it is to be trusted. A backend of which
        nothing is known prefills as they do on average, generates as the fastest does, and begins at once."""
        view, others = self.view, self.others
        share, trust = view.share, view.trust
        prefill_s = others.prefill_s if view.prefill_s is None else view.prefill_s
        prefill_s -= (1.0 - trust) * max(0.0, prefill_s - others.fastest_s)
        later_s = max(0.0, trust * (first_s(view, others.prefill_s) or 0.0) - ALIKE * others.first_s)
        self.token_s, self.later_s = prefill_s / share, later_s / share
        if output:
            slower_s = max(0.0, trust * (view.output_s or 0.0) - ALIKE * others.output_s)
            self.output_s = OUTPUT_WEIGHT * slower_s / share

    def _price(self) -> None:
        """Reckon what the cost of the next request is made of."""
        self.drips = self.open and self.idle
        self.spare = self.limit - self.reserved if self.open else -1.0
        self.rest = self.capacity * BEYOND_FULL - self.reserved
        self.base_s = self.pending_tokens * self.token_s + self.later_s - KV_PENALTY_S / self.view.share
        self.work_s = self.token_s * (1.0 + DELAY_WEIGHT * self.in_flight)


def first_s(view: BackendView, usual_s: float) -> float | None:
    """Seconds that every first byte takes there, beside what its tokens do; ``None`` while unknown."""
    if view.first_s is None:
        return None
    return max(0.0, view.first_s - view.first_tokens * (usual_s if view.prefill_s is None else view.prefill_s))


def compare(rooms: Collection[Room]) -> None:
    """Price backends beside each other, now that rates were learned.

    Who is not known to be late is given the chance to be the fastest, whatever those take that are known: to a client
    that asks one thing after the other, which alike backends would all answer from the first, it would stay unknown.
    """
    views = [room.view for room in rooms]
    prefill = [view.prefill_s for view in views if view.prefill_s is not None]
    output = [view.output_s for view in views if view.output_s is not None]
    mean_s = sum(prefill) / len(prefill) if prefill else PREFILL_S
    there = [room.view for room in rooms if not room.gone]
    first = [each_s for view in there if (each_s := first_s(view, mean_s)) is not None]
    soonest_s = 0.0 if 0 < len(first) < len(there) else min(first, default=inf)
    others = Others(mean_s, min(prefill, default=mean_s), min(output, default=inf), soonest_s)
    for room in rooms:
        room.compare(others)
