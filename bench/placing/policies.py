"""What others do: the baselines, each as its project documents it. All send a request on at once; none of them queues.

A policy sees what the real one would: its own requests in flight, and gauges scraped from each backend at its own
interval. ``place`` returns the backend's index, or ``None`` to wait until ``freed`` or ``scraped`` is called (only the
gateway's policy does).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Policy(Protocol):
    """Chooses a backend for each request."""

    name: str
    scrape_s: float

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int | None:
        """The backend to send ``request`` to now."""


def able(request: Request, backends: Sequence[Seen]) -> list[Seen]:
    """Backends that are up and, as every policy here is told, whose window holds the prompt."""
    up = [seen for seen in backends if seen.up] or list(backends)
    return [seen for seen in up if seen.window_tokens > request.prompt_tokens] or up


class NoGateway:
    """Each client was given one server's address."""

    name = "no gateway"
    scrape_s = 1.0

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int | None:
        fit = able(request, backends)
        return fit[request.session.number % len(fit)].index


class RoundRobin:
    """One after the other."""

    name = "round robin"
    scrape_s = 1.0

    def __init__(self) -> None:
        self._next = 0

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int | None:
        fit = able(request, backends)
        self._next += 1
        return fit[self._next % len(fit)].index


class LeastInFlight:
    """Fewest of its own requests in flight."""

    name = "least in flight"
    scrape_s = 1.0

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int | None:
        return min(able(request, backends), key=lambda seen: (seen.in_flight, seen.index)).index


class PowerOfTwo:
    """The less loaded of two at random (vLLM's router: ``power_of_two``)."""

    name = "power of two"
    scrape_s = 1.0

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int | None:
        fit = able(request, backends)
        pair = self._random.sample(fit, min(2, len(fit)))
        return min(pair, key=lambda seen: (seen.in_flight, seen.index)).index


class PrefixIndex:
    """Which leading blocks were sent where: least recently used blocks are forgotten beyond ``capacity_blocks``."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def matched(self, hashes: Sequence[int]) -> int:
        """Leading blocks known."""
        blocks = self._blocks
        if not hashes or hashes[0] not in blocks:
            return 0
        low, high = 1, len(hashes)
        while low < high:  # a known block's parents are known, too, but for what was just forgotten
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def remember(self, hashes: Sequence[int]) -> None:
        blocks = self._blocks
        for value in reversed(hashes):  # heads last: they are the last to be forgotten
            blocks[value] = None
            blocks.move_to_end(value)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)


class CacheAware:
    """SGLang's and vLLM's router: if out of balance the shortest queue, else the best prefix match above a half.

    Out of balance: most − least > ``absolute`` and most > ``relative`` × least. Below the match threshold the least
    loaded takes it (the newer rule; the older took the smallest tree).
    """

    name = "cache aware (sglang)"
    scrape_s = 1.0

    def __init__(self, count: int, absolute: int = 32, relative: float = 1.1, threshold: float = 0.5) -> None:
        self._trees = [PrefixIndex(1_000_000) for _ in range(count)]
        self._absolute = absolute
        self._relative = relative
        self._threshold = threshold

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int | None:
        fit = able(request, backends)
        loads = [seen.in_flight for seen in fit]
        most, least = max(loads), min(loads)
        calmest = min(fit, key=lambda seen: (seen.in_flight, seen.index))
        chosen = calmest
        if not (most - least > self._absolute and most > self._relative * least):
            best = max(fit, key=lambda seen: (self._trees[seen.index].matched(request.hashes), -seen.in_flight))
            matched = self._trees[best.index].matched(request.hashes) * BLOCK_TOKENS
            if matched > self._threshold * request.prompt_tokens:
                chosen = best
        self._trees[chosen.index].remember(request.hashes)
        return chosen.index


class EndpointPicker:
    """llm-d's and the Gateway API's picker: weighted scores of prefix (3), queue (2) and KV use (2); best wins.

    Gauges every 50 ms; the prefix index is approximate, bounded by each server's block count.
    """

    name = "endpoint picker (llm-d)"
    scrape_s = 0.05

    def __init__(self, capacities: Sequence[int], seed: int = 1) -> None:
        self._trees = [PrefixIndex(capacity) for capacity in capacities]
        self._random = random.Random(seed)

    def place(self, request: Request, backends: Sequence[Seen], now_s: float) -> int | None:
        fit = able(request, backends)
        queues = [seen.waiting for seen in fit]
        most, least = max(queues), min(queues)
        blocks = max(1, len(request.hashes))
        scored = []
        for seen in fit:
            queue = 1.0 if most == least else (most - seen.waiting) / (most - least)
            prefix = self._trees[seen.index].matched(request.hashes) / blocks
            scored.append((3 * prefix + 2 * queue + 2 * (1 - seen.kv_usage), self._random.random(), seen.index))
        chosen = max(scored)[2]
        self._trees[chosen].remember(request.hashes)
        return chosen
