"""What others do: the baselines, each as its project documents it. All send a request on at once; none of them queues.

A policy sees what the real one would: its own requests in flight, and gauges scraped from each backend at its own
interval. None of them knows a backend's window, since none of these projects asks for it; with ``told`` (as if an
operator had labelled the backends) they leave out those that cannot hold the prompt.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.placing.lru import RecentBlocks
from bench.placing.traffic import BLOCK_TOKENS, Request


@dataclass(slots=True)
class Seen:
    """A backend as a router sees it: ``in_flight`` counts its own requests now, the rest is as old as the scrape."""

    index: int
    window_tokens: int
    capacity_blocks: int
    up: bool = True
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


# How many leading blocks of a prompt a backend has cached, by its index: what KV events would have told.
Cached = Callable[[int, Sequence[int]], int]


class Policy(Protocol):
    """Chooses a backend for each request. ``retries``: it tries elsewhere when a backend's connection fails."""

    name: str
    scrape_s: float
    retries: bool

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int:
        """The backend of these to send ``request`` to now."""

    def placed(self, request: Request, index: int) -> None:
        """It was sent there."""

    def ended(self, request: Request, index: int) -> None:
        """It is over, or failed."""


def able(request: Request, backends: Sequence[Seen], told: bool) -> list[Seen]:
    """Backends that are up and, if the policy was told, whose window holds the prompt."""
    up = [seen for seen in backends if seen.up] or list(backends)
    return ([seen for seen in up if seen.window_tokens > request.prompt_tokens] or up) if told else up


class _Plain:
    """A policy that keeps no account of its own."""

    scrape_s = 1.0
    retries = True

    def placed(self, request: Request, index: int) -> None:
        return

    def ended(self, request: Request, index: int) -> None:
        return


class NoGateway(_Plain):
    """Each client was given one server's address: nobody sends it elsewhere, even when that server is down."""

    name = "no gateway"
    retries = False

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int:
        return backends[request.session.number % len(backends)].index


class RoundRobin(_Plain):
    """One after the other."""

    name = "round robin"

    def __init__(self) -> None:
        self._next = 0

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int:
        self._next += 1
        return backends[self._next % len(backends)].index


class LeastInFlight(_Plain):
    """Fewest of its own requests in flight."""

    name = "least in flight"

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int:
        return min(backends, key=lambda seen: (seen.in_flight, seen.index)).index


class PowerOfTwo(_Plain):
    """The less loaded of two at random (vLLM's router: ``power_of_two``)."""

    name = "power of two"

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int:
        pair = self._random.sample(backends, min(2, len(backends)))
        return min(pair, key=lambda seen: (seen.in_flight, seen.index)).index


class CacheAware(_Plain):
    """SGLang's router and vLLM's: if out of balance the least loaded, else the best prefix match above a threshold.

    Out of balance: most − least > ``absolute`` and most > ``relative`` × least, in its own requests in flight. Below
    the match threshold the least loaded takes it (the newer rule; the older took the smallest tree). SGLang's figures
    are 32, 1.1 and 0.5; those of vLLM's router are 64, 1.5 and 0.3.
    """

    def __init__(self, name: str, count: int, absolute: int, relative: float, threshold: float) -> None:
        self.name = name
        self._trees = [RecentBlocks(1_000_000) for _ in range(count)]
        self._absolute = absolute
        self._relative = relative
        self._threshold = threshold

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int:
        loads = [seen.in_flight for seen in backends]
        most, least = max(loads), min(loads)
        chosen = min(backends, key=lambda seen: (seen.in_flight, seen.index))
        if not (most - least > self._absolute and most > self._relative * least):
            best = max(backends, key=lambda seen: (self._trees[seen.index].leading(request.hashes), -seen.in_flight))
            matched = self._trees[best.index].leading(request.hashes) * BLOCK_TOKENS
            if matched > self._threshold * request.prompt_tokens:
                chosen = best
        return chosen.index

    def placed(self, request: Request, index: int) -> None:
        self._trees[index].use(request.hashes)


class EndpointPicker(_Plain):
    """llm-d's and the Gateway API's picker: weighted scores of prefix (3), queue (2) and KV use (2); best wins.

    Gauges every 50 ms. Its prefix index is approximate, bounded by each server's block count. By default it hashes no
    more than the first 256 blocks of a prompt, 4,096 tokens, so all that agents of one kind say looks alike to it;
    ``most_blocks`` is what an operator may raise that to. With ``cached`` it has the precise index that KV events feed.
    """

    scrape_s = 0.05

    def __init__(
        self,
        name: str,
        capacities: Sequence[int],
        most_blocks: int = 256,
        cached: Cached | None = None,
        seed: int = 1,
    ) -> None:
        self.name = name
        self._trees = [RecentBlocks(capacity) for capacity in capacities]
        self._most_blocks = most_blocks
        self._cached = cached
        self._random = random.Random(seed)

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int:
        queues = [seen.waiting for seen in backends]
        most, least = max(queues), min(queues)
        hashes = request.hashes[: self._most_blocks]
        blocks = max(1, len(hashes))
        scored = []
        for seen in backends:
            queue = 1.0 if most == least else (most - seen.waiting) / (most - least)
            prefix = self._matched(seen.index, hashes) / blocks
            scored.append((3 * prefix + 2 * queue + 2 * (1 - seen.kv_usage), self._random.random(), seen.index))
        return max(scored)[2]

    def placed(self, request: Request, index: int) -> None:
        if self._cached is None:
            self._trees[index].use(request.hashes[: self._most_blocks])

    def _matched(self, index: int, hashes: Sequence[int]) -> int:
        return self._trees[index].leading(hashes) if self._cached is None else self._cached(index, hashes)


class Overlap(_Plain):
    """Dynamo's KV router: least (prefill blocks to do + blocks in use), by its own ledger and KV events.

    Its own ledger, not a scrape, knows the prompts under way and the blocks they use, a shared one counted once.
    Weights are its defaults, temperature 0 with a random tie. Its rejection thresholds are off by default, so it
    rejects nothing.
    """

    name = "overlap (dynamo)"

    def __init__(self, count: int, cached: Cached, seed: int = 1) -> None:
        self._cached = cached
        self._random = random.Random(seed)
        self._prefill = [0] * count
        self._active: list[Counter[int]] = [Counter() for _ in range(count)]
        self._held: dict[int, tuple[int, Sequence[int]]] = {}

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int:
        hashes = request.hashes
        costs = []
        for seen in backends:
            active = self._active[seen.index]
            missing = len(hashes) - self._cached(seen.index, hashes)
            used = len(active) + list(map(active.__contains__, hashes)).count(False)
            costs.append((self._prefill[seen.index] + missing + used, self._random.random(), seen.index, missing))
        _, _, index, missing = min(costs)
        self._held[request.number] = (missing, hashes)
        return index

    def placed(self, request: Request, index: int) -> None:
        missing, hashes = self._held[request.number]
        self._prefill[index] += missing
        self._active[index].update(hashes)

    def began(self, request: Request, index: int) -> None:
        """Its prompt is done."""
        missing, hashes = self._held[request.number]
        self._prefill[index] -= missing
        self._held[request.number] = (0, hashes)

    def ended(self, request: Request, index: int) -> None:
        missing, hashes = self._held.pop(request.number)
        self._prefill[index] -= missing
        active = self._active[index]
        for value in hashes:
            active[value] -= 1
            if not active[value]:
                del active[value]
