"""The fleet and the queue as gauges. What is unknown has no sample: an absent series is not a zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from gateway.fleet.breaker import BreakerState
from gateway.fleet.kvevents.listener import KvEventsRecord
from gateway.fleet.records import BackendRecord
from gateway.fleet.troubles import Trouble
from gateway.observe.metrics import Gauge
from gateway.routing.feeds import Knowledge
from gateway.types import Condition, Health

if TYPE_CHECKING:
    from gateway.planner.gpus import GpuReading

BREAKER = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}

KV = {
    "kv_capacity_blocks": ("capacity_blocks", "KV blocks that requests can use (without vLLM's null block)."),
    "kv_used_blocks": ("used_blocks", "KV blocks in use, as the ledger knows now."),
    "kv_reserved_blocks": ("reserved_blocks", "KV blocks in use and those running requests will still need."),
    "kv_free_blocks": ("free_blocks", "KV blocks that could be allocated now."),
    "kv_foreign_blocks": ("foreign_blocks", "KV blocks in use by traffic that is not ours."),
    "kv_capacity_tokens": ("capacity_tokens", "Tokens the KV cache holds."),
    "kv_used_tokens": ("used_tokens", "Tokens' worth of KV cache in use."),
    "kv_free_tokens": ("free_tokens", "Tokens' worth of KV cache that could be allocated now."),
    "kv_usage_ratio": ("usage_ratio", "Used share of the KV cache, 0 to 1; absent while the observation is stale."),
}


# Of each engine of a backend with several. Sums over a backend's engines are the backend's own gauges.
ENGINE_KV = {
    "engine_kv_capacity_blocks": ("capacity_blocks", "KV blocks of an engine that requests can use."),
    "engine_kv_used_blocks": ("used_blocks", "KV blocks of an engine in use, as its ledger knows now."),
    "engine_kv_reserved_blocks": ("reserved_blocks", "Those, and what running requests will still need there."),
    "engine_kv_usage_ratio": ("usage_ratio", "Used share of an engine's KV cache; absent while stale."),
}


def fleet_gauges(records: Iterable[BackendRecord]) -> Iterator[Gauge]:
    """Readings of every backend, labelled ``backend``."""
    for record in records:
        label = (("backend", record.name),)
        yield Gauge("backend_up", "Whether the backend answers (1) or not (0).", record.health is Health.UP, label)
        yield Gauge(
            "backend_breaker_open",
            "Circuit breaker: 0 closed, 0.5 one request may try, 1 open.",
            BREAKER[record.breaker],
            label,
        )
        yield Gauge("backend_draining", "Whether no more is placed there.", record.draining, label)
        for condition in Condition:
            text = "How the backend stands: 1 for the one condition that is true."
            yield Gauge(
                "backend_condition", text, record.condition is condition, (*label, ("condition", condition.value))
            )
        troubles = {trouble.kind for trouble in record.troubles}
        for kind in Trouble:
            text = "Whether something is wrong with what the backend says of itself, by kind."
            yield Gauge("backend_trouble", text, kind in troubles, (*label, ("kind", kind.value)))
        text = "Answers of 503 by which the backend said that it takes no more for now."
        yield Gauge("backend_overloads", text, record.overloads, label)
        yield Gauge("backend_ejections", "Rests as an outlier among its peers.", record.ejections, label)
        if record.prefix_hit_ratio is not None:
            text = "Share of all prompt tokens that the prefix cache had lately, by the backend's own counters."
            yield Gauge("backend_prefix_cache_hit_ratio", text, record.prefix_hit_ratio, label)
        yield Gauge("requests_in_flight", "Our requests at the backend.", record.in_flight, label)
        yield Gauge("backend_restarts", "Restarts of the backend seen.", record.restarts, label)
        for model in record.models:
            if model.window_tokens is not None:
                yield Gauge(
                    "backend_window_tokens",
                    "Largest prompt and answer of a request: max_model_len, or less if the KV cache holds less.",
                    model.window_tokens,
                    (*label, ("model", model.id)),
                )
        if record.running is not None:
            yield Gauge("backend_running_requests", "vLLM's own gauge.", record.running, label)
        if record.waiting is not None:
            yield Gauge("backend_waiting_requests", "vLLM's own gauge.", record.waiting, label)
        if record.age_s is not None:
            yield Gauge("kv_observation_age_seconds", "Age of the last reading of /metrics.", record.age_s, label)
        if record.prefill_tokens_per_s is not None:
            text = "Prompt tokens a second, as learned from first bytes."
            yield Gauge("backend_prefill_tokens_per_second", text, record.prefill_tokens_per_s, label)
        if record.output_tokens_per_s is not None:
            text = "Output tokens a second of one sequence, as learned from streams."
            yield Gauge("backend_output_tokens_per_second", text, record.output_tokens_per_s, label)
        if record.first_byte_s is not None:
            text = "Seconds until any first byte, beside those that its prompt takes, as learned."
            yield Gauge("backend_first_byte_seconds", text, record.first_byte_s, label)
        yield from _engine_gauges(record)
        if record.kv is None:
            continue
        for name, (attribute, text) in KV.items():
            if name != "kv_usage_ratio" or not record.kv.stale:
                yield Gauge(name, text, getattr(record.kv, attribute), label)


def _engine_gauges(record: BackendRecord) -> Iterator[Gauge]:
    """Readings of each engine of a backend with several, labelled ``backend`` and ``engine``."""
    for engine in record.engines if len(record.engines) > 1 else ():
        label = (("backend", record.name), ("engine", engine.engine))
        yield Gauge("engine_requests_in_flight", "Our requests at the engine.", engine.in_flight, label)
        if engine.running is not None:
            yield Gauge("engine_running_requests", "vLLM's own gauge.", engine.running, label)
        if engine.waiting is not None:
            yield Gauge("engine_waiting_requests", "vLLM's own gauge.", engine.waiting, label)
        if engine.kv is None:
            continue
        for name, (attribute, text) in ENGINE_KV.items():
            if name != "engine_kv_usage_ratio" or not engine.kv.stale:
                yield Gauge(name, text, getattr(engine.kv, attribute), label)


def queue_gauges(stats: Mapping[str, float]) -> Iterator[Gauge]:
    """Readings of the queue (``Gate.stats``)."""
    yield Gauge("queue_requests", "Requests waiting for a place.", stats["waiting_requests"])
    yield Gauge("queue_bytes", "Bytes of their bodies.", stats["waiting_bytes"])
    yield Gauge("queue_tokens", "Prompt tokens of theirs.", stats["waiting_tokens"])
    text = "Requests first in line for some backends that would fit, but leave room to conversations about to return."
    yield Gauge("queue_kept_out", text, stats["kept_out_requests"])
    text = "Prompt tokens that were expected to be cached, of answers that tell."
    yield Gauge("prefix_expected_tokens", text, stats["prefix_expected_tokens"])
    text = "Those of them that were."
    yield Gauge("prefix_confirmed_tokens", text, stats["prefix_confirmed_tokens"])
    text = "Of the tokens expected to be cached, those at backends whose KV events tell all."
    yield Gauge("prefix_reported_expected_tokens", text, stats["reported_expected_tokens"])
    text = "Those of them that were."
    yield Gauge("prefix_reported_confirmed_tokens", text, stats["reported_confirmed_tokens"])


def keeping_gauges(kept_blocks: Mapping[str, int]) -> Iterator[Gauge]:
    """What is kept of each backend's cache for conversations about to return."""
    for backend, blocks in kept_blocks.items():
        text = "KV blocks kept from prompts that are not cached, for conversations about to return."
        yield Gauge("backend_kept_blocks", text, blocks, (("backend", backend),))


KNOWN = {Knowledge.NONE: 0.0, Knowledge.PARTIAL: 0.5, Knowledge.EXACT: 1.0}

KV_EVENTS = {
    "kv_events_messages": ("messages", "Messages with KV events taken in, replayed ones included."),
    "kv_events_received": ("events", "KV events in them."),
    "kv_events_ignored": ("ignored_events", "Those of them about other tiers than the GPU, or other kinds of caches."),
    "kv_events_odd": ("odd_events", "Those of them that could not be understood."),
    "kv_events_garbled": ("garbled_messages", "Messages that were none."),
    "kv_events_gaps": ("gaps", "Times that messages were missing."),
    "kv_events_replays": ("replays", "Times that a publisher was asked to send messages again."),
    "kv_events_lost": ("lost", "Gaps that no replay could fill: what was known was forgotten."),
    "kv_events_restarts": ("restarts", "Times that another publisher was heard where one had been."),
    "kv_events_overflows": ("overflows", "Times that more blocks were stored than there are: all was forgotten."),
    "kv_events_orphaned_blocks": ("orphaned_blocks", "Blocks stored behind blocks that are not known."),
    "kv_known_blocks": ("blocks", "Different KV blocks known to be cached."),
}


def kv_event_gauges(records: Iterable[KvEventsRecord]) -> Iterator[Gauge]:
    """What is heard of KV events, by ``backend`` and ``engine``."""
    for record in records:
        labels = (("backend", record.backend), ("engine", str(record.rank)))
        text = "How much of the engine's prefix cache is known by its events: 0 nothing, 0.5 a part, 1 all."
        yield Gauge("kv_events_known", text, KNOWN[record.knowledge], labels)
        for name, (attribute, help_text) in KV_EVENTS.items():
            yield Gauge(name, help_text, getattr(record, attribute), labels)
        if record.lag_s is not None:
            text = "Age of the newest message when it was heard, by both machines' clocks."
            yield Gauge("kv_events_lag_seconds", text, record.lag_s, labels)


def learned_gauges(output_tokens: Mapping[str, int]) -> Iterator[Gauge]:
    """What answers are expected to take, by model."""
    for model, tokens in output_tokens.items():
        text = "Output tokens reserved for an answer whose budget does not bound it: learned from those before."
        yield Gauge("expected_output_tokens", text, tokens, (("model", model),))


def counting_gauges(kept_bytes: Mapping[str, int]) -> Iterator[Gauge]:
    """What counting keeps of requests, by cache."""
    for cache, size_bytes in kept_bytes.items():
        text = "Memory, about, that counting keeps so that what was counted before is not counted again."
        yield Gauge("counting_cache_bytes", text, size_bytes, (("cache", cache),))


def gpu_gauges(reading: GpuReading | None) -> Iterator[Gauge]:
    """The GPUs of this machine, by UUID; nothing while there is no reading."""
    if reading is None:
        return
    from gateway.planner.gpus import METRICS, samples

    for sample in samples(reading):
        yield Gauge(
            sample.name.removeprefix("kvgate_"), METRICS[sample.name], sample.value, tuple(sample.labels.items())
        )
