"""A server with several engines behind one address: what it costs not to reckon with who chooses the engine.

``python -m bench.ranks`` plays one load on simulated engines in virtual time, spread over them as vLLM spreads it
(``gateway/simulator/balancing.py``), in four ways: straight at the server; with the gateway taking the engines for one
cache (``sum``); with the gateway as it is, which sees the server as the engine it will choose next (``next``); and with
the gateway choosing the engine itself (``pinned``).
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from bench.accounting import percentile
from gateway.config import BackendSettings, FleetSettings, PlacingSettings
from gateway.fleet.backend import WatchedBackend
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.discovery import ModelCard
from gateway.fleet.reservation import Reservation
from gateway.fleet.targets import Target
from gateway.routing.need import groups_of
from gateway.routing.placer import Placer
from gateway.simulator.balancing import Balancer
from gateway.simulator.engine import Engine, EngineConfig, EngineRequest, StepResult
from gateway.types import Offer, Placed, Waiter

MODEL, BLOCK_TOKENS, WINDOW = "m", 16, 32768
SCRAPE_S = 1.0
WAYS = ("straight", "sum", "next", "pinned")


@dataclass(frozen=True, slots=True)
class Load:
    """``rate`` requests a second for ``duration_s``; one in ``large_every`` is of the second size. Sizes are prompt and
    output tokens."""

    rate: float
    duration_s: float
    small: tuple[int, int] = (700, 250)
    large: tuple[int, int] = (9000, 800)
    large_every: int = 8


@dataclass(slots=True)
class Job:
    """One request and its life. Times in seconds."""

    number: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    server: int
    sent_s: float | None = None
    scheduled_s: float | None = None
    first_s: float | None = None
    finished_s: float | None = None
    rank: int = 0
    reservation: Reservation | None = None


@dataclass(slots=True)
class Result:
    """``inside_s``: seconds that requests waited in the queues of the engines, in all."""

    way: str
    jobs: list[Job]
    preemptions: int
    inside_s: float
    most_waiting: int
    ended_s: float

    def first_byte_s(self, share: float) -> float:
        """A quantile of the time to the first byte."""
        return percentile([job.first_s - job.arrived_s for job in self.jobs if job.first_s is not None], share)


class Stand:
    """One server with ``count`` engines and ``servers`` API servers on a virtual clock, and one way to send to it."""

    def __init__(self, way: str, load: Load, count: int, servers: int, blocks: int, seed: int) -> None:
        self._way = way
        self._rng = random.Random(seed)
        self.now_s = 0.0
        config = EngineConfig(
            num_gpu_blocks=blocks + 1, block_size_tokens=BLOCK_TOKENS, max_model_len_tokens=WINDOW,
            enable_prefix_caching=False, prefill_tokens_per_s=8000.0, decode_tokens_per_s=40.0,
        )  # fmt: skip
        self.engines = [Engine(config) for _ in range(count)]
        self._gauges = [engine.gauges() for engine in self.engines]  # as of the last step
        self._balancers = [Balancer(self.engines, servers=servers, server=index) for index in range(servers)]
        self._busy = [False] * count
        self._blocks = blocks
        self.jobs = self._arrivals(load)
        self._events: list[tuple[float, int, str, int, StepResult | None]] = []
        self._order = 0
        self._inside_s = 0.0
        self._most_waiting = 0
        self._gateway = None if way == "straight" else _Gateway(self, way, count, blocks)

    def _arrivals(self, load: Load) -> list[Job]:
        jobs: list[Job] = []
        at_s = 0.0
        while (at_s := at_s + self._rng.expovariate(load.rate)) < load.duration_s:
            prompt, output = load.large if self._rng.randrange(load.large_every) == 0 else load.small
            spread = self._rng.uniform(0.5, 1.5)
            server = self._rng.randrange(len(self._balancers))
            jobs.append(Job(len(jobs), at_s, max(1, int(prompt * spread)), max(1, int(output * spread)), server))
        return jobs

    def run(self) -> Result:
        """Play the load to its end."""
        for job in self.jobs:
            self._at(job.arrived_s, "arrive", job.number)
        if self._gateway is not None:
            self._at(SCRAPE_S, "scrape", 0)
        left = len(self.jobs)
        while left:
            self.now_s, _, what, index, result = heapq.heappop(self._events)
            if what == "arrive":
                if self._gateway is None:
                    self.send(self.jobs[index], None)
                else:
                    self._gateway.arrived(self.jobs[index])
            elif what == "scrape" and self._gateway is not None:
                self._gateway.scraped([item.used_blocks for item in self._gauges],
                                      [item.running + item.waiting for item in self._gauges])  # fmt: skip
                self._at(self.now_s + SCRAPE_S, "scrape", 0)
            elif result is not None:
                left -= self._stepped(index, result)
        preemptions = sum(engine.counters.preemptions for engine in self.engines)
        return Result(self._way, self.jobs, preemptions, self._inside_s, self._most_waiting, self.now_s)

    def send(self, job: Job, rank: int | None) -> None:
        """Hand a request to the server, for engine ``rank`` or whichever it takes."""
        balancer = self._balancers[job.server]
        job.rank = balancer.choose(self.now_s) if rank is None else rank
        balancer.sent(job.rank)
        job.sent_s = self.now_s
        prompt = range(job.number * WINDOW, job.number * WINDOW + job.prompt_tokens)
        request = EngineRequest(str(job.number), prompt, range(job.output_tokens))
        self.engines[job.rank].add(request, self.now_s)
        if not self._busy[job.rank]:
            self._step(job.rank)

    def _step(self, rank: int) -> None:
        engine = self.engines[rank]
        self._busy[rank] = engine.has_work
        if not engine.has_work:
            return
        result = engine.step(self.now_s)
        # A head of the queue that does not fit an idle engine would spin: look again a little later.
        self._at(result.ended_s if not result.idle else self.now_s + 0.05, "step", rank, result)

    def _stepped(self, rank: int, result: StepResult) -> int:
        """Take in what a step did. Returns how many requests it ended."""
        self._gauges[rank] = result.gauges
        self._most_waiting = max(self._most_waiting, result.gauges.waiting)
        for output in result.outputs:
            job = self.jobs[int(output.request_id)]
            if job.first_s is None:
                job.first_s = self.now_s
                if job.reservation is not None:
                    job.reservation.first_byte()
            if job.reservation is not None:
                job.reservation.grow(1)
        for item in result.finished:
            job = self.jobs[int(item.request_id)]
            job.finished_s, job.scheduled_s = self.now_s, item.scheduled_s
            if item.scheduled_s is not None and job.sent_s is not None:
                self._inside_s += item.scheduled_s - job.sent_s
            self._balancers[job.server].finished(rank)
            if job.reservation is not None:
                job.reservation.release()
        if result.finished and self._gateway is not None:
            self._gateway.decide()
        self._step(rank)
        return len(result.finished)

    def _at(self, moment_s: float, what: str, index: int, result: StepResult | None = None) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment_s, self._order, what, index, result))


class _Gateway:
    """The gateway's own placer and ledgers. For ``sum`` the server is taken for one engine as large as all together."""

    def __init__(self, stand: Stand, way: str, count: int, blocks: int) -> None:
        self.stand, self.way = stand, way
        self.waiting: dict[int, Job] = {}
        self.touched: dict[str, Target] = {}
        self.placer, self.settings = Placer(PlacingSettings()), PlacingSettings()
        settings = BackendSettings(url="http://server", name="server", pin_ranks=way == "pinned")
        self.backend = WatchedBackend(
            settings, FleetSettings(), lambda: self.stand.now_s, lambda: None, self._touch, self._load
        )
        capacity = KvCapacity(count, blocks, BLOCK_TOKENS)
        if way == "sum":
            capacity = KvCapacity(1, count * blocks, BLOCK_TOKENS)
        self.backend.found((ModelCard(MODEL, None, None, WINDOW),), capacity)
        self.scraped([0] * count, [0] * count)

    def _touch(self, target: Target, resting: bool) -> None:
        self.touched[target.name] = target

    def _load(self, target: Target) -> None:
        self.touched[target.name] = target

    def arrived(self, job: Job) -> None:
        window = self.backend.windows[MODEL]
        offers = [Offer(target.name, window, job.output_tokens, False) for target in self.backend.targets]
        waiter = Waiter(
            job.number, self.stand.now_s, 1e9, groups_of(offers, job.prompt_tokens, 1, self.settings), model=MODEL
        )
        self.waiting[job.number] = job
        self._see()
        self._carry_out(self.placer.add(waiter, self.stand.now_s))

    def scraped(self, used_blocks: Sequence[int], requests: Sequence[int]) -> None:
        if self.way == "sum":
            used_blocks, requests = [sum(used_blocks)], [sum(requests)]
        self.backend.engines.begin_scrape()
        self.backend.engines.reconcile(used_blocks, requests, self.stand.now_s)
        self.decide()

    def decide(self) -> None:
        self._see()
        self._carry_out(self.placer.decide(self.stand.now_s))

    def _see(self) -> None:
        touched, self.touched = self.touched, {}
        self.placer.see([target.view(self.stand.now_s) for target in touched.values()])

    def _carry_out(self, decisions: Sequence[object]) -> None:
        for decision in decisions:
            assert isinstance(decision, Placed), decision
            job = self.waiting.pop(decision.sequence)
            self.placer.remove(decision.sequence)
            rank = next(item.rank for item in self.backend.targets if item.name == decision.offer.backend)
            job.reservation = self.backend.reserve(decision.need, job.output_tokens, rank=rank)
            self.stand.send(job, rank)
        if decisions and self.waiting:  # another engine may be next
            self.decide()


def play(way: str, load: Load, count: int, servers: int, blocks: int, seed: int) -> Result:
    """One load in one way."""
    return Stand(way, load, count, servers, blocks, seed).run()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=4, help="engines of the server (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=1000, help="KV blocks of each (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the load (default %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 1.4, 1.8], help="requests a second")
    parser.add_argument("--seeds", type=int, default=3, help="runs with other arrivals, to be averaged (%(default)s)")
    options = parser.parse_args()
    print("rate  API servers  way        preemptions  s waited in engines  TTFT p50    p99   requests/s")
    for rate in options.rates:
        for servers in (1, options.engines):
            for way in WAYS:
                load = Load(rate, 60 * options.minutes)
                results = [
                    play(way, load, options.engines, servers, options.blocks, seed) for seed in range(options.seeds)
                ]
                print(
                    f"{rate:4.1f}  {servers:11}  {way:9}  {mean(item.preemptions for item in results):11.1f}  "
                    f"{mean(item.inside_s for item in results):19.1f}  "
                    f"{mean(item.first_byte_s(0.5) for item in results):8.2f}  "
                    f"{mean(item.first_byte_s(0.99) for item in results):5.1f}  "
                    f"{mean(len(item.jobs) / item.ended_s for item in results):10.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
