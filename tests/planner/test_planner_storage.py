"""What a cache dtype asked for is stored as: declared by the checkpoint, and by card for sparse MLA."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.planner.cards import Card, card_of_memory, find_card
from gateway.planner.catalogue import find
from gateway.planner.flags import serve_command
from gateway.planner.geometry import ModelGeometry, read_geometry
from gateway.planner.layers import LayerKind
from gateway.planner.plan import Plan, make_plan
from gateway.planner.speculation import parse_speculation
from gateway.planner.storage import declared_dtype, is_sparse_mla, stored_dtype
from gateway.planner.versions import behaviour_of
from gateway.planner.wish import Subject, Wish

HOPPER, SERVER_BLACKWELL, CONSUMER_BLACKWELL = (find_card(name) for name in ("H200", "GB200", "RTX PRO 6000"))


def _geometry(name: str) -> ModelGeometry:
    entry = find(name)
    assert entry is not None
    return read_geometry(entry.as_config(), entry.name)


def _plan(name: str, card: Card, version: str = "0.32.0", **wish: Any) -> Plan:
    entry = find(name)
    assert entry is not None
    subject = Subject(_geometry(name), entry.parameters, entry.vision_parameters)
    return make_plan(subject, card, Wish(**wish), behaviour_of(version), compare=False)


@pytest.mark.parametrize(
    ("quantization", "declared"),
    [
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, None),
        ({"quant_method": "awq", "bits": 4}, None),
        ({"kv_cache_scheme": "garbage"}, None),
        (None, None),
    ],
)
def test_a_checkpoint_may_declare_its_cache(quantization: dict[str, Any] | None, declared: str | None) -> None:
    assert declared_dtype(quantization) == declared


def test_auto_is_what_the_checkpoint_declares_and_the_plan_says_so() -> None:
    wide = _plan("nvidia/Qwen3-235B-A22B-NVFP4", HOPPER, tp=4, kv_dtype="bfloat16")
    plan = _plan("nvidia/Qwen3-235B-A22B-NVFP4", HOPPER, tp=4)
    assert plan.kv_bytes_per_token.value == wide.kv_bytes_per_token.value / 2
    assert any("auto means fp8 here: the checkpoint declares it" in warning for warning in plan.warnings)
    assert not any("auto means" in warning for warning in wide.warnings)
    older = _plan("nvidia/Qwen3-235B-A22B-NVFP4", HOPPER, "0.11.0", tp=4)
    assert older.kv_bytes_per_token.value == wide.kv_bytes_per_token.value


@pytest.mark.parametrize(
    ("card", "version", "asked", "stored"),
    [
        (HOPPER, "0.32.0", "fp8", "fp8_ds_mla"),
        (HOPPER, "0.32.0", "auto", "auto"),
        (SERVER_BLACKWELL, "0.26.0", "fp8_e4m3", "fp8_e4m3"),
        (SERVER_BLACKWELL, "0.32.0", "auto", "fp8"),
        (CONSUMER_BLACKWELL, "0.32.0", "auto", "fp8_ds_mla"),
        (find_card("MI300X"), "0.32.0", "fp8", "fp8"),
        (SERVER_BLACKWELL, "0.24.0", "fp8", "fp8_ds_mla"),
    ],
)
def test_sparse_rows_depend_on_the_card(card: Card, version: str, asked: str, stored: str) -> None:
    assert stored_dtype(_geometry("zai-org/GLM-5.1"), asked, card, behaviour_of(version)) == stored


def test_layers_that_reuse_a_choice_keep_no_indexer_and_the_drafter_always_one() -> None:
    geometry = _geometry("zai-org/GLM-5.2")
    choosing = [index for index, caches in enumerate(geometry.decoder_layers) if len(caches) == 2]
    assert choosing == [0, 1, 2, *range(6, 78, 4)]
    drafter = parse_speculation("mtp:1")
    assert drafter is not None
    assert [layer.kind for layer in drafter.layers(geometry, None)] == [LayerKind.MLA, LayerKind.INDEXER]
    new = _plan("zai-org/GLM-5.2", SERVER_BLACKWELL, "0.26.0", tp=4, kv_dtype="fp8")
    assert new.kv_bytes_per_token.value == 78 * 576 + 21 * 132
    old = _plan("zai-org/GLM-5.2", HOPPER, "0.24.0", tp=4, kv_dtype="fp8")
    assert old.kv_bytes_per_token.value == 78 * (656 + 132)


def test_a_pattern_names_the_layers_that_choose() -> None:
    entry = find("zai-org/GLM-5.1")
    assert entry is not None
    config = {**entry.as_config(), "num_hidden_layers": 4, "index_topk_pattern": "FSSF"}
    assert [len(caches) for caches in read_geometry(config).decoder_layers] == [2, 1, 1, 2]


def test_deepseek_v4_is_planned_by_its_own_rules() -> None:
    assert not is_sparse_mla(_geometry("deepseek-ai/DeepSeek-V4-Flash"))


def test_a_quantisation_vllm_applies_itself_stands_in_the_command() -> None:
    plan = _plan("meta-llama/Llama-3.3-70B-Instruct", HOPPER, quant="fp8")
    assert "--quantization fp8" in serve_command(plan)
    assert not any("quantised already" in warning for warning in plan.warnings)


def test_a_quantisation_that_needs_a_checkpoint_is_said() -> None:
    plan = _plan("Qwen/Qwen2.5-32B-Instruct", find_card("RTX 4090"), quant="awq")
    assert "--quantization" not in serve_command(plan)
    assert any("put its name in place of Qwen/Qwen2.5-32B-Instruct" in warning for warning in plan.warnings)
    already = _plan("Qwen/Qwen3-32B-FP8", HOPPER, quant="fp8")
    assert "--quantization" not in serve_command(already)


def test_an_eagle_head_without_a_name_is_said() -> None:
    plan = _plan("Qwen/Qwen3-8B", card_of_memory(48.0), speculation=parse_speculation("eagle3:3"))
    assert any("--speculative eagle3:OWNER/HEAD:3" in warning for warning in plan.warnings)
    named = _plan("Qwen/Qwen3-8B", card_of_memory(48.0), speculation=parse_speculation("eagle3:owner/head:3"))
    assert not any("OWNER/HEAD" in warning for warning in named.warnings)
    assert "owner/head" in serve_command(named)


def test_the_video_0_11_profiles_is_said() -> None:
    wish: dict[str, Any] = {"tp": 4, "context": 65536}
    said = [
        any(
            "153,600" in warning
            for warning in _plan("Qwen/Qwen3-VL-30B-A3B-Instruct", HOPPER, version, **more).warnings
        )
        for version, more in (("0.11.0", wish), ("0.20.2", wish), ("0.11.0", {**wish, "text_only": True}))
    ]
    assert said == [True, False, False]


def test_what_a_bare_4_bit_name_leaves_open_is_in_the_range() -> None:
    entry = find("Qwen/Qwen3.5-35B-A3B")
    assert entry is not None
    subject = Subject(_geometry("Qwen/Qwen3.5-35B-A3B"), entry.parameters, entry.vision_parameters)
    plan = make_plan(subject, card_of_memory(48.0), Wish(quant="awq"), behaviour_of("0.17.1"), compare=False)
    figure = plan.weights.per_gpu
    assert figure.lowest < figure.value < 22.05 < figure.highest  # 22.05 GiB: a public log of such a checkpoint
    dense = _plan("Qwen/Qwen2.5-32B-Instruct", HOPPER, quant="awq").weights.per_gpu
    assert dense.highest == pytest.approx(dense.value * 1.03)
