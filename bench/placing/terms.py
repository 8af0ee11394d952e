"""What a run is made of: the fleet, a placer's interface, what became of each request, and all of it together."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from bench.placing.traffic import MEAN_GAP_LIMIT_S, Request
from gateway.simulator.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class Fleet:
    """The backends' engines, all of one model."""

    engines: tuple[EngineConfig, ...]
    dies_s: float | None = None  # when the first backend's process is lost ...
    back_s: float | None = None  # ... and when it is up again, empty
    noticed_after_s: float = 3.0  # how long a router takes to see it


@dataclass(slots=True)
class Outcome:
    """What became of one request. ``None``: it never came so far.

    ``oracle_tokens`` and ``pooled_tokens``: what of its prompt the oracles had cached (``oracle.py``). ``refused``: it
    ended with a refusal; ``lost``: its backend failed, and so did the tries after it. ``overflows``: how often it was
    told that it does not fit.
    """

    request: Request
    oracle_tokens: int = 0
    pooled_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    backend: int | None = None
    refused: bool = False
    lost: bool = False
    overflows: int = 0
    tries: int = 0
    connections: int = 0

    @property
    def kept(self) -> bool:
        """Whether the objective was kept: first token in time, and tokens fast enough on average."""
        if self.finished_s is None or self.first_token_s is None:
            return False
        mean_gap_s = (self.finished_s - self.first_token_s) / max(1, self.output_tokens - 1)
        in_time = self.first_token_s - self.request.sent_s <= self.request.session.kind.first_token_limit_s
        return in_time and (mean_gap_s <= MEAN_GAP_LIMIT_S or math.isinf(self.request.session.kind.first_token_limit_s))


@dataclass(slots=True)
class Run:
    """What one policy did with one load."""

    policy: str
    outcomes: list[Outcome]
    preemptions: int
    gaps: Counter[float]
    backends: int
    lasted_s: float


class Placer(Protocol):
    """A policy that may hold requests back; it hands them on by ``Lab.send``, and gives up on them by ``Lab.refuse``.

    ``lazy``: it reads gauges only when a request arrives, after ``Lab.observe``. ``retries``: it sends a request to
    another backend itself if the first one's connection fails before the first token.
    """

    name: str
    scrape_s: float
    lazy: bool
    retries: bool

    def arrived(self, request: Request, now_s: float) -> None:
        """A client sent this."""

    def first_token(self, request: Request, backend: int, now_s: float) -> None:
        """Its answer begins."""

    def finished(self, request: Request, backend: int, outcome: Outcome, now_s: float) -> None:
        """Its answer is complete."""

    def returned(self, request: Request, backend: int, now_s: float) -> None:
        """The backend answered that it does not fit its window."""

    def failed(self, request: Request, backend: int, now_s: float) -> None:
        """The backend is gone, and this request with it. If it is to be tried again it will arrive again."""

    def scraped(self, now_s: float) -> None:
        """Gauges are fresh."""
