"""A full cluster is shared evenly between keys, though short requests go first: a flood earns its key nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from routing_views import NOW_S, busy, waiter

from gateway.config import PlacingSettings
from gateway.routing.placer import Placer

TOKENS = 160


class Contest:
    """One backend that takes one request each 50 ms, and keys that always have as many waiting."""

    def __init__(self, short_first_s: float, waiting: dict[str, int]) -> None:
        self.placer = Placer(PlacingSettings(headroom_ratio=0.0, short_first_s=short_first_s))
        self.placer.see([busy("a", 1000)])
        self.now_s = NOW_S
        self.arrived: dict[int, tuple[str, float]] = {}
        for key, count in waiting.items():
            for _ in range(count):
                self.add(key)

    def add(self, key: str, tokens: int = TOKENS) -> None:
        sequence = len(self.arrived)
        self.arrived[sequence] = (key, self.now_s)
        request = waiter(sequence, "a", tokens=tokens, flow=key, arrived_s=self.now_s, deadline_s=self.now_s + 3600)
        assert self.placer.add(request, self.now_s) == []

    def step(self) -> list[tuple[str, float]]:
        """The keys that were served, and how long each waited."""
        self.now_s += 0.05
        served = []
        for free in (10, 300):  # the most that the first in turn can need
            self.placer.see([busy("a", 1000 - free)])
            for decision in self.placer.decide(self.now_s):
                key, arrived_s = self.arrived[decision.sequence]
                served.append((key, self.now_s - arrived_s))
            if served:
                break
        self.placer.see([busy("a", 1000)])
        return served


@pytest.mark.parametrize("short_first_s", [0.0, 5.0, 15.0, 60.0])
@pytest.mark.parametrize("flood", [50, 400])
def test_a_flood_earns_its_key_nothing_however_long_it_waits(short_first_s: float, flood: int) -> None:
    keys = {"flood": flood} | {f"key{number}": 5 for number in range(4)}
    queue = Contest(short_first_s, keys)
    counts: Counter[str] = Counter()
    for step in range(2400):
        for key, _ in queue.step():
            counts[key] += step >= 1000
            queue.add(key)
    shares = [counts[key] for key in keys]
    jain = sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
    assert jain > 0.98, counts


def test_a_long_request_beside_a_flood_of_short_ones_waits_no_longer_than_short_first() -> None:
    queue = Contest(5.0, {"flood": 400} | {f"key{number}": 5 for number in range(4)})
    for _ in range(400):
        for key, _ in queue.step():
            queue.add(key)
    queue.add("long", 30 * TOKENS)
    waited_s = None
    for _ in range(200):
        for key, after_s in queue.step():
            if key == "long":
                waited_s = after_s
            else:
                queue.add(key)
    assert waited_s is not None and waited_s < 6.0
