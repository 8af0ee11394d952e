"""From a start-up log to the cause, the numbers and the smallest change that works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.planner.figures import GIB, Figure, Kind, gib_text, tokens_text
from gateway.planner.startup_log import Problem, Startup

_SAFETY_GIB = 0.15
_MOST_UTILIZATION = 0.97
_USEFUL_WINDOW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """``severity`` is error, warning or info; ``change`` is what to put on the command line, empty when nothing."""

    code: str
    severity: str
    cause: str
    change: str = ""
    partial: bool = False

    def as_json(self) -> dict[str, object]:
        return {
            "code": self.code,
            "severity": self.severity,
            "cause": self.cause,
            "change": self.change or None,
            "partial": self.partial,
        }


def diagnose(found: Startup) -> list[Finding]:
    """Findings, gravest first. Always at least one: when nothing is recognised it says what is missing."""
    if not found.lines:
        return [
            Finding("empty", "error", "The log is empty. Pipe one in: docker logs CONTAINER 2>&1 | kvgate doctor -")
        ]
    if not found.is_vllm:
        return [
            Finding(
                "not_vllm",
                "error",
                "None of these lines comes from vLLM. For a container use `docker logs NAME 2>&1`, since vLLM "
                "writes to stderr.",
            )
        ]
    findings = [_ADVICE[problem.code](problem, found) for problem in _root_causes(found.errors)]
    if not found.errors:
        findings += _success(found)
    findings += _observations(found)
    if not findings:
        missing = "neither a KV cache size nor a known error"
        findings.append(
            Finding(
                "nothing_known",
                "warning",
                f"This is a vLLM log, but it holds {missing}; the start of it or its end is cut off.",
                partial=True,
            )
        )
    return findings


def facts(found: Startup) -> dict[str, object]:
    """The log's own numbers, for ``--json``; None is what it does not say."""
    return {
        "vllm_version": found.version,
        "model": found.model,
        "started": found.ready,
        "truncated": found.truncated,
        "max_model_len": found.max_model_len,
        "weights_gib": max(found.weights_gib, default=None),
        "kv_cache_memory_gib": min(found.available_gib, default=None),
        "kv_cache_memory_gib_by_rank": found.available_gib,
        "kv_cache_size_tokens": kv_tokens(found),
        "num_gpu_blocks": found.gpu_blocks,
        "max_concurrency": found.max_concurrency,
        "gpu_memory_gib": found.total_gib,
        "gpu_memory_utilization": found.utilization,
        "activation_gib": found.activation_gib,
        "non_torch_gib": found.non_torch_gib,
        "cuda_graphs_gib": found.graphs_gib,
        "cuda_graphs_estimated_gib": found.graphs_estimated_gib,
        "block_size": found.block_tokens,
    }


def kv_tokens(found: Startup) -> int | None:
    """KV size in tokens: stated, or from blocks of 16 for V0, or from the concurrency line."""
    if found.max_concurrency is not None and found.max_model_len and found.kv_tokens is not None:
        # Hybrids up to 0.20.0 logged a token count that disagrees with the concurrency; the latter is right.
        from_concurrency = found.max_concurrency * found.max_model_len
        if from_concurrency > found.kv_tokens * 1.05:
            return int(from_concurrency)
    if found.kv_tokens is not None:
        return found.kv_tokens
    if found.gpu_blocks is not None:
        return found.gpu_blocks * (found.block_tokens or 16)
    return None


def _root_causes(errors: list[Problem]) -> list[Problem]:
    """A CUDA out-of-memory line beside vLLM's own explanation of it adds nothing."""
    explained = any(problem.code in ("weights_do_not_fit", "sampler_out_of_memory") for problem in errors)
    wrapped = any(problem.code != "engine_failed" for problem in errors)
    return [
        problem
        for problem in errors
        if not (explained and problem.code == "cuda_out_of_memory")
        and not (wrapped and problem.code == "engine_failed")
    ]


def _utilization_for(found: Startup, extra_gib: float) -> float | None:
    """The utilisation that frees ``extra_gib`` more for KV, rounded up to two decimals; None when out of reach."""
    total, current = found.total_gib, found.utilization
    if total is None or current is None:
        return None
    wanted = current + (extra_gib + _SAFETY_GIB) / total
    rounded = -(-wanted * 100 // 1) / 100
    return round(rounded, 2) if rounded <= _MOST_UTILIZATION else None


def _window_exceeds_tokens(problem: Problem, found: Startup) -> Finding:
    window, tokens = int(problem.numbers["max_model_len"]), int(problem.numbers["kv_tokens"])
    available = min(found.available_gib, default=None)
    more = ""
    if available:
        short = available * (window / tokens - 1)
        utilization = _utilization_for(found, short)
        more = f" ({gib_text(short)} more of KV memory are needed for the full window)"
        if utilization:
            more += f"; --gpu-memory-utilization {utilization:g} would give them"
    return Finding(
        "window_exceeds_kv_tokens",
        "error",
        f"The window is {tokens_text(window)} tokens but the KV cache holds {tokens_text(tokens)}: one full "
        f"request would "
        f"not fit{more}. V0 profiles the whole window when chunked prefill is off, so a smaller window frees KV "
        f"memory too.",
        f"--max-model-len {tokens // 16 * 16}   (or --enable-chunked-prefill, which lowers the activation peak)",
    )


def _window_needs_more(problem: Problem, found: Startup) -> Finding:
    numbers = problem.numbers
    window, needed, available = int(numbers["max_model_len"]), numbers["needed_gib"], numbers["available_gib"]
    estimate = numbers.get("estimated_max_model_len")
    partial = estimate is None
    if estimate is None:
        # 0.8 left the number out: full attention scales with the window, so this is a lower bound for hybrids.
        estimate = int(available / needed * window) // 16 * 16
    utilization = _utilization_for(found, needed - available)
    choices = []
    if estimate < _USEFUL_WINDOW_TOKENS < window:
        choices.append(
            "--max-num-seqs 16 --enforce-eager   or   a smaller quantisation   or   --tensor-parallel-size 2"
        )
    if estimate >= 1:
        choices.append(f"--max-model-len {int(estimate)}")
    if utilization:
        choices.append(f"--gpu-memory-utilization {utilization:g}")
    if needed / available <= 2 and "fp8" not in found.arguments.get("kv_cache_dtype", ""):
        choices.append("--kv-cache-dtype fp8 (where the card takes it: kvgate plan shows)")
    cause = (
        f"One request of {tokens_text(window)} tokens needs {needed:g} GiB of KV cache; {available:g} GiB are "
        f"free for it "
        f"({needed / max(window, 1) * GIB / 1024:.1f} KiB a token)."
    )
    if estimate < 1:
        cause += " Nothing fits at all: the weights and overheads take the card."
    if partial:
        cause += " The largest window was computed here from these two numbers, since this release does not print it."
    return Finding("window_needs_more_kv", "error", cause, "   or   ".join(choices), partial=partial)


def _no_kv_memory(problem: Problem, found: Startup) -> Finding:
    weights = max(found.weights_gib, default=None)
    known = f" The weights take {gib_text(weights)}" if weights else ""
    if weights and found.requested_gib:
        known += f" of the {gib_text(found.requested_gib)} requested"
    return Finding(
        "no_kv_memory",
        "error",
        f"After weights and the profile run nothing is left for the KV cache.{known + '.' if known else ''}",
        "--gpu-memory-utilization 0.95   or   --enforce-eager --max-num-seqs 16 --max-num-batched-tokens 2048   or   "
        "a smaller quantisation   or   --tensor-parallel-size 2",
        partial=weights is None,
    )


def _not_enough_free(problem: Problem, found: Startup) -> Finding:
    numbers = problem.numbers
    free, total = numbers["free_gib"], numbers["total_gib"]
    share = int(free / total * 100) / 100
    taken = total - free
    return Finding(
        "not_enough_free_memory",
        "error",
        f"Others hold {gib_text(taken)} of the {gib_text(total)}: {gib_text(free)} are free, but utilisation "
        f"{numbers['utilization']:g} asks for {gib_text(numbers['requested_gib'])} of the total, not of what is free. "
        "Usual causes: a desktop, a second server, or the zombie of a killed one.",
        f"stop what `kvgate gpus` lists, or --gpu-memory-utilization {share:g}",
    )


def _memory_changed(problem: Problem, found: Startup) -> Finding:
    initial, current = problem.number("initial_free_gib"), problem.number("current_free_gib")
    change = (
        f" (free memory rose from {initial:g} to {current:g} GiB)"
        if initial is not None and current is not None
        else ""
    )
    return Finding(
        "memory_changed_while_profiling",
        "error",
        f"Another process freed GPU memory while vLLM measured its own{change}, so the measurement is void.",
        "start again once the other process has gone; start servers of one card one after the other",
    )


def _too_many_seqs(problem: Problem, found: Startup) -> Finding:
    blocks = int(problem.numbers["state_blocks"])
    return Finding(
        "too_many_seqs_for_states",
        "error",
        f"A hybrid model keeps one state block for every running request; {int(problem.numbers['max_num_seqs'])} "
        f"requests are "
        f"allowed but only {blocks} blocks exist.",
        f"--max-num-seqs {blocks}",
    )


def _sampler(problem: Problem, found: Startup) -> Finding:
    seqs = int(problem.numbers["requests"])
    return Finding(
        "sampler_out_of_memory",
        "error",
        f"Sampling for {seqs} requests at once needs more memory than the utilisation left free: logits of the whole "
        "vocabulary, sorted, for each of them.",
        f"--max-num-seqs {max(seqs // 4, 1)}",
    )


def _weights(problem: Problem, found: Startup) -> Finding:
    return Finding(
        "weights_do_not_fit",
        "error",
        "The weights alone do not fit on the card (nothing about the KV cache or the window can help).",
        "--tensor-parallel-size 2   or   a quantised checkpoint (AWQ, FP8, NVFP4)   or   free memory others hold "
        "(kvgate gpus)",
    )


def _window_above_model(problem: Problem, found: Startup) -> Finding:
    asked, own = int(problem.numbers["max_model_len"]), int(problem.numbers["derived_max_model_len"])
    factor = -(-asked // own)
    return Finding(
        "window_above_model",
        "error",
        f"The model was trained for {tokens_text(own)} positions; {tokens_text(asked)} were asked for. Memory is "
        f"not the reason.",
        f"--max-model-len {own}   or, if the model's card documents it, YaRN: --hf-overrides "
        f'\'{{"rope_scaling": {{"rope_type": "yarn", "factor": {factor}.0, "original_max_position_embeddings": '
        f"{own}}}}}'",
    )


def _engine_failed(problem: Problem, found: Startup) -> Finding:
    return Finding(
        "engine_failed",
        "error",
        "The engine died at start, and the reason stands above this line: it is missing here, or is none the doctor "
        "knows.",
        "give the whole log: docker logs CONTAINER 2>&1 | kvgate doctor -",
        partial=True,
    )


def _auto_fit(problem: Problem, found: Startup) -> Finding:
    return Finding(
        "cannot_auto_fit",
        "error",
        "Not even one token fits beside the weights.",
        "--gpu-memory-utilization 0.95   or   a smaller quantisation   or   --tensor-parallel-size 2",
    )


def _fp8(problem: Problem, found: Startup) -> Finding:
    return Finding(
        "fp8_needs_newer_card",
        "error",
        "The attention backend chosen cannot store an fp8 KV cache on this card (Triton needs compute capability 8.9, "
        "FlashAttention 9.0).",
        "--attention-backend FLASHINFER   (before 0.13: VLLM_ATTENTION_BACKEND=FLASHINFER)   or   "
        "--kv-cache-dtype auto",
    )


def _out_of_memory(problem: Problem, found: Startup) -> Finding:
    after_kv = bool(found.available_gib or found.kv_tokens or found.gpu_blocks)
    if found.ready:
        cause = "The GPU ran out of memory while serving: something outside vLLM's budget grew."
        change = "--gpu-memory-utilization 0.85   or stop what `kvgate gpus` shows besides vLLM"
    elif after_kv:
        cause = (
            "The GPU ran out of memory after the KV cache was allocated, while graphs were captured: the "
            "utilisation leaves too little beside it."
        )
        lower = round((found.utilization or 0.92) - 0.05, 2)
        change = f"--gpu-memory-utilization {lower:g}   or   --enforce-eager"
    else:
        cause = (
            "The GPU ran out of memory before the KV cache was sized: weights or the profile run's peak are too large."
        )
        change = (
            "--max-num-batched-tokens 2048 --max-num-seqs 64   or   --tensor-parallel-size 2   or   a "
            "smaller quantisation"
        )
    return Finding("cuda_out_of_memory", "error", cause, change, partial=True)


_ADVICE: dict[str, Callable[[Problem, Startup], Finding]] = {
    "window_exceeds_kv_tokens": _window_exceeds_tokens,
    "window_needs_more_kv": _window_needs_more,
    "no_kv_memory": _no_kv_memory,
    "not_enough_free_memory": _not_enough_free,
    "memory_changed_while_profiling": _memory_changed,
    "too_many_seqs_for_states": _too_many_seqs,
    "sampler_out_of_memory": _sampler,
    "weights_do_not_fit": _weights,
    "window_above_model": _window_above_model,
    "engine_failed": _engine_failed,
    "cannot_auto_fit": _auto_fit,
    "fp8_needs_newer_card": _fp8,
    "cuda_out_of_memory": _out_of_memory,
}


def _success(found: Startup) -> list[Finding]:
    tokens = kv_tokens(found)
    if tokens is None:
        return []
    findings: list[Finding] = []
    window = found.max_model_len
    text = f"The KV cache holds {tokens_text(tokens)} tokens"
    if min(found.available_gib, default=None) is not None:
        text += f" in {gib_text(min(found.available_gib))}"
    if window:
        text += f": {tokens / window:.2f} requests of the full {tokens_text(window)}-token window at once"
    findings.append(Finding("capacity", "info", text + ".", partial=found.truncated))
    if window and tokens < window * 1.1:
        findings.append(
            Finding(
                "no_headroom",
                "warning",
                "Barely one full-length request fits; a second one queues, and up to 0.28 an exactly full pool never "
                "schedules a full-length request (the null block).",
                f"--max-model-len {int(tokens / 2) // 1024 * 1024 or tokens // 2}",
            )
        )
    return findings


def _observations(found: Startup) -> list[Finding]:
    findings: list[Finding] = []
    ranks = found.available_gib
    if len(ranks) > 1 and max(ranks) - min(ranks) > 0.25:
        findings.append(
            Finding(
                "uneven_ranks",
                "warning",
                f"The ranks have between {min(ranks):g} and {max(ranks):g} GiB for KV; the smallest decides for "
                f"all. A desktop or "
                "another process on one card, or an uneven pipeline split, is the usual reason.",
            )
        )
    unused = _unused_gib(found)
    if unused is not None and unused.value > 1.0 and found.utilization is not None and found.total_gib:
        more = min(_MOST_UTILIZATION, found.utilization + (unused.value - 0.5) / found.total_gib)
        if more - found.utilization > 0.015:
            findings.append(
                Finding(
                    "headroom",
                    "info",
                    f"About {gib_text(unused.value)} of the card stay unused.",
                    f"--gpu-memory-utilization {int(more * 100) / 100:g}",
                )
            )
    if found.padding_waste_percent and found.padding_waste_percent > 10:
        findings.append(
            Finding(
                "padding",
                "info",
                f"Grouping the layers may waste up to {found.padding_waste_percent:g} % of the KV memory.",
            )
        )
    if found.unplanned or _drafter(found):
        findings.append(
            Finding(
                "not_modelled",
                "info",
                f"{found.unplanned or _drafter(found)} keeps KV data by rules the planner does not know: the numbers "
                "are the log's own, and `kvgate plan` will not agree with them.",
                partial=True,
            )
        )
    if found.auto_fit and found.auto_fit[0] == found.auto_fit[1]:
        findings.append(
            Finding("auto_fit", "info", f"The model's whole window of {tokens_text(found.auto_fit[0])} fits.")
        )
    elif found.auto_fit:
        findings.append(
            Finding(
                "auto_fit",
                "info",
                f"The window was reduced from {tokens_text(found.auto_fit[0])} to "
                f"{tokens_text(found.auto_fit[1])} to fit.",
            )
        )
    if found.graphs_gib is not None and found.graphs_estimated_gib is not None:
        over = found.graphs_estimated_gib - found.graphs_gib
        if over > 0.3:
            base = found.utilization or 0.92
            findings.append(
                Finding(
                    "graphs_overestimated",
                    "info",
                    f"CUDA graphs took {found.graphs_gib:g} GiB but {found.graphs_estimated_gib:g} were set "
                    f"aside for them.",
                    f"--gpu-memory-utilization {min(_MOST_UTILIZATION, base + over / found.total_gib):.2f}"
                    if found.total_gib
                    else "",
                )
            )
    if found.truncated and kv_tokens(found) is None:
        findings.append(
            Finding(
                "truncated",
                "warning",
                "The log ends before the server is ready or fails; what follows is missing.",
                partial=True,
            )
        )
    return findings


def _drafter(found: Startup) -> str:
    named = found.arguments.get("method", "").lower()
    return named if named in ("dflash", "dspark") else ""


def _unused_gib(found: Startup) -> Figure | None:
    if found.free_gib is None or found.requested_gib is None:
        return None
    return Figure(found.free_gib - found.requested_gib - (found.graphs_gib or 0.0), Kind.MEASURED)
