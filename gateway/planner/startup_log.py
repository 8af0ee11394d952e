"""A vLLM start-up log read into facts: every line of 0.6 to 0.32 that states memory, KV size or a reason for failing.

Tolerates ANSI colours, log prefixes of any launcher, several ranks speaking at once, cut-off ends and thousands
separators. Knows only the documented line formats; what a log does not say stays None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
# A proxy's log may name a host "vllm" in a URL or an address; that is not vLLM speaking.
_SPEAKS = re.compile(
    r"(?<![\w/@.:-])vllm\b(?!-|[:./]\w*:?\d)|\bvLLM\b|EngineCore|Worker_TP|model_runner|gpu_worker|kv_cache_utils"
)
_NUMBER = r"(-?[\d,]+(?:\.\d+)?)"


@dataclass(slots=True)
class Startup:
    """What a log says. Lists hold one value a rank, in the order spoken; GiB throughout (V0's "GB" are GiB too)."""

    lines: int = 0
    is_vllm: bool = False
    version: str | None = None
    model: str | None = None
    ready: bool = False
    truncated: bool = False
    colours: bool = False
    weights_gib: list[float] = field(default_factory=list)
    available_gib: list[float] = field(default_factory=list)
    total_gib: float | None = None
    utilization: float | None = None
    requested_gib: float | None = None
    free_gib: float | None = None
    consumed_gib: float | None = None
    activation_gib: float | None = None
    non_torch_gib: float | None = None
    graphs_gib: float | None = None
    graphs_estimated_gib: float | None = None
    suggested_kv_bytes: int | None = None
    gpu_blocks: int | None = None
    cpu_blocks: int | None = None
    kv_tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None
    block_tokens: int | None = None
    padding_waste_percent: float | None = None
    auto_fit: tuple[int, int] | None = None
    unplanned: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    errors: list[Problem] = field(default_factory=list)

    @property
    def anything(self) -> bool:
        """Whether the log said anything about memory, KV or failure."""
        return bool(self.errors or self.weights_gib or self.available_gib or self.kv_tokens or self.gpu_blocks)


@dataclass(frozen=True, slots=True)
class Problem:
    """One recognised failure: a stable ``code``, the numbers in it, and the line it stands on."""

    code: str
    numbers: dict[str, float] = field(default_factory=dict)
    line: str = ""

    def number(self, name: str) -> float | None:
        return self.numbers.get(name)


# code -> pattern of the documented text, with named numbers. Order matters: the first match of a line counts.
_ERRORS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "window_exceeds_kv_tokens",
        re.compile(rf"max seq len \({_NUMBER}\) is larger than the maximum number of tokens that can be stored "
        rf"in KV cache \({_NUMBER}\)"),
    ),
    (
        "window_needs_more_kv",
        re.compile(
            rf"max seq len \({_NUMBER}\), \(?{_NUMBER} Gi?B KV cache is needed, which is larger than the available "
            rf"KV cache memory \({_NUMBER} Gi?B\)(?:.*?estimated maximum model length is {_NUMBER})?"
        ),
    ),
    ("no_kv_memory", re.compile(r"No available memory for the cache blocks")),
    (
        "not_enough_free_memory",
        re.compile(
            rf"Free memory on device(?: \S+)? \({_NUMBER}/{_NUMBER} GiB\) on startup is less than desired GPU memory "
            rf"utilization \({_NUMBER}, {_NUMBER} GiB\)"
        ),
    ),
    (
        "memory_changed_while_profiling",
        re.compile(rf"Error in memory profiling\.(?:.*?Initial free memory:? {_NUMBER}.*?current free memory:? "
        rf"{_NUMBER})?"),
    ),
    (
        "too_many_seqs_for_states",
        re.compile(rf"max_num_seqs \({_NUMBER}\) exceeds available Mamba cache blocks \({_NUMBER}\)"),
    ),
    (
        "sampler_out_of_memory",
        re.compile(rf"out of memory occurred when warming up sampler with {_NUMBER} dummy requests"),
    ),
    ("weights_do_not_fit", re.compile(r"Failed to load model - not enough GPU memory")),
    (
        "window_above_model",
        re.compile(
            rf"User-specified max_model_len \({_NUMBER}\) is greater than the derived max_model_len \("
            rf"(?:max_position_embeddings|model_max_length)={_NUMBER}"
        ),
    ),
    ("engine_failed", re.compile(r"Engine core initialization failed|Engine process failed to start")),
    ("cannot_auto_fit", re.compile(r"Cannot auto-fit max_model_len")),
    ("fp8_needs_newer_card", re.compile(r"fp8e4nv not supported in this architecture|native FP8 \(fp8e4nv\) requires")),
    (
        "cuda_out_of_memory",
        re.compile(
            rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {_NUMBER} [GM]iB(?:.*?total capacity of "
            rf"{_NUMBER} GiB)?"
        ),
    ),
)  # fmt: skip
_ERROR_NUMBERS: dict[str, tuple[str, ...]] = {
    "window_exceeds_kv_tokens": ("max_model_len", "kv_tokens"),
    "window_needs_more_kv": ("max_model_len", "needed_gib", "available_gib", "estimated_max_model_len"),
    "not_enough_free_memory": ("free_gib", "total_gib", "utilization", "requested_gib"),
    "memory_changed_while_profiling": ("initial_free_gib", "current_free_gib"),
    "too_many_seqs_for_states": ("max_num_seqs", "state_blocks"),
    "sampler_out_of_memory": ("requests",),
    "window_above_model": ("max_model_len", "derived_max_model_len"),
    "cuda_out_of_memory": ("tried", "total_gib"),
}


def read_startup(text: str | Iterable[str]) -> Startup:
    """Facts of a whole log. A later start in the same log replaces the numbers of an earlier one."""
    raw = text.splitlines() if isinstance(text, str) else list(text)
    found = Startup(lines=len(raw), colours=any("\x1b[" in line for line in raw))
    for line in raw:
        clean = _ANSI.sub("", line).replace("\r", "").strip()
        if clean:
            _read_line(found, clean)
    found.truncated = not found.ready and not found.errors and found.is_vllm
    return found


def _read_line(found: Startup, line: str) -> None:
    if _SPEAKS.search(line):
        found.is_vllm = True
    for pattern, take in _FACTS:
        match = pattern.search(line)
        if match:
            found.is_vllm = True
            take(found, match)
    for code, pattern in _ERRORS:
        match = pattern.search(line)
        if match:
            found.is_vllm = True
            names = _ERROR_NUMBERS.get(code, ())
            numbers = {
                name: _value(group) for name, group in zip(names, match.groups(), strict=False) if group is not None
            }
            if not any(known.code == code and known.numbers == numbers for known in found.errors):
                found.errors.append(Problem(code, numbers, line))
            break


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _whole(text: str) -> int:
    return int(_value(text))


def _set(**fields: Callable[[str], object]) -> Callable[[Startup, re.Match[str]], None]:
    """A taker that puts the match's groups, in order, into the named fields."""

    def take(found: Startup, match: re.Match[str]) -> None:
        for (name, convert), group in zip(fields.items(), match.groups(), strict=False):
            if group is not None:
                setattr(found, name, convert(group))

    return take


def _append(name: str) -> Callable[[Startup, re.Match[str]], None]:
    def take(found: Startup, match: re.Match[str]) -> None:
        values: list[float] = getattr(found, name)
        values.append(_value(match[1]))

    return take


def _start_over(found: Startup, match: re.Match[str]) -> None:
    """A new server announces itself: what an earlier one said no longer holds."""
    fresh = Startup(
        lines=found.lines, is_vllm=True, colours=found.colours, model=found.model, arguments=found.arguments
    )
    for name in fresh.__dataclass_fields__:
        setattr(found, name, getattr(fresh, name))
    found.version = match[1]


def _arguments(found: Startup, match: re.Match[str]) -> None:
    for name, value in re.findall(r"'?(\w+)'?\s*[:=]\s*('[^']*'|\"[^\"]*\"|[\w./-]+)", match[1]):
        found.arguments[name] = value.strip("'\"")
    found.model = found.arguments.get("model") or found.arguments.get("model_tag") or found.model


def _block_line(found: Startup, match: re.Match[str]) -> None:
    found.kv_tokens = _whole(match[1])


def _ready(found: Startup, match: re.Match[str]) -> None:
    found.ready = True


def _whole_window(found: Startup, match: re.Match[str]) -> None:
    found.auto_fit = (_whole(match[1]), _whole(match[1]))


def _hisparse(found: Startup, match: re.Match[str]) -> None:
    found.unplanned = "HiSparse"


def _auto(found: Startup, match: re.Match[str]) -> None:
    found.auto_fit = (_whole(match[1]), _whole(match[2]))


_N = _NUMBER
_FACTS: tuple[tuple[re.Pattern[str], Callable[[Startup, re.Match[str]], None]], ...] = (
    (re.compile(r"(?:vLLM API server version|Initializing an? LLM engine \(v|Initializing a V1 LLM engine "
    r"\(v)\s*([\w.+]+)"), _start_over),
    (re.compile(r"(?:non-default args|args): (?:Namespace\(|\{)(.*)"), _arguments),
    (re.compile(r"Loading model weights took (\d+\.\d+) ?Gi?B"), _append("weights_gib")),
    (re.compile(r"Model loading took (\d+(?:\.\d+)?) ?GiB"), _append("weights_gib")),
    (re.compile(rf"total_gpu_memory \({_N} ?GiB\) x gpu_memory_utilization \({_N}\) = {_N} ?GiB"),
     _set(total_gib=_value, utilization=_value, requested_gib=_value)),
    (re.compile(rf"model weights take {_N} ?GiB; non_torch_memory takes {_N} ?GiB; PyTorch activation peak "
    rf"memory takes {_N} ?GiB"),
     _set(consumed_gib=_value, non_torch_gib=_value, activation_gib=_value)),
    (re.compile(rf"reserved for KV Cache is {_N} ?GiB"), _append("available_gib")),
    (re.compile(rf"# (?:GPU|cuda|CPU|cpu) blocks: {_N}(?:, # CPU blocks: "
    rf"{_N})?"), _set(gpu_blocks=_whole, cpu_blocks=_whole)),
    (re.compile(rf"Available KV cache memory: {_N} ?GiB"), _append("available_gib")),
    (re.compile(rf"[A-Z]\w* KV cache size: {_N} tokens"), _block_line),
    (re.compile(rf"Maximum concurrency for {_N} tokens per request: "
    rf"{_N}x"), _set(max_model_len=_whole, max_concurrency=_value)),
    (re.compile(rf"Graph capturing finished in .*?took {_N} ?GiB"), _set(graphs_gib=_value)),
    (re.compile(rf"Estimated CUDA graph memory: {_N} ?GiB"), _set(graphs_estimated_gib=_value)),
    (re.compile(rf"CUDA graph pool memory: {_N} ?GiB \(actual\), {_N} ?GiB \(estimated\)"),
     _set(graphs_gib=_value, graphs_estimated_gib=_value)),
    (re.compile(rf"Free memory on device(?: \S+)? \({_N}/{_N} GiB\) on startup\. Desired GPU memory utilization "
    rf"is \({_N}, {_N} GiB\)"),
     _set(free_gib=_value, total_gib=_value, utilization=_value, requested_gib=_value)),
    (re.compile(rf"Actual usage is {_N} GiB for (?:consumed memory|weight)"), _set(consumed_gib=_value)),
    (re.compile(rf"{_N} GiB for peak activation"), _set(activation_gib=_value)),
    (re.compile(rf"{_N} GiB for non-torch memory"), _set(non_torch_gib=_value)),
    (re.compile(rf"{_N} GiB for CUDAGraph memory"), _set(graphs_gib=_value)),
    (re.compile(r"`--kv-cache-memory(?:-bytes)?=(\d+)`"), _set(suggested_kv_bytes=int)),
    (re.compile(rf"Setting attention block size to {_N} tokens"), _set(block_tokens=_whole)),
    (re.compile(rf"Add \d+ padding layers, may waste at most {_N}% KV cache "
    rf"memory"), _set(padding_waste_percent=_value)),
    (re.compile(rf"Auto-fit max_model_len: reduced from {_N} to {_N} to fit"), _auto),
    (re.compile(rf"full model context length {_N} fits"), _whole_window),
    (re.compile(r"[Hh]i[Ss]parse(?:_config|Connector)"), _hisparse),
    (re.compile(r"Application startup complete|Uvicorn running on|Available routes are"), _ready),
    (re.compile(r"\bmax_seq_len=(\d+)"), _set(max_model_len=int)),
)  # fmt: skip
