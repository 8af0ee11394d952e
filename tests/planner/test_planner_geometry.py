"""Configs of every family read into layers; weights counted by part; drafters; hardware truth."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gateway.planner.cards import Card, find_card, table
from gateway.planner.catalogue import entries, find, suffix_quant
from gateway.planner.errors import GeometryMissing, UnknownCard
from gateway.planner.geometry import ModelGeometry, derived_max_len, read_geometry
from gateway.planner.hardware import backend_flag, kv_support, pitfalls
from gateway.planner.layers import LayerKind
from gateway.planner.parameters import count_parameters
from gateway.planner.source import load_subject
from gateway.planner.speculation import parse_speculation
from gateway.planner.versions import batch_defaults, behaviour_of, parse_version
from gateway.planner.weights import quant_of, unquantised_parts, weights_of

PLAIN = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000}


def _kinds(config: dict[str, Any]) -> Counter[str]:
    return Counter(str(layer.kind) for layer in read_geometry({**PLAIN, **config}).layers)


def _catalogue(name: str) -> ModelGeometry:
    entry = find(name)
    assert entry is not None
    return read_geometry(entry.as_config(), entry.name)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"model_type": "llama"}, {"full": 8}),
        ({"model_type": "mistral", "sliding_window": 64}, {"sliding": 8}),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, {"full": 8}),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6},
            {"full": 6, "sliding": 2},
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, {"sliding": 4, "full": 4}),
        ({"model_type": "gemma3_text", "sliding_window": 64}, {"sliding": 7, "full": 1}),
        ({"model_type": "gpt_oss", "sliding_window": 64}, {"sliding": 4, "full": 4}),
        ({"model_type": "cohere2", "sliding_window": 64, "sliding_window_pattern": 4}, {"sliding": 6, "full": 2}),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0] * 2},
            {"chunked": 6, "full": 2},
        ),
        (
            {
                "model_type": "gemma4_text",
                "sliding_window": 64,
                "num_kv_shared_layers": 4,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 4,
            },
            {"sliding": 3, "full": 1},
        ),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"mla": 8}),
        (
            {"model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
            {"mla": 8, "indexer": 8},
        ),
        ({"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}, {"full": 8}),
        (
            {
                "model_type": "qwen3_next",
                "full_attention_interval": 4,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
            },
            {"state": 6, "full": 2},
        ),
        (
            {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16},
            {"state": 7, "full": 1},
        ),
        (
            {"model_type": "bamba", "attn_layer_indices": [3], "mamba_n_heads": 8, "mamba_d_state": 64},
            {"state": 7, "full": 1},
        ),
        (
            {"model_type": "falcon_h1", "mamba_n_heads": 8, "mamba_d_ssm": 512, "mamba_d_state": 64},
            {"state": 8, "full": 8},
        ),
        (
            {"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "state_size": 64, "num_attention_heads": None},
            {"state": 8},
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv"] * 6 + ["full_attention"] * 2, "conv_L_cache": 3},
            {"state": 6, "full": 2},
        ),
        (
            {
                "model_type": "kimi_linear",
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "num_heads": 8, "head_dim": 64},
            },
            {"state": 6, "mla": 2},
        ),
        (
            {
                "model_type": "nemotron_h",
                "hybrid_override_pattern": "MEM*ME-E",
                "mamba_num_heads": 8,
                "mamba_head_dim": 64,
            },
            {"state": 3, "full": 1},
        ),
        (
            {"model_type": "minimax_text_01", "attn_type_list": [0, 0, 0, 1] * 2, "head_dim": 64},
            {"state": 6, "full": 2},
        ),
        ({"model_type": "whisper", "is_encoder_decoder": True, "max_source_positions": 1500}, {"full": 8, "cross": 8}),
        ({"model_type": "bert"}, {}),
        (
            {"model_type": "mimo_v2_flash", "sliding_window": 64, "hybrid_layer_pattern": [0, 1, 1, 1] * 2},
            {"full": 2, "sliding": 6},
        ),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_each_family_is_read_into_its_layers(config: dict[str, Any], kinds: dict[str, int]) -> None:
    assert _kinds(config) == Counter(kinds)


def test_summaries_that_only_count_their_layers_are_enough() -> None:
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    assert _kinds({"full_attention_layers": 2, "linear_attention_layers": 6, **linear}) == Counter(full=2, state=6)
    assert _kinds({"sliding_window": 64, "sliding_layers": 6}) == Counter(sliding=6, full=2)
    assert _kinds({"kv_lora_rank": 512, "qk_rope_head_dim": 64}) == Counter(mla=8)


def test_a_nested_text_config_is_found_with_the_outer_dtype() -> None:
    config = {"dtype": "float32", "vision_config": {}, "text_config": {**PLAIN, "model_type": "qwen3"}}
    geometry = read_geometry(config)
    assert (geometry.model_bytes, geometry.multimodal, len(geometry.layers)) == (4, True, 8)


def test_nas_blocks_without_attention_cache_nothing() -> None:
    blocks = [{"attention": {"no_op": True}}, {"attention": {"n_heads_in_group": 4}}]
    assert len(read_geometry({**PLAIN, "num_hidden_layers": 2, "block_configs": blocks}).layers) == 1


def test_multi_query_attention_has_one_head() -> None:
    assert read_geometry({**PLAIN, "multi_query": True}).layers[0].kv_heads == 1


def test_pipeline_stages_are_cut_as_vllm_cuts_them() -> None:
    geometry = read_geometry({**PLAIN, "num_hidden_layers": 27})
    assert [len(geometry.stage(index, 2)) for index in range(2)] == [14, 13]
    whole = read_geometry({**PLAIN, "num_hidden_layers": 61})
    assert [len(whole.stage(index, 4)) for index in range(4)] == [15, 15, 16, 15]


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({}, None),
    ],
)
def test_the_models_own_window_includes_its_rope_scaling(config: dict[str, Any], length: int | None) -> None:
    assert derived_max_len(config) == length


def test_an_adapter_config_is_refused_with_the_missing_fields() -> None:
    with pytest.raises(GeometryMissing) as caught:
        read_geometry({"peft_type": "LORA", "r": 16})
    assert caught.value.fields == ("num_hidden_layers", "hidden_size")


def test_every_catalogue_entry_is_readable_and_its_parameters_agree() -> None:
    off = 0
    for entry in entries().values():
        geometry = read_geometry(entry.as_config(), entry.name)
        assert geometry.layers or geometry.model_type == "whisper"
        if entry.parameters and geometry.model_type != "whisper":
            ratio = count_parameters(geometry).total / entry.parameters
            assert ratio == pytest.approx(1, abs=0.04), entry.name
            off += abs(ratio - 1) > 0.005
    assert len(entries()) >= 130
    assert off <= 25


def test_names_are_found_as_people_write_them() -> None:
    for name in ("qwen/qwen2.5-32b-instruct-awq", "Qwen2.5-32B-Instruct", "unsloth/Qwen3-8B-bnb-4bit", "gpt-oss-20b"):
        assert find(name) is not None, name
    assert find("owner/never-seen-9b") is None
    assert suffix_quant("x/Qwen3-8B-FP8") == "fp8"
    assert suffix_quant("x/Qwen3-8B") is None


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (None, "none"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb-4bit"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quantization": {"quant_algo": "FP8"}}, "fp8"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
            "int8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "int4",
        ),
    ],
)
def test_the_quantisation_is_read_from_the_config(config: dict[str, Any] | None, scheme: str) -> None:
    assert quant_of(config) == scheme


def test_ignore_lists_leave_parts_wide_but_norms_do_not() -> None:
    layers = {"attention": 4, "state": 0, "shared": 4, "dense": 4, "experts": 4}
    whole = {"ignore": [f"model.layers.{index}.self_attn*" for index in range(4)]}
    norms = {"ignore": [f"model.layers.{index}.self_attn.q_a_layernorm" for index in range(4)]}
    assert unquantised_parts(whole, layers) == {"attention": 1.0}
    assert unquantised_parts(norms, layers) == {}
    assert unquantised_parts({"ignore": ["re:.*self_attn.*", "re:.*shared_experts.*"]}, layers) == {
        "attention": 1.0,
        "shared": 1.0,
    }


def test_experts_in_fp4_inside_an_fp8_checkpoint_are_counted_as_such() -> None:
    geometry = _catalogue("deepseek-ai/DeepSeek-V4-Flash")
    # The reported servers hold the 284 billion parameters on two cards of 95 GiB.
    assert 65 < weights_of(geometry, quant=None, tp=2, pp=1).per_gpu.value < 80


def test_weights_divide_by_tensor_parallelism_and_pipeline_stages() -> None:
    geometry = _catalogue("meta-llama/Meta-Llama-3.1-70B")
    one, two = (weights_of(geometry, quant=None, tp=tp, pp=1).per_gpu.value for tp in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.01)
    piped = weights_of(geometry, quant=None, tp=1, pp=2).per_gpu.value
    assert one / 2 <= piped <= one * 0.55


@pytest.mark.parametrize(
    ("text", "method", "tokens"),
    [
        ("mtp:3", "mtp", 3),
        ("mtp 3", "mtp", 3),
        ("eagle3:2", "eagle3", 2),
        ("ngram:4", "ngram", 4),
        ("draft_model:Qwen/Qwen3-0.6B:5", "draft_model", 5),
        ('{"method": "eagle", "num_speculative_tokens": 2}', "eagle", 2),
    ],
)
def test_speculation_is_read_in_every_spelling(text: str, method: str, tokens: int) -> None:
    spec = parse_speculation(text)
    assert spec is not None
    assert (spec.method, spec.tokens) == (method, tokens)


def test_drafters_add_their_own_layers() -> None:
    target, draft = _catalogue("Qwen/Qwen3-8B"), _catalogue("Qwen/Qwen3-0.6B")
    for text, layers in (("eagle3:2", 1), ("ngram:3", 0), ("draft_model:d:3", 28)):
        spec = parse_speculation(text)
        assert spec is not None
        assert len(spec.layers(target, draft if "draft" in text else None)) == layers
    sparse = parse_speculation("mtp:1")
    assert sparse is not None
    added = sparse.layers(_catalogue("deepseek-ai/DeepSeek-V3.2"), None)
    assert [layer.kind for layer in added] == [LayerKind.MLA, LayerKind.INDEXER]
    unplanned = parse_speculation("dspark:7")
    assert unplanned is not None
    assert unplanned.unplanned
    assert unplanned.layers(_catalogue("deepseek-ai/DeepSeek-V3.2"), None) == ()


@pytest.mark.parametrize(
    ("card", "model", "kv_dtype", "runs", "backend"),
    [
        ("T4", "Qwen/Qwen3-8B", "fp8", False, ""),
        ("RTX 3090", "Qwen/Qwen3-8B", "fp8", True, "FLASHINFER"),
        ("RTX 3090", "openai/gpt-oss-20b", "fp8", False, ""),
        ("RTX 3090", "Qwen/Qwen3-8B", "int8_per_token_head", True, "TRITON_ATTN"),
        ("RTX 3090", "Qwen/Qwen3-8B", "fp8_per_token_head", False, ""),
        ("A100", "deepseek-ai/DeepSeek-V2-Lite", "fp8", False, ""),
        ("RTX 4090", "Qwen/Qwen3-8B", "fp8", True, "FLASHINFER"),
        ("H100", "Qwen/Qwen3-8B", "fp8", True, ""),
        ("H100", "Qwen/Qwen3-8B", "fp8_e5m2", True, "FLASHINFER"),
        ("H100", "Qwen/Qwen3-8B", "nvfp4", False, ""),
        ("B200", "Qwen/Qwen3-8B", "nvfp4", True, ""),
        ("RTX 5090", "Qwen/Qwen3-8B", "fp8", True, "FLASHINFER"),
        ("H100", "deepseek-ai/DeepSeek-V3.2", "fp8_ds_mla", True, ""),
        ("H100", "Qwen/Qwen3-8B", "fp8_ds_mla", False, ""),
        ("H100", "deepseek-ai/DeepSeek-V3", "int4_per_token_head", False, ""),
        ("MI300X", "Qwen/Qwen3-8B", "fp8", True, ""),
        ("RX 7900 XTX", "Qwen/Qwen3-8B", "fp8", False, ""),
    ],
)
def test_which_kv_dtype_runs_where(card: str, model: str, kv_dtype: str, runs: bool, backend: str) -> None:
    support = kv_support(find_card(card), _catalogue(model), kv_dtype, behaviour_of("0.32.0"))
    assert (support.runs, support.backend if runs else "") == (runs, backend)
    assert runs or support.note


def test_a_dtype_newer_than_the_release_is_refused() -> None:
    support = kv_support(find_card("H100"), _catalogue("Qwen/Qwen3-8B"), "int8_per_token_head", behaviour_of("0.19.0"))
    assert not support.runs
    assert "since 0.20" in support.note


def test_the_backend_is_named_as_the_release_wants_it() -> None:
    assert backend_flag("FLASHINFER", behaviour_of("0.10.2")) == ("VLLM_ATTENTION_BACKEND=FLASHINFER", "")
    assert backend_flag("FLASHINFER", behaviour_of("0.32.0")) == ("", "--attention-backend FLASHINFER")


def test_pitfalls_speak_of_desktops_shared_memory_and_ranks() -> None:
    text = " ".join(pitfalls(find_card("RTX 4090"), 2, 0.92))
    assert "desktop" in text
    assert "smallest rank" in text
    assert "shared with the CPU" in " ".join(pitfalls(find_card("GB10"), 1, 0.92))
    assert pitfalls(find_card("H100"), 1, 0.92) == []


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("A100-PCIE-40GB", "A100 40GB"),
        ("H100", "H100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_cards_are_found_as_drivers_name_them(said: str, name: str) -> None:
    assert find_card(said).name == name


def test_an_unknown_card_is_refused_with_near_names() -> None:
    with pytest.raises(UnknownCard, match="RTX 5090"):
        find_card("RTX 5099")


def test_every_card_has_memory_below_the_box_and_a_capability() -> None:
    assert len(table()) >= 40
    for card in table():
        assert 4 < card.memory_gib < 300
        assert card.capability
        assert card.bandwidth_gbps > 0


def test_batch_defaults_follow_card_and_release() -> None:
    new, old = behaviour_of("0.32.0"), behaviour_of("0.6.4")
    assert batch_defaults(new, 23.5, "RTX 4090", 8192).batched_tokens == 2048
    assert batch_defaults(new, 79.1, "H100 80GB", 8192).seqs == 1024
    assert batch_defaults(new, 79.2, "A100 80GB", 8192).batched_tokens == 2048
    assert batch_defaults(new, 178.4, "B200", 8192).batched_tokens == 16384
    assert batch_defaults(old, 23.5, "RTX 3090", 20000).batched_tokens == 20000
    assert batch_defaults(old, 23.5, "RTX 3090", 35000).batched_tokens == 512


def test_versions_are_read_as_people_write_them() -> None:
    assert parse_version("v0.20.2") == (0, 20, 2)
    assert parse_version("0.11.2.dev280+g1234") == (0, 11, 2)
    assert behaviour_of("0.9.x").default_utilization == 0.90
    assert behaviour_of(None).null_block_reserved
    assert behaviour_of("0.7.3").engine_v0
    assert not behaviour_of("0.7.3", engine="V1").engine_v0


def test_an_unknown_capability_is_not_checked_but_said() -> None:
    support = kv_support(Card("x", 24.0, "unknown", 0), _catalogue("Qwen/Qwen3-8B"), "fp8", behaviour_of(None))
    assert support.runs
    assert not support.known


def test_every_catalogue_entry_says_what_it_was_held_against() -> None:
    unchecked = [name for name, entry in entries().items() if not entry.source]
    assert len(unchecked) <= 4
    assert load_subject("google/gemma-3-12b-it").geometry.notes[-1].startswith("The catalogue's geometry")
    assert not any("held against" in note for note in load_subject("Qwen/Qwen3-8B").geometry.notes)


def test_every_card_says_where_its_figures_come_from() -> None:
    cards = table()
    assert len(cards) >= 40
    assert sum(card.seen for card in cards) >= 20
    assert sum(bool(card.checked) for card in cards) >= 60
    assert all(card.memory_gib > 0 and card.bandwidth_gbps > 0 and card.capability for card in cards)


def test_unified_memory_gets_the_defaults_of_small_cards() -> None:
    assert batch_defaults(behaviour_of("0.32.0"), 121.7, "GB10", 8192, unified=True).batched_tokens == 2048
    assert find_card("DGX Spark").unified
