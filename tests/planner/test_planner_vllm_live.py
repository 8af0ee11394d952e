"""The plan against a real vLLM started here: tokens, blocks and concurrency equal, its log read by the doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record_vllm_cpu import BATCHED_TOKENS, KV_BYTES, RECORDS, WINDOW_TOKENS, free_port, record

from gateway.planner.cards import CPU_PLAIN, CPU_WITH_BF16, Card
from gateway.planner.diagnosis import diagnose, facts
from gateway.planner.figures import GIB
from gateway.planner.geometry import read_geometry
from gateway.planner.plan import make_plan
from gateway.planner.startup_log import read_startup
from gateway.planner.versions import behaviour_of
from gateway.planner.wish import Subject, Wish

ALL = {one["name"]: one for one in map(json.loads, RECORDS.read_text().splitlines())}
FLAGS = Path("/proc/cpuinfo")
HAS_BF16 = FLAGS.exists() and "avx512_bf16" in FLAGS.read_text()
CPU = Card("CPU", 16.0, CPU_WITH_BF16 if HAS_BF16 else CPU_PLAIN, 0)


@pytest.mark.vllm
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", ["interleaved", "hybrid-gdn"])
def test_the_plan_equals_a_server_started_now(name: str) -> None:
    seen, log = record(name, list(ALL.values()), free_port())
    wish = Wish(context=WINDOW_TOKENS, batched_tokens=BATCHED_TOKENS, kv_memory_gib=KV_BYTES / GIB)
    config: dict[str, Any] = ALL[name]["config"]
    plan = make_plan(Subject(read_geometry(config)), CPU, wish, behaviour_of("0.32.0"), compare=False)
    assert int(plan.size_tokens.value) == seen["kv_cache_size_tokens"]
    assert int(plan.num_blocks.value) == seen["num_gpu_blocks"]
    assert plan.max_concurrency.value == pytest.approx(seen["kv_cache_max_concurrency"], rel=1e-9)
    if HAS_BF16 or not name.startswith("hybrid"):  # the records are of such a processor
        assert seen == ALL[name]["seen"], "not what this vLLM exports: run tests/planner/record_vllm_cpu.py"
    read = facts(read_startup(log))
    assert read["kv_cache_size_tokens"] == seen["kv_cache_size_tokens"]
    assert read["max_model_len"] == WINDOW_TOKENS
    assert read["started"]
    assert {finding.severity for finding in diagnose(read_startup(log))} <= {"info", "warning"}
