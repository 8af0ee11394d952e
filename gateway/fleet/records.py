"""What is known of the backends, for metrics and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.fleet.breaker import BreakerState
from gateway.fleet.ledger import Ledger
from gateway.fleet.troubles import Trouble, TroubleRecord
from gateway.types import Condition, Health


@dataclass(frozen=True, slots=True)
class KvRecord:
    """The KV cache of one backend, or of one of its engines. ``usage_ratio`` is of the capacity."""

    engines: int
    block_size_tokens: int
    capacity_blocks: int
    used_blocks: int
    reserved_blocks: int
    free_blocks: int
    foreign_blocks: int
    shared_blocks: int
    capacity_tokens: int
    used_tokens: int
    reserved_tokens: int
    free_tokens: int
    usage_ratio: float
    virtual: bool
    stale: bool


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine of a backend, by the name that vLLM gives it in the label ``engine``. Of a server that chooses the
    engine itself ``in_flight``, and what is foreign and shared, are as exact as a guess can be."""

    engine: str
    in_flight: int
    running: int | None
    waiting: int | None
    kv: KvRecord | None


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A name on one backend: ``max_model_len_tokens`` as the server says, ``window_tokens`` as requests can use it."""

    id: str
    root: str | None
    parent: str | None
    max_model_len_tokens: int | None
    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class BackendRecord:
    """All that is known of one backend, for metrics and the status page. ``kv`` is ``None`` while unknown."""

    name: str
    url: str
    health: Health
    breaker: BreakerState
    draining: bool
    error: str | None
    version: str | None
    models: tuple[ModelRecord, ...]
    in_flight: int
    running: int | None
    waiting: int | None
    kv: KvRecord | None
    age_s: float | None
    restarts: int
    scrapes: int
    scrape_failures: int
    prefill_tokens_per_s: float | None
    output_tokens_per_s: float | None
    first_byte_s: float | None
    loras: tuple[str, ...]
    pin_ranks: bool = False
    engines: tuple[EngineRecord, ...] = ()
    condition: Condition = Condition.UP
    troubles: tuple[TroubleRecord, ...] = ()
    troubles_ever: tuple[Trouble, ...] = ()
    overloads: int = 0
    ejections: int = 0
    prefix_hit_ratio: float | None = None


def kv_record(ledgers: Sequence[Ledger], stale: bool) -> KvRecord | None:
    """The caches of these engines together; ``None`` while the size of one is unknown, or its use was never seen."""
    capacities = [ledger.capacity for ledger in ledgers if ledger.observed_s is not None]
    known = [capacity for capacity in capacities if capacity is not None]
    if not known or len(known) < len(ledgers):
        return None
    size = known[0].block_size_tokens
    capacity = sum(item.blocks for item in known)
    used = sum(ledger.used_blocks for ledger in ledgers)
    reserved = sum(ledger.reserved_blocks for ledger in ledgers)
    free = sum(max(0, item.blocks - ledger.used_blocks) for item, ledger in zip(known, ledgers, strict=True))
    return KvRecord(
        engines=sum(item.engines for item in known),
        block_size_tokens=size,
        capacity_blocks=capacity,
        used_blocks=used,
        reserved_blocks=reserved,
        free_blocks=free,
        foreign_blocks=sum(ledger.foreign_blocks for ledger in ledgers),
        shared_blocks=sum(ledger.shared_blocks for ledger in ledgers),
        capacity_tokens=capacity * size,
        used_tokens=used * size,
        reserved_tokens=reserved * size,
        free_tokens=free * size,
        usage_ratio=used / capacity,
        virtual=known[0].virtual,
        stale=stale,
    )
