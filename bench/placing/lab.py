"""The laboratory: backends on a virtual clock, traffic that reacts to answers, one policy that places.

Nothing waits for real: a heap holds what happens next. A backend whose batch only decodes takes all steps until its
next event at once; a request that comes meanwhile cuts the run after the step then under way.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.placing.policies import Seen
from bench.placing.traffic import BLOCK_TOKENS, MEAN_GAP_LIMIT_S, Load, Request, Session, Traffic
from gateway.simulator.engine import EngineConfig, EngineRequest
from gateway.simulator.leaping import LeapingEngine, Move


@dataclass(frozen=True, slots=True)
class Fleet:
    """The backends' engines, all of one model."""

    engines: tuple[EngineConfig, ...]
    dies_s: float | None = None  # when the first backend's process is lost ...
    back_s: float | None = None  # ... and when it is up again, empty
    noticed_after_s: float = 3.0  # how long a router takes to see it


@dataclass(slots=True)
class Outcome:
    """What became of one request. ``None``: it never came so far."""

    request: Request
    first_token_s: float | None = None
    finished_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    refused: bool = False

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
    oracle_tokens: int
    lasted_s: float


class Placer(Protocol):
    """A policy that may hold requests back. ``send`` passes one on to a backend."""

    name: str
    scrape_s: float

    def arrived(self, request: Request, now_s: float) -> None: ...

    def first_token(self, request: Request, backend: int, now_s: float) -> None: ...

    def finished(self, request: Request, backend: int, outcome: Outcome, now_s: float) -> None: ...

    def failed(self, request: Request, backend: int, now_s: float) -> None: ...

    def scraped(self, now_s: float) -> None: ...


Send = Callable[[Request, int, float], None]
Refuse = Callable[[Request, float], None]


@dataclass(slots=True, eq=False)
class _Backend:
    """One engine, what it is doing, and until when."""

    index: int
    engine: LeapingEngine
    dead: bool = False
    busy: bool = False
    version: int = 0
    leap_began_s: float = 0.0
    leap_steps: int = 0
    result: Move | None = None
    requests: dict[str, Request] = field(default_factory=dict)
    lost_preemptions: int = 0


class Lab:
    """Runs one load under one placer. ``seen`` is what the placer may look at."""

    def __init__(self, fleet: Fleet, load: Load, seed: int, window_tokens: int) -> None:
        self.fleet = fleet
        self.traffic = Traffic(load, seed, window_tokens)
        self.backends = [_Backend(index, LeapingEngine(config)) for index, config in enumerate(fleet.engines)]
        self.seen = [
            Seen(index, config.max_model_len_tokens, config.num_gpu_blocks - 1)
            for index, config in enumerate(fleet.engines)
        ]
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._outcomes: dict[int, Outcome] = {}
        self._open = 0
        self._gaps: Counter[float] = Counter()
        self._known: set[int] = set()
        self._oracle_tokens = 0
        self._load = load
        self.now_s = 0.0
        self._placer: Placer | None = None

    def run(self, placer: Placer, most_s: float | None = None) -> Run:
        """Play the load to its end; sessions still open ``most_s`` after its end (a quarter of it) are cut off."""
        self._placer = placer
        for moment_s, session in self.traffic.arrivals():
            self._at(moment_s, self._ask, session)
        self._at(0.0, self._scrape)
        if self.fleet.dies_s is not None:
            self._at(self.fleet.dies_s, self._die)
        end_s = self._load.duration_s + (self._load.duration_s / 4 if most_s is None else most_s)
        while self._heap and self._heap[0][0] <= end_s:
            self.now_s, _, call, arguments = heapq.heappop(self._heap)
            call(*arguments)
            if not self._open and self.now_s > self._load.duration_s:
                break
        preempted = sum(item.engine.counters.preemptions + item.lost_preemptions for item in self.backends)
        outcomes = list(self._outcomes.values())
        return Run(placer.name, outcomes, preempted, self._gaps, self._oracle_tokens, self.now_s)

    def send(self, request: Request, index: int, now_s: float) -> None:
        """Hand a request to a backend (called by the placer)."""
        backend = self.backends[index]
        if backend.dead:
            self._at(now_s + 0.5, self._fail, request, index)  # clients back off before they try again
            return
        engine = backend.engine
        if request.prompt_tokens + 1 > engine.config.max_model_len_tokens:
            self.refuse(request, now_s)
            return
        self._cut(backend, now_s)
        backend.requests[request.id] = request
        engine.add_hashed(EngineRequest(request.id, request.prompt, request.answer, "stop"), now_s, request.hashes)
        if not backend.busy:
            self._begin(backend, now_s)

    def refuse(self, request: Request, now_s: float) -> None:
        """A request ends without an answer; its session goes on as if there had been one."""
        outcome = self._outcomes[request.number]
        outcome.refused = True
        self._after(request, now_s)

    def produced(self, index: int) -> dict[str, int]:
        """Output tokens so far of each request of a backend, those of a run under way among them."""
        backend = self.backends[index]
        counts = backend.engine.produced()
        if backend.leap_steps:
            done = int((self.now_s - backend.leap_began_s) / backend.engine.step_s)
            running = backend.engine.running_ids()
            for name in running:
                counts[name] += min(done, backend.leap_steps)
        return counts

    # What happens

    def _ask(self, session: Session) -> None:
        request = self.traffic.request(session, self.now_s)
        self._outcomes[request.number] = Outcome(request)
        self._open += 1
        hashes = request.hashes
        fresh = next((place for place in range(len(hashes)) if hashes[place] not in self._known), len(hashes))
        self._oracle_tokens += BLOCK_TOKENS * fresh
        self._known.update(hashes[fresh:])
        assert self._placer is not None
        self._placer.arrived(request, self.now_s)

    def _fail(self, request: Request, index: int) -> None:
        assert self._placer is not None
        self._placer.failed(request, index, self.now_s)

    def _die(self) -> None:
        """The first backend's process is lost, with all it held."""
        backend = self.backends[0]
        backend.dead = True
        backend.version += 1
        backend.busy = False
        backend.leap_steps = 0
        lost = list(backend.requests.values())
        backend.requests.clear()
        backend.lost_preemptions += backend.engine.counters.preemptions
        backend.engine = LeapingEngine(backend.engine.config)
        for request in lost:
            self._fail(request, backend.index)
        self._at(self.now_s + self.fleet.noticed_after_s, self._notice, False)
        if self.fleet.back_s is not None:
            self._at(self.fleet.back_s, self._revive)

    def _revive(self) -> None:
        self.backends[0].dead = False
        self._at(self.now_s + self.fleet.noticed_after_s, self._notice, True)

    def _notice(self, up: bool) -> None:
        self.seen[0].up = up

    def _scrape(self) -> None:
        assert self._placer is not None
        for backend, seen in zip(self.backends, self.seen, strict=True):
            gauges = backend.engine.gauges()
            seen.running, seen.waiting, seen.kv_usage = gauges.running, gauges.waiting, gauges.kv_usage_ratio
        self._placer.scraped(self.now_s)
        if self._open or self.now_s <= self._load.duration_s:
            self._at(self.now_s + self._placer.scrape_s, self._scrape)

    def _begin(self, backend: _Backend, now_s: float) -> None:
        """Start the next step, or run of steps."""
        engine = backend.engine
        backend.version += 1
        backend.busy = False
        if not engine.has_work:
            return
        steps = engine.steps_ahead()
        if steps > 0:
            backend.busy, backend.leap_began_s, backend.leap_steps = True, now_s, steps
            self._at(now_s + steps * engine.step_s, self._leapt, backend, backend.version)
            return
        result = engine.move(now_s)
        if result.idle and not result.finished:
            return  # its head can never be scheduled, as a real engine would hang
        backend.busy, backend.result = True, result
        self._at(result.ended_s, self._stepped, backend, backend.version)

    def _cut(self, backend: _Backend, now_s: float) -> None:
        """Somebody comes: a run of steps ends with the step under way."""
        if not backend.leap_steps:
            return
        done = min(backend.leap_steps, math.ceil((now_s - backend.leap_began_s) / backend.engine.step_s - 1e-9))
        backend.leap_steps = max(done, 0)
        backend.version += 1
        self._at(
            backend.leap_began_s + backend.leap_steps * backend.engine.step_s, self._leapt, backend, backend.version
        )
        if backend.leap_steps:
            self._leap(backend)
        backend.leap_steps = 0

    def _leap(self, backend: _Backend) -> None:
        leap = backend.engine.leap(backend.leap_steps)
        self._gaps[round(leap.step_s, 4)] += leap.steps * leap.running
        backend.leap_steps = 0

    def _leapt(self, backend: _Backend, version: int) -> None:
        if version != backend.version:
            return
        if backend.leap_steps:
            self._leap(backend)
        self._begin(backend, self.now_s)

    def _stepped(self, backend: _Backend, version: int) -> None:
        if version != backend.version:
            return
        result = backend.result
        assert result is not None and self._placer is not None
        backend.result = None
        for gap_s, count in result.gaps:
            self._gaps[round(gap_s, 4)] += count
        for name, cached_tokens in result.first:
            outcome = self._outcomes[int(name)]
            if outcome.first_token_s is None:
                outcome.first_token_s = self.now_s
                outcome.cached_tokens = cached_tokens
                self._placer.first_token(outcome.request, backend.index, self.now_s)
        for finished in result.finished:
            request = backend.requests.pop(finished.request_id)
            outcome = self._outcomes[request.number]
            outcome.finished_s = self.now_s
            outcome.output_tokens = finished.output_tokens
            self._placer.finished(request, backend.index, outcome, self.now_s)
            self._after(request, self.now_s)
        self._begin(backend, self.now_s)

    def _after(self, request: Request, now_s: float) -> None:
        self._open -= 1
        known = len(request.hashes)
        pause_s = self.traffic.answered(request)
        self._known.update(request.session.hashes[known:])
        if pause_s is not None and now_s + pause_s <= self._load.duration_s:
            self._at(now_s + pause_s, self._ask, request.session)

    def _at(self, moment_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (moment_s, self._order, call, arguments))


class AtOnce:
    """A placer around a policy that never holds a request back."""

    def __init__(self, lab: Lab, policy: Any) -> None:
        self.name: str = policy.name
        self.scrape_s: float = policy.scrape_s
        self._lab = lab
        self._policy = policy
        self._seen: Sequence[Seen] = lab.seen

    def arrived(self, request: Request, now_s: float) -> None:
        index = self._policy.place(request, self._seen, now_s)
        seen = self._seen[index]
        seen.in_flight += 1
        self._lab.send(request, index, now_s)

    def first_token(self, request: Request, backend: int, now_s: float) -> None:
        return

    def finished(self, request: Request, backend: int, outcome: Outcome, now_s: float) -> None:
        self._forget(request, backend)

    def failed(self, request: Request, backend: int, now_s: float) -> None:
        """The client tries again, as the SDKs do."""
        self._forget(request, backend)
        self.arrived(request, now_s)

    def scraped(self, now_s: float) -> None:
        return

    def _forget(self, request: Request, backend: int) -> None:
        seen = self._seen[backend]
        seen.in_flight -= 1
