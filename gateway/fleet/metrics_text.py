"""Read the few families we need out of a vLLM server's Prometheus text. Anything odd becomes unknown, never an error.

A vLLM server exports some hundred kilobytes of histograms; only the lines of the wanted families are looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Both generations: `gpu_cache_usage_perc` is V0's and V1's name up to 0.10; 0.9 and 0.10 export both names at once.
USAGE_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CONFIG_NAME = "vllm:cache_config_info"
RUNNING_NAME = "vllm:num_requests_running"
WAITING_NAME = "vllm:num_requests_waiting"
LORA_NAME = "vllm:lora_requests_info"
# Counters that only a new process sets back.
COUNTER_NAMES = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total")
START_NAME = "process_start_time_seconds"

MAX_LINE_CHARS = 1 << 16

_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n"}
_BLANKS = " \t"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one scrape says. ``None`` is unknown, whatever the reason.

    ``engines`` are the data-parallel ranks this server reports for, ``labels`` what vLLM calls them, in the order of
    the ranks a request can ask for; there is one engine where nothing is said. ``blocks`` counts the KV blocks of all of them
    together, null blocks included (vLLM stamps the sum on each ``engine`` label). ``block_size_tokens`` is the
    smallest over KV groups and synced from the engine only since 0.24. ``cache_tokens`` is one engine's (0.24+).
    ``usage_ratio`` is 0…1 by engine label; ``running_by_engine``, ``waiting_by_engine`` are requests, ``None`` unless
    every engine told a sane number. ``overridden`` says ``--num-gpu-blocks-override`` was given, ``caches`` is
    whether prompt prefixes are kept. ``loras`` are the LoRA adapters that run or wait, of ``lora_slots`` at a time.
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
    started_s: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)


def parse(body: bytes) -> Reading:
    """The reading in a scrape's body. Never raises; families that are missing, NaN or garbled stay unknown."""
    text = "\n" + body.decode("utf-8", "replace")
    configs = _by_engine(text, CONFIG_NAME)
    usages: dict[str, float] = {}
    for name in USAGE_NAMES:
        usages = {engine: value for engine, (_, value) in _by_engine(text, name).items()}
        if usages:
            break
    running, waiting = _by_engine(text, RUNNING_NAME), _by_engine(text, WAITING_NAME)
    engines = set(configs) or set(usages) or set(running)
    labels = [labels for labels, _ in configs.values()]
    blocks = _highest(_whole(item.get("num_gpu_blocks")) for item in labels)
    size = _highest(_whole(item.get("effective_attention_block_size")) for item in labels)  # 0.31+, includes DCP
    if size is None:
        size = _highest(_whole(item.get("block_size")) for item in labels)
    counters = {name: total for name in COUNTER_NAMES if (total := _sum(_by_engine(text, name))) is not None}
    loras, lora_slots = _loras(text)
    return Reading(
        engines=max(1, len(engines)),
        labels=tuple(sorted(engines, key=_rank)),
        blocks=blocks,
        block_size_tokens=size,
        cache_tokens=_lowest(_whole(item.get("kv_cache_size_tokens")) for item in labels),
        usage_ratio=_ratios(usages, engines),
        running=_count(_sum(running)),
        waiting=_count(_sum(waiting)),
        running_by_engine=_counts(running, engines),
        waiting_by_engine=_counts(waiting, engines),
        overridden=any(_whole(item.get("num_gpu_blocks_override")) is not None for item in labels),
        caches=_flag(item.get("enable_prefix_caching") for item in labels),
        loras=loras,
        lora_slots=lora_slots,
        started_s=_start(text),
        counters=counters,
    )


def samples(text: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """The samples of exactly this name: labels, value. ``text`` starts with a newline; garbled lines are left out."""
    needle = "\n" + name
    position = text.find(needle)
    while position >= 0:
        start = position + len(needle)
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if end - start <= MAX_LINE_CHARS:
            sample = _sample(text[start:end])
            if sample is not None:
                yield sample
        position = text.find(needle, end)


def _sample(rest: str) -> tuple[dict[str, str], float] | None:
    """What follows the name in a line: ``{labels} value [timestamp]``."""
    labels: dict[str, str] = {}
    if rest.startswith("{"):
        position = 1
        while match := _LABEL.match(rest, position):
            raw = match[2]
            labels[match[1]] = _ESCAPE.sub(_unescape, raw) if "\\" in raw else raw
            position = match.end()
            if rest[position : position + 1] == ",":
                position += 1
        position += len(rest[position:]) - len(rest[position:].lstrip(_BLANKS))
        if rest[position : position + 1] != "}":
            return None
        rest = rest[position + 1 :]
    elif not rest or rest[0] not in _BLANKS:
        return None  # a longer name that begins with ours
    words = rest.split()
    if not words:
        return None
    try:
        return labels, float(words[0])
    except ValueError:
        return None


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPED.get(match[1], match[1])


def _by_engine(text: str, name: str) -> dict[str, tuple[dict[str, str], float]]:
    """The samples of a family by ``engine`` label; V0 has none and counts as engine 0."""
    return {labels.get("engine", "0"): (labels, value) for labels, value in samples(text, name)}


def _ratios(usages: Mapping[str, float], engines: set[str]) -> Mapping[str, float] | None:
    """The usages, if every engine reported a sane one: a part of them would pass for a small total."""
    if not usages or set(usages) != engines:
        return None
    if not all(0.0 <= value <= 1.0 for value in usages.values()):
        return None
    return usages


def _sum(family: Mapping[str, tuple[dict[str, str], float]]) -> float | None:
    total = sum(value for _, value in family.values())
    return total if family and math.isfinite(total) and total >= 0 else None


def _counts(family: Mapping[str, tuple[dict[str, str], float]], engines: set[str]) -> Mapping[str, int] | None:
    """The counts, if every engine reported a sane one."""
    values = {engine: value for engine, (_, value) in family.items()}
    if not values or set(values) != engines or not all(0 <= value < math.inf for value in values.values()):
        return None
    return {engine: int(value) for engine, value in values.items()}


def _rank(label: str) -> tuple[int, str]:
    """The order of engine labels: they are numbers, without leading zeros."""
    return len(label), label


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _loras(text: str) -> tuple[frozenset[str], int | None]:
    """The adapters at work and the slots for them. vLLM leaves a series behind for each set of adapters it ever had at
    work; the value is the time of that, so the newest is true."""
    newest: tuple[float, dict[str, str]] | None = None
    for labels, value in samples(text, LORA_NAME):
        if math.isfinite(value) and (newest is None or value > newest[0]):
            newest = (value, labels)
    if newest is None:
        return frozenset(), None
    names = (newest[1].get(f"{state}_lora_adapters", "").split(",") for state in ("running", "waiting"))
    return frozenset(name.strip() for part in names for name in part if name.strip()), _whole(newest[1].get("max_lora"))


def _flag(values: Iterator[str | None]) -> bool | None:
    """Whether all say True; ``None`` if one says neither True nor False, or none says anything."""
    said = set(values)
    return True if said == {"True"} else False if said == {"False"} else None


def _start(text: str) -> float | None:
    for _, value in samples(text, START_NAME):
        if math.isfinite(value) and value > 0:
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
