"""Every metric of the code with its labels: the registry's, and the gauges of a fleet that is wholly known."""

from __future__ import annotations

from gateway.fleet.breaker import BreakerState
from gateway.fleet.kvevents.listener import KvEventsRecord
from gateway.fleet.records import BackendRecord, EngineRecord, KvRecord, ModelRecord
from gateway.observe.gauges import (
    counting_gauges,
    fleet_gauges,
    gpu_gauges,
    keeping_gauges,
    kv_event_gauges,
    learned_gauges,
    queue_gauges,
)
from gateway.observe.metrics import Gauge, Metrics
from gateway.planner.gpus import Gpu, GpuProcess, GpuReading
from gateway.routing.feeds import Knowledge
from gateway.types import Health

KV = KvRecord(
    engines=1,
    block_size_tokens=16,
    capacity_blocks=10,
    used_blocks=4,
    reserved_blocks=5,
    free_blocks=6,
    foreign_blocks=1,
    shared_blocks=0,
    capacity_tokens=160,
    used_tokens=64,
    reserved_tokens=80,
    free_tokens=96,
    usage_ratio=0.4,
    virtual=False,
    stale=False,
)

RECORD = BackendRecord(
    name="one",
    url="http://127.0.0.1:1",
    health=Health.UP,
    breaker=BreakerState.CLOSED,
    draining=False,
    error=None,
    version="0.32.0",
    models=(ModelRecord("m", None, None, 100, 100),),
    in_flight=1,
    running=1,
    waiting=0,
    kv=KV,
    age_s=0.5,
    restarts=0,
    scrapes=1,
    scrape_failures=0,
    prefill_tokens_per_s=8000.0,
    output_tokens_per_s=40.0,
    first_byte_s=0.05,
    loras=(),
    prefix_hit_ratio=0.5,
    engines=tuple(EngineRecord(rank, 1, 1, 0, KV) for rank in "01"),
)

EVENTS = KvEventsRecord(
    backend="one",
    rank=0,
    endpoint="tcp://127.0.0.1:5557",
    replay_endpoint=None,
    connected=True,
    knowledge=Knowledge.EXACT,
    blocks=3,
    block_size_tokens=16,
    messages=2,
    events=5,
    ignored_events=0,
    odd_events=0,
    garbled_messages=0,
    orphaned_blocks=0,
    gaps=0,
    replays=1,
    lost=0,
    restarts=0,
    overflows=0,
    lag_s=0.001,
    age_s=1.0,
)

GPUS = GpuReading((Gpu(0, "GPU-1", "L4", 3, 1, 2, 0.5, 60.0, "8.9", (GpuProcess(1, 1, "vllm"),)),), "nvml")


def every_gauge() -> list[Gauge]:
    """What a gateway exports that knows all there is to know."""
    waiting = {"waiting_requests": 0, "waiting_bytes": 0, "waiting_tokens": 0, "kept_out_requests": 0}
    prefixes = {"prefix_expected_tokens": 0, "prefix_confirmed_tokens": 0}
    prefixes |= {"reported_expected_tokens": 0, "reported_confirmed_tokens": 0}
    queue = [*queue_gauges(waiting | prefixes), *keeping_gauges({"one": 1})]
    learned = [*learned_gauges({"m": 900}), *counting_gauges({"bodies": 1})]
    return [*fleet_gauges([RECORD]), *queue, *kv_event_gauges([EVENTS]), *learned, *gpu_gauges(GPUS)]


def metrics_of_the_code() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name → (``counter``, ``histogram`` or ``gauge``; labels). Counters with their ``_total``."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    metrics = Metrics()
    for metric in (value for value in vars(metrics).values() if hasattr(value, "describe")):
        for family in metric.describe():
            if family.type != "unknown":
                name = f"{family.name}_total" if family.type == "counter" else family.name
                found[name] = (family.type, tuple(getattr(metric, "_labelnames", ())))
    for gauge in every_gauge():
        found[f"kvgate_{gauge.name}"] = ("gauge", tuple(name for name, _ in gauge.labels))
    found["kvgate_build_info"] = ("gauge", ("version",))
    return found
