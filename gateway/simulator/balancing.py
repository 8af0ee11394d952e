"""How a vLLM server with several engines spreads requests that ask for none. Sans-I/O: the time is an argument.

``DPLBAsyncMPClient`` of ``v1/engine/core_client.py`` (0.32) takes the engine with the lowest score, and keeps one count
itself: its own requests there. What runs and waits at the engines it knows from a coordinator, 0.1 s old at most while
they work; whom it sends in between it counts as waiting. Several API servers (``--api-server-count``) know nothing of
each other's requests but by that, and each takes its own for an even share of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.simulator.engine import Engine

SNAPSHOT_S = 0.1
# Waiting requests count more from this use of the KV cache on, up to three times more when it is full.
PRESSED, PRESSURE = 0.5, 6.0


class Balancer:
    """The choices of one API server, one of ``servers``.

    ``counts_own``: since some release between 0.15 and 0.32 the score is ``max(own requests, waiting + running)``, and
    the scan for the lowest begins one engine further each time; before, it was ``4 × waiting + running``.
    """

    def __init__(
        self, engines: Sequence[Engine], *, counts_own: bool = True, servers: int = 1, server: int = 0
    ) -> None:
        self._engines = engines
        self._counts_own = counts_own
        self._servers = servers
        self._start = len(engines) * server // servers
        self._own = [0] * len(engines)
        self._seen: list[tuple[int, int, float]] = [(0, 0, 0.0)] * len(engines)
        self._seen_s: float | None = None

    def choose(self, now_s: float) -> int:
        """The engine for a request that arrives now. It is there until ``finished``."""
        if self._seen_s is None or now_s - self._seen_s >= SNAPSHOT_S:
            self._seen_s = now_s
            gauges = [engine.gauges() for engine in self._engines]
            self._seen = [(item.waiting, item.running, item.kv_usage_ratio) for item in gauges]
        count = len(self._engines)
        rank = min(((self._start + step) % count for step in range(count)), key=self._score)
        waiting, running, usage = self._seen[rank]
        self._seen[rank] = (waiting + self._servers, running, usage)
        if self._counts_own:
            self._start = (self._start + 1) % count
        return rank

    def sent(self, rank: int) -> None:
        """A request goes to that engine, chosen or asked for."""
        self._own[rank] += 1

    def finished(self, rank: int) -> None:
        """A request that was sent there is over."""
        self._own[rank] -= 1

    def _score(self, rank: int) -> float:
        waiting, running, usage = self._seen[rank]
        if not self._counts_own:
            return 4 * waiting + running
        score = float(max(self._servers * self._own[rank], waiting + running))
        return score + waiting * PRESSURE * max(0.0, usage - PRESSED)
