"""Asks other planners, in their own environment: questions as JSON on stdin, answers as JSON on stdout.

Run by ``bench.peers`` with the Python of a venv that has them; imports nothing of the gateway. Each planner's own KV
function gets the same config, since most of them read models only from the hub.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Question = dict[str, Any]
GIB = 1 << 30


def hf_mem(question: Question) -> float:
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size

    dtype = "F8_E4M3" if question["kv_dtype"].startswith("fp8") else "BF16"
    config, tokens = question["config"], question["tokens"]
    return float(compute_safetensors_kv_cache_size(config=config, cache_dtype=dtype, max_model_len=tokens)) / GIB


def kvfit(question: Question) -> float:
    from kvfit.architectures import estimate_cache

    size = 1.0 if question["kv_dtype"].startswith("fp8") else 2.0
    config, kind = question["config"], str(question["config"].get("model_type", ""))
    if kind.endswith("_text"):  # it wants such models as their config.json nests them
        config = {
            "model_type": kind.removesuffix("_text"),
            "architectures": config["architectures"],
            "text_config": config,
        }
    return float(estimate_cache(config, context_tokens=question["tokens"], kv_bytes=size).total_gib)


def llm_d_planner(question: Question) -> float:
    from planner.capacity_planner import KVCacheDetail

    dtype = "float8_e4m3fn" if question["kv_dtype"].startswith("fp8") else "bfloat16"
    config = SimpleNamespace(**{**question["config"], "torch_dtype": dtype, "dtype": dtype})
    return float(KVCacheDetail(question["model"], config, question["tokens"]).per_request_kv_cache_gb)


def vllm_wizard(question: Question) -> float:
    from vllm_wizard.models.metadata import ModelMetadata
    from vllm_wizard.planning.memory import compute_kv_cache_memory
    from vllm_wizard.schemas.inputs import KVCacheDType

    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    fields = {name: question["config"][name] for name in names}
    metadata = ModelMetadata(**fields, max_position_embeddings=question["tokens"], model_type="")
    dtype = KVCacheDType.FP8_E4M3FN if question["kv_dtype"].startswith("fp8") else KVCacheDType.AUTO
    # Its safety factor of 1.15 is left out, so that the formulas are compared.
    nbytes = compute_kv_cache_memory(metadata, question["tokens"], 1, dtype, fragmentation_factor=1.0)
    return float(nbytes) / GIB


PEERS: dict[str, Callable[[Question], float]] = {
    "hf-mem": hf_mem,
    "kvfit": kvfit,
    "llm-d-planner": llm_d_planner,
    "vllm-wizard": vllm_wizard,
}


def answers(questions: list[Question]) -> dict[str, list[float | str]]:
    """GiB of one request over all GPUs, or the peer's own words for not answering."""
    found: dict[str, list[float | str]] = {}
    for name, ask in PEERS.items():
        found[name] = []
        for question in questions:
            try:
                found[name].append(ask(question))
            except Exception as error:
                found[name].append(f"{type(error).__name__}: {error}"[:160])
    return found


if __name__ == "__main__":
    json.dump(answers(json.load(sys.stdin)), sys.stdout)
