"""The command a plan ends in: ``vllm serve …`` with only the flags that matter, and the same as a compose service."""

from __future__ import annotations

import json
import shlex

from gateway.planner.cautions import quantization_flag
from gateway.planner.hardware import backend_flag
from gateway.planner.plan import Plan
from gateway.planner.versions import DOCKER_IMAGE, LATEST, batch_defaults

_ROUND_WINDOW_TO = 1024


def recommended_window(plan: Plan) -> int:
    """The window to serve: the one asked for when it fits, else the largest that surely does, rounded down."""
    if plan.fits and plan.certain:
        return plan.window
    safe = int(plan.largest_window.lowest or plan.largest_window.value)
    if plan.fits:
        safe = max(safe, 1)
    rounded = safe // _ROUND_WINDOW_TO * _ROUND_WINDOW_TO
    return min(plan.window, rounded or safe)


def serve_arguments(plan: Plan) -> list[str]:
    """The arguments after ``vllm serve``, one list element a word."""
    wish, geometry = plan.wish, plan.subject.geometry
    window = recommended_window(plan)
    words = [geometry.name, "--max-model-len", str(window)]
    online = quantization_flag(plan.subject, wish)
    if online:
        words += ["--quantization", online]
    if wish.utilization is not None:
        words += ["--gpu-memory-utilization", f"{wish.utilization:g}"]
    for flag, number in (
        ("--tensor-parallel-size", wish.tp),
        ("--pipeline-parallel-size", wish.pp),
        ("--decode-context-parallel-size", wish.dcp),
    ):
        if number > 1:
            words += [flag, str(number)]
    if wish.kv_dtype != "auto":
        words += ["--kv-cache-dtype", wish.kv_dtype]
    _, flag = backend_flag(plan.support.backend, plan.behaviour)
    words += shlex.split(flag)
    words += _batch_words(plan)
    if wish.eager:
        words.append("--enforce-eager")
    if wish.text_only:
        words.append("--language-model-only")
    if wish.block_tokens:
        words += ["--block-size", str(wish.block_tokens)]
    if not wish.prefix_caching:
        words.append("--no-enable-prefix-caching")
    elif geometry.hybrid and not plan.behaviour.state_caching_by_default:
        words.append("--enable-prefix-caching")
    if wish.kv_memory_gib is not None and plan.behaviour.version[:2] >= (0, 11):
        words += ["--kv-cache-memory-bytes", str(int(wish.kv_memory_gib * (1 << 30)))]
    if wish.speculation is not None:
        words += ["--speculative-config", wish.speculation.as_flag()]
    if wish.lora_adapters:
        words += ["--enable-lora", "--max-loras", str(wish.lora_adapters), "--max-lora-rank", str(wish.lora_rank)]
    if geometry.max_position and window > geometry.max_position:
        words += ["--hf-overrides", _yarn(plan, window)]
    if plan.card.sm == 75:
        words += ["--dtype", "half"]
    return words


def serve_command(plan: Plan) -> str:
    """One shell line; empty when no window at all fits."""
    if recommended_window(plan) < 1:
        return ""
    environment, _ = backend_flag(plan.support.backend, plan.behaviour)
    line = shlex.join(["vllm", "serve", *serve_arguments(plan)])
    return f"{environment} {line}" if environment else line


def compose_service(plan: Plan) -> str:
    """A compose file with one service, ready for ``docker compose up``; empty when no window at all fits."""
    if recommended_window(plan) < 1:
        return ""
    environment, _ = backend_flag(plan.support.backend, plan.behaviour)
    newest = plan.behaviour.version >= LATEST
    tag = f"v{plan.behaviour.text}" if not newest else f"v{'.'.join(str(part) for part in LATEST)}"
    arguments = "".join(f"      - {json.dumps(word)}\n" for word in serve_arguments(plan))
    gpus = plan.wish.tp * plan.wish.pp
    extra = f"    environment:\n      - {environment}\n" if environment else ""
    return (
        "services:\n"
        "  vllm:\n"
        f"    image: {DOCKER_IMAGE}:{tag}\n"
        "    command:\n"
        f"{arguments}"
        f"{extra}"
        "    ports:\n"
        '      - "8000:8000"\n'
        "    ipc: host\n"
        "    volumes:\n"
        "      - huggingface:/root/.cache/huggingface\n"
        "    deploy:\n"
        "      resources:\n"
        "        reservations:\n"
        "          devices:\n"
        f"            - {{driver: nvidia, count: {gpus}, capabilities: [gpu]}}\n"
        "volumes:\n"
        "  huggingface: {}\n"
    )


def _batch_words(plan: Plan) -> list[str]:
    """``--max-num-seqs`` and batched tokens where they differ from the default or the default cannot start."""
    wish = plan.wish
    words: list[str] = []
    seqs = wish.seqs
    if plan.subject.geometry.hybrid and plan.behaviour.version[:2] >= (0, 20):
        blocks = int(plan.num_blocks.lowest)
        if 0 < blocks < plan.seqs:
            seqs = blocks
    if seqs is not None:
        words += ["--max-num-seqs", str(seqs)]
    card = plan.card
    defaults = batch_defaults(plan.behaviour, card.memory_gib, card.name, plan.window, unified=card.unified)
    if wish.batched_tokens is not None and wish.batched_tokens != defaults.batched_tokens:
        words += ["--max-num-batched-tokens", str(wish.batched_tokens)]
    return words


def _yarn(plan: Plan, window: int) -> str:
    own = plan.subject.geometry.max_position or window
    factor = -(-window // own)
    return json.dumps(
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": float(factor),
                "original_max_position_embeddings": own,
            },
            "max_position_embeddings": own * factor,
        }
    )
