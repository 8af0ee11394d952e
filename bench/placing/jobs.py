"""One policy under one load: a job, which runs in any process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.placing.baselines import AtOnce, FlowControl
from bench.placing.lab import Lab
from bench.placing.ours import Gateway
from bench.placing.policies import (
    CacheAware,
    EndpointPicker,
    LeastInFlight,
    NoGateway,
    Overlap,
    PowerOfTwo,
    RoundRobin,
)
from bench.placing.report import Figures, figures
from bench.placing.scenarios import Scenario, without_flood
from bench.placing.terms import Placer
from gateway.config import PlacingSettings

Make = Callable[[Lab, bool], Placer]


ALL_BLOCKS = 1 << 20
# Who is not placed in 5 s is refused, but for batches, which have time.
STRICT = PlacingSettings(queue_timeout_s=5.0, class_timeouts_s={"low": 300.0})


def _picker(name: str, lab: Lab, most_blocks: int = ALL_BLOCKS, *, events: bool = False) -> EndpointPicker:
    capacities = [seen.capacity_blocks for seen in lab.seen]
    return EndpointPicker(name, capacities, most_blocks, lab.cached_blocks if events else None)


PLACERS: dict[str, Make] = {
    "none": lambda lab, told: AtOnce(lab, NoGateway(), told),
    "round-robin": lambda lab, told: AtOnce(lab, RoundRobin(), told),
    "least": lambda lab, told: AtOnce(lab, LeastInFlight(), told),
    "two": lambda lab, told: AtOnce(lab, PowerOfTwo(), told),
    "cache-aware": lambda lab, told: AtOnce(lab, CacheAware("cache aware (sglang)", len(lab.seen), 32, 1.1, 0.5), told),
    "cache-aware-vllm": lambda lab, told: AtOnce(
        lab, CacheAware("cache aware (vllm)", len(lab.seen), 64, 1.5, 0.3), told
    ),
    "overlap": lambda lab, told: AtOnce(lab, Overlap(len(lab.seen), lab.cached_blocks), told),
    "picker": lambda lab, told: AtOnce(lab, _picker("picker (llm-d)", lab, 256), told),
    "picker-tuned": lambda lab, told: AtOnce(lab, _picker("picker, tuned", lab), told),
    "picker-precise": lambda lab, told: AtOnce(lab, _picker("picker, KV events", lab, events=True), told),
    "picker-flow": lambda lab, told: FlowControl(lab, _picker("picker, tuned", lab), told),
    "kvgate": lambda lab, told: Gateway(lab, PlacingSettings()),
    "kvgate-strict": lambda lab, told: Gateway(lab, STRICT, "kvgate, 5 s"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One policy under one load. ``calm``: without the flood that its scenario has."""

    scenario: Scenario
    level: float
    policy: str
    seed: int
    calm: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """What a job found, and what it took (seconds of CPU)."""

    job: Job
    figures: Figures
    cpu_s: float


def play(job: Job) -> Done:
    """Run a job."""
    gc.disable()  # nothing here is a cycle, and looking for some among millions of ids takes a third of the time
    began_s = time.process_time()
    found = without_flood(job.scenario) if job.calm else job.scenario
    lab = Lab(found.fleet, found.load, job.seed, found.window_tokens)
    run = lab.run(PLACERS[job.policy](lab, found.told))
    return Done(job, figures(run, found.load.duration_s), time.process_time() - began_s)
