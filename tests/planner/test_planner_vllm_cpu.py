"""What a real vLLM 0.32 (CPU build) exported for tiny models of every layout, against the plan for the same input.

Recorded from ``vllm:cache_config_info`` with 64 MiB of KV memory, a window of 4,096 and 1,024 batched tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.planner.cards import CPU_WITH_BF16, Card
from gateway.planner.geometry import read_geometry
from gateway.planner.plan import make_plan
from gateway.planner.versions import behaviour_of
from gateway.planner.wish import Subject, Wish

RECORDS = [json.loads(line) for line in (Path(__file__).parent / "vllm_cpu.jsonl").read_text().splitlines()]
CPU = Card("CPU", 16.0, CPU_WITH_BF16, 0)  # what the records were made on


@pytest.mark.parametrize("record", RECORDS, ids=[record["name"] for record in RECORDS])
def test_the_plan_equals_the_server(record: dict[str, Any]) -> None:
    flags, seen = record["flags"], record["seen"]
    wish = Wish(
        context=4096,
        batched_tokens=1024,
        kv_memory_gib=64 / 1024,
        kv_dtype=flags.get("kv-cache-dtype", "auto"),
        block_tokens=int(flags["block-size"]) if "block-size" in flags else None,
    )
    plan = make_plan(Subject(read_geometry(record["config"])), CPU, wish, behaviour_of("0.32.0"), compare=False)
    assert int(plan.size_tokens.value) == seen["kv_cache_size_tokens"]
    assert int(plan.num_blocks.value) == seen["num_gpu_blocks"]
    assert plan.max_concurrency.value == pytest.approx(seen["kv_cache_max_concurrency"], rel=1e-12)


def test_the_records_cover_every_layout_the_cpu_runs() -> None:
    names = {record["name"] for record in RECORDS}
    assert names >= {
        "gqa",
        "mqa",
        "mla",
        "sliding",
        "interleaved",
        "hybrid-gdn",
        "hybrid-mamba2",
        "gqa-fp8",
        "kv-sharing",
    }
