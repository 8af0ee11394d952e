"""The laboratory: backends on a virtual clock, traffic that reacts to answers, one policy that places.

Nothing waits for real: a heap holds what happens next. A backend whose batch only decodes takes all steps until its
next event at once; a request that comes meanwhile cuts the run after the step then under way.

Clients behave as real ones do. Told that its prompt does not fit (400), an agent compacts and asks again, twice at
most; others give up, and end their session. Told to come later, or left without an answer, they try twice more, after
half a second and a second, as the SDKs do; a router that saw a connection fail before the first byte has tried
elsewhere before that. A request that ended without an answer is lost, and its session goes on as if it had got one, so
that every policy meets the same sessions.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.placing.oracle import Boundless, Pooled
from bench.placing.policies import Seen
from bench.placing.terms import Fleet, Outcome, Placer, Run
from bench.placing.traffic import Load, Request, Session, Traffic
from gateway.simulator.engine import EngineRequest
from gateway.simulator.leaping import LeapingEngine, Move

MOST_CONNECTIONS = 3  # that a router tries for one request
BACKOFF_S = (0.5, 1.0)


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
    observed: int = -1


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
        self._boundless = Boundless()
        self._pooled = Pooled(sum(seen.capacity_blocks for seen in self.seen))
        self._load = load
        self.now_s = 0.0
        self._placer: Placer | None = None

    def run(self, placer: Placer, most_s: float | None = None) -> Run:
        """Play the load to its end; sessions still open ``most_s`` after its end (a quarter of it) are cut off."""
        self._placer = placer
        for moment_s, session in self.traffic.arrivals():
            self._at(moment_s, self._ask, session)
        if not placer.lazy:
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
        outcomes = [item for item in self._outcomes.values() if not _foreign(item.request)]
        return Run(placer.name, outcomes, preempted, self._gaps, len(self.backends), self.now_s)

    def send(self, request: Request, index: int, now_s: float) -> None:
        """Hand a request to a backend (called by the placer)."""
        backend = self.backends[index]
        if backend.dead:
            self._at(now_s, self._lose, request, index)
            return
        engine = backend.engine
        if request.prompt_tokens + 1 > engine.config.max_model_len_tokens:
            self._at(now_s, self._return, request, index)
            return
        self._touch(backend)
        self._cut(backend, now_s)
        backend.requests[request.id] = request
        engine.add_hashed(EngineRequest(request.id, request.prompt, request.answer, "stop"), now_s, request.hashes)
        if not backend.busy:
            self._begin(backend, now_s)

    def refuse(self, request: Request, now_s: float) -> None:
        """A request is refused by the placer: because it fits no window, or because there is no room for it to wait."""
        if request.prompt_tokens + 1 > max(seen.window_tokens for seen in self.seen):
            self._overflow(request)
        else:
            self._try_again(request, refused=True)

    def cached_blocks(self, index: int, hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt a backend has, as KV events would tell."""
        return len(self.backends[index].engine.pool.find(hashes))

    def observe(self, now_s: float) -> None:
        """Bring ``seen`` to the last scrape before now, for a placer that asks only now and then."""
        for backend in self.backends:
            self._touch(backend)

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
        outcome = self._outcomes[request.number] = Outcome(request)
        self._open += 1
        if _foreign(request):
            self.send(request, 0, self.now_s)
            return
        outcome.oracle_tokens = self._boundless.asked(request.hashes)
        outcome.pooled_tokens = self._pooled.asked(request.hashes)
        self._arrive(request)

    def _arrive(self, request: Request) -> None:
        assert self._placer is not None
        self._placer.arrived(request, self.now_s)

    def _lose(self, request: Request, index: int) -> None:
        """Its backend is gone."""
        assert self._placer is not None
        outcome = self._outcomes[request.number]
        if _foreign(request):
            self._end(outcome)
            return
        self._placer.failed(request, index, self.now_s)
        outcome.connections += 1
        if self._placer.retries and outcome.first_token_s is None and outcome.connections < MOST_CONNECTIONS:
            self._arrive(request)
        else:
            self._try_again(request, refused=False)

    def _return(self, request: Request, index: int) -> None:
        """Its backend's window is too small."""
        assert self._placer is not None
        if _foreign(request):
            self._end(self._outcomes[request.number])
            return
        self._placer.returned(request, index, self.now_s)
        self._overflow(request, self.backends[index].engine.config.max_model_len_tokens)

    def _overflow(self, request: Request, window_tokens: int | None = None) -> None:
        outcome = self._outcomes[request.number]
        outcome.overflows += 1
        if request.session.kind.name == "agent" and outcome.overflows <= 2:
            self.traffic.compact(request.session, (window_tokens or max(seen.window_tokens for seen in self.seen)) // 2)
            self.traffic.ask_again(request)
            outcome.oracle_tokens = self._boundless.asked(request.hashes)
            outcome.pooled_tokens = self._pooled.asked(request.hashes)
            self._at(self.now_s + BACKOFF_S[0], self._arrive, request)
        else:
            outcome.refused = True
            request.session.turns_left = 0
            self._end(outcome)

    def _try_again(self, request: Request, *, refused: bool) -> None:
        """The client asks again, if it has not done so twice; the answer it had begun to get is void."""
        outcome = self._outcomes[request.number]
        outcome.first_token_s, outcome.connections = None, 0
        if outcome.tries < len(BACKOFF_S):
            outcome.tries += 1
            self._at(self.now_s + BACKOFF_S[outcome.tries - 1], self._arrive, request)
            return
        outcome.refused, outcome.lost = refused, not refused
        self._end(outcome)

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
            self._lose(request, backend.index)
        self._at(self.now_s + self.fleet.noticed_after_s, self._notice, False)
        if self.fleet.back_s is not None:
            self._at(self.fleet.back_s, self._revive)

    def _revive(self) -> None:
        """It is up again, empty; the first request or the next health check finds that out."""
        self.backends[0].dead = False
        self._at(self.now_s + self.fleet.noticed_after_s, self._notice, True)

    def _notice(self, up: bool) -> None:
        self.seen[0].up = up

    def _scrape(self) -> None:
        assert self._placer is not None
        for backend in self.backends:
            self._read(backend)
        self._placer.scraped(self.now_s)
        if self._open or self.now_s <= self._load.duration_s:
            self._at(self.now_s + self._placer.scrape_s, self._scrape)

    def _read(self, backend: _Backend) -> None:
        seen, gauges = self.seen[backend.index], backend.engine.gauges()
        seen.running, seen.waiting, seen.kv_usage = gauges.running, gauges.waiting, gauges.kv_usage_ratio

    def _touch(self, backend: _Backend) -> None:
        """Before it changes: what was last scraped is how it stood until now, unless that was scraped already."""
        assert self._placer is not None
        if not self._placer.lazy:
            return
        scrape = int(self.now_s / self._placer.scrape_s)
        if scrape > backend.observed:
            backend.observed = scrape
            self._read(backend)

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
        self._touch(backend)
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
        self._touch(backend)
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
                if not _foreign(outcome.request):
                    self._placer.first_token(outcome.request, backend.index, self.now_s)
        for finished in result.finished:
            request = backend.requests.pop(finished.request_id)
            outcome = self._outcomes[request.number]
            outcome.finished_s = self.now_s
            outcome.output_tokens = finished.output_tokens
            outcome.backend = backend.index
            if not _foreign(request):
                self._placer.finished(request, backend.index, outcome, self.now_s)
            self._end(outcome)
        self._begin(backend, self.now_s)

    def _end(self, outcome: Outcome) -> None:
        """The client has its answer, or none; it may go on."""
        request = outcome.request
        self._open -= 1
        known, session = len(request.hashes), request.session
        pause_s = self.traffic.answered(request)
        if session.hashes and not _foreign(request):
            self._boundless.said(session.hashes, known)
            self._pooled.said(session.hashes)
        if pause_s is not None and self.now_s + pause_s <= self._load.duration_s:
            self._at(self.now_s + pause_s, self._ask, session)

    def _at(self, moment_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (moment_s, self._order, call, arguments))


def _foreign(request: Request) -> bool:
    return request.session.kind.name == "foreign"
