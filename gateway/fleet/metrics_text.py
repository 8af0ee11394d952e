"""What a vLLM server's Prometheus page says of it. Anything odd becomes unknown and is named, never an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.fleet.exposition import Families, Page, engine_and_value, labels_and_value, labels_of, value_of

# Both generations: `gpu_cache_usage_perc` is V0's and V1's name up to 0.10; 0.9 and 0.10 export both names at once.
USAGE_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CONFIG_NAME = "vllm:cache_config_info"
RUNNING_NAME = "vllm:num_requests_running"
WAITING_NAME = "vllm:num_requests_waiting"
LORA_NAME = "vllm:lora_requests_info"
SLEEP_NAME = "vllm:engine_sleep_state"
# In tokens. V1 up to 0.10 has the second names; 0.9 and 0.10 export both.
QUERIES_NAMES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HITS_NAMES = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
# Counters that only a new process sets back.
COUNTER_NAMES = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total")
START_NAME = "process_start_time_seconds"
# When the process made that counter, to the microsecond: no two processes have the same.
CREATED_NAME = "vllm:prompt_tokens_created"

FAMILIES = Families(
    (
        *USAGE_NAMES,
        CONFIG_NAME,
        RUNNING_NAME,
        WAITING_NAME,
        LORA_NAME,
        SLEEP_NAME,
        *QUERIES_NAMES,
        *HITS_NAMES,
        *COUNTER_NAMES,
        START_NAME,
        CREATED_NAME,
    )
)

_AWAKE = "awake"


class Oddity(StrEnum):
    """What a page can have wrong. The values are those of ``gateway.fleet.troubles.Trouble``."""

    NOT_METRICS = "not_metrics"  # the page is another one, or of no sensible size
    BAD_VALUE = "bad_value"  # NaN, negative, infinite, a share above 1, or no number
    DUPLICATE_ENGINE = "duplicate_engine"  # one engine label twice
    PARTIAL_ENGINES = "partial_engines"  # a part of the engines does not tell its use


@dataclass(frozen=True, slots=True)
class Reading:
    """What one scrape says. ``None`` is unknown, whatever the reason; ``odd`` names reasons that are no server's habit.

    ``engines`` are the data-parallel ranks this server reports for, ``labels`` what vLLM calls them, in the order of
    the ranks a request can ask for; there is one engine where nothing is said. ``blocks`` counts the KV blocks of all
    of them together, null blocks included (vLLM stamps the sum on each ``engine`` label). ``block_size_tokens`` is the
    smallest over KV groups and synced from the engine only since 0.24. ``cache_tokens`` is one engine's (0.24+).
    ``usage_ratio`` is 0…1 by engine label; ``running_by_engine``, ``waiting_by_engine`` are requests, ``None`` unless
    every engine told a sane number. ``overridden`` says ``--num-gpu-blocks-override`` was given, ``caches`` is
    whether prompt prefixes are kept. ``loras`` are the LoRA adapters that run or wait, of ``lora_slots`` at a time.
    ``awake`` is false while an engine sleeps (0.11+). ``queried_tokens`` were looked up in the prefix cache so far, and
    ``hit_tokens`` of them found. ``started_s`` and ``created_s`` tell one process from another.
    """

    engines: int = 1
    labels: tuple[str, ...] = ()
    blocks: int | None = None
    block_size_tokens: int | None = None
    cache_tokens: int | None = None
    usage_ratio: Mapping[str, float] | None = None
    running: int | None = None
    waiting: int | None = None
    running_by_engine: Mapping[str, int] | None = None
    waiting_by_engine: Mapping[str, int] | None = None
    overridden: bool = False
    caches: bool | None = None
    loras: frozenset[str] = frozenset()
    lora_slots: int | None = None
    awake: bool | None = None
    queried_tokens: float | None = None
    hit_tokens: float | None = None
    started_s: float | None = None
    created_s: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    odd: frozenset[Oddity] = frozenset()

    @property
    def empty(self) -> bool:
        """Whether nothing of an engine is in it: no vLLM, or one started with ``--disable-log-stats``."""
        known = (self.blocks, self.block_size_tokens, self.usage_ratio, self.running, self.waiting)
        return not self.odd and not self.counters and all(value is None for value in known)


def parse(body: bytes) -> Reading:
    """The reading in a scrape's body. Never raises; families that are missing, NaN or garbled stay unknown."""
    page = FAMILIES.find(body)
    odd: set[Oddity] = set()
    configs_by_engine = _configs(page)
    usages: dict[str, float] = {}
    for name in USAGE_NAMES:
        usages = _by_engine(page, name, odd, most=1.0)
        if usages:
            break
    running = _by_engine(page, RUNNING_NAME, odd)
    waiting = _by_engine(page, WAITING_NAME, odd)
    engines = set(configs_by_engine) or set(usages) or set(running)
    configs = configs_by_engine.values()
    blocks = _highest(_whole(item.get("num_gpu_blocks")) for item in configs)
    size = _highest(_whole(item.get("effective_attention_block_size")) for item in configs)  # 0.31+, includes DCP
    if size is None:
        size = _highest(_whole(item.get("block_size")) for item in configs)
    counters = {name: total for name in COUNTER_NAMES if (total := _sum(_by_engine(page, name, odd))) is not None}
    loras, lora_slots = _loras(page)
    return Reading(
        engines=max(1, len(engines)),
        labels=tuple(sorted(engines, key=_rank)),
        blocks=blocks,
        block_size_tokens=size,
        cache_tokens=_lowest(_whole(item.get("kv_cache_size_tokens")) for item in configs),
        usage_ratio=_ratios(usages, engines, odd),
        running=_count(_sum(running)),
        waiting=_count(_sum(waiting)),
        running_by_engine=_counts(running, engines),
        waiting_by_engine=_counts(waiting, engines),
        overridden=any(_whole(item.get("num_gpu_blocks_override")) is not None for item in configs),
        caches=_flag(item.get("enable_prefix_caching") for item in configs),
        loras=loras,
        lora_slots=lora_slots,
        awake=_awake(page),
        queried_tokens=_first_sum(page, QUERIES_NAMES, odd),
        hit_tokens=_first_sum(page, HITS_NAMES, odd),
        started_s=_moment(page, START_NAME),
        created_s=_moment(page, CREATED_NAME),
        counters=counters,
        odd=frozenset(odd),
    )


def _configs(page: Page) -> dict[str, Mapping[str, str]]:
    """The labels of the cache's description, by engine. They stand still, so each line is parsed but once."""
    found = (labels_of(rest) for rest in page.get(CONFIG_NAME, ()) if value_of(rest) is not None)
    return {labels.get("engine", "0"): labels for labels in found if labels is not None}


def _by_engine(page: Page, name: str, odd: set[Oddity], most: float = math.inf) -> dict[str, float]:
    """The values of a family by engine; one beyond 0…``most`` is NaN.

    One and the same line twice is one engine that is told twice. Two lines of one engine are two engines, of which
    neither is known.
    """
    values: dict[str, float] = {}
    lines = page.get(name, ())
    for position, rest in enumerate(lines):
        sample = engine_and_value(rest)
        if sample is None:
            odd.add(Oddity.BAD_VALUE)
            continue
        engine, value = sample
        if not 0.0 <= value <= most or value == math.inf:
            odd.add(Oddity.BAD_VALUE)
            value = math.nan
        if engine in values:
            odd.add(Oddity.DUPLICATE_ENGINE)
            if rest not in lines[:position]:
                value = math.nan
        values[engine] = value
    return values


def _ratios(usages: Mapping[str, float], engines: set[str], odd: set[Oddity]) -> Mapping[str, float] | None:
    """The usages, if every engine reported a sane one: a part of them would pass for a small total."""
    if not usages:
        return None
    if set(usages) != engines:
        odd.add(Oddity.PARTIAL_ENGINES)
        return None
    return None if any(math.isnan(value) for value in usages.values()) else usages


def _sum(family: Mapping[str, float]) -> float | None:
    total = sum(family.values())
    return total if family and math.isfinite(total) else None


def _counts(family: Mapping[str, float], engines: set[str]) -> Mapping[str, int] | None:
    """The counts, if every engine reported a sane one."""
    if not family or set(family) != engines or any(math.isnan(value) for value in family.values()):
        return None
    return {engine: int(value) for engine, value in family.items()}


def _rank(label: str) -> tuple[int, str]:
    """The order of engine labels: they are numbers, without leading zeros."""
    return len(label), label


def _first_sum(page: Page, names: Iterable[str], odd: set[Oddity]) -> float | None:
    """The total of the first of ``names`` that is there."""
    for name in names:
        if name in page:
            return _sum(_by_engine(page, name, odd))
    return None


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _awake(page: Page) -> bool | None:
    """Whether all engines are; one that only pauses (sleep level 0) has every state at 0."""
    states = [sample for rest in page.get(SLEEP_NAME, ()) if (sample := labels_and_value(rest)) is not None]
    awake = [value for labels, value in states if labels.get("sleep_state") == _AWAKE]
    return all(value == 1.0 for value in awake) if awake else None


def _loras(page: Page) -> tuple[frozenset[str], int | None]:
    """The adapters at work and the slots for them. vLLM leaves a series behind for each set of adapters it ever had at
    work; the value is the time of that, so the newest is true."""
    newest: tuple[float, bytes] | None = None
    for rest in page.get(LORA_NAME, ()):
        value = value_of(rest)
        if value is not None and math.isfinite(value) and (newest is None or value > newest[0]):
            newest = (value, rest)
    labels = labels_of(newest[1][: newest[1].rfind(b"}") + 1]) if newest is not None else None
    if labels is None:
        return frozenset(), None
    names = (labels.get(f"{state}_lora_adapters", "").split(",") for state in ("running", "waiting"))
    return frozenset(name.strip() for part in names for name in part if name.strip()), _whole(labels.get("max_lora"))


def _flag(values: Iterator[str | None]) -> bool | None:
    """Whether all say True; ``None`` if one says neither True nor False, or none says anything."""
    said = set(values)
    return True if said == {"True"} else False if said == {"False"} else None


def _moment(page: Page, name: str) -> float | None:
    """The first time of that name; of several engines' they are one process's."""
    for rest in page.get(name, ()):
        value = value_of(rest)
        if value is not None and math.isfinite(value) and value > 0:
            return value
    return None


def _whole(text: str | None) -> int | None:
    """A positive whole number out of a label, else ``None``. Unset fields read "None", 0.8's ``num_gpu_blocks`` too."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        return None
    return int(text) or None


def _highest(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _lowest(values: Iterator[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)
