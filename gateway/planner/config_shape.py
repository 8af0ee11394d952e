"""A config.json is someone else's file: what the arithmetic reads must be numbers and shapes a model can have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.planner.errors import PlannerError

_LAYERS, _WIDTH, _TOKENS = 4096, 1 << 24, 1 << 40
# field -> (least, most); what stands for "none" in published configs (0, -1) is let through where it is read so
_NUMBERS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), (1, _LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "vocab_size", "padded_vocab_size"), (1, _WIDTH)),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "num_key_value_heads",
            "n_head_kv", "num_kv_heads", "n_kv_heads", "num_query_groups", "multi_query_group_num", "head_dim",
            "attention_head_dim", "kv_channels", "d_kv", "v_head_dim", "global_head_dim", "swa_head_dim",
            "num_global_key_value_heads", "swa_num_key_value_heads", "kv_lora_rank", "q_lora_rank",
            "qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim", "index_n_heads", "index_topk_freq",
            "index_skip_topk_offset", "intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner",
            "n_routed_experts", "num_local_experts", "num_experts", "num_experts_per_tok", "n_shared_experts",
            "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_kv_shared_layers", "linear_num_key_heads",
            "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
            "mamba_d_state", "mamba_d_conv", "mamba_num_heads", "mamba_n_heads", "mamba_d_ssm", "ssm_state_size",
            "state_size", "conv_kernel", "conv_L_cache", "n_groups", "full_attention_interval",
        ),
        (0, _WIDTH),
    ),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), (-1, _TOKENS)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), (0, _TOKENS)),
}  # fmt: skip
_OBJECTS = ("quantization_config", "compression_config", "rope_scaling", "rope_parameters", "linear_attn_config")
_LISTS: dict[str, type | tuple[type, ...]] = {
    "layer_types": str,
    "layers_block_type": str,
    "compress_ratios": int,
    "hybrid_layer_pattern": int,
    "block_configs": Mapping,
}


def check_shape(text: Mapping[str, Any], name: str) -> None:
    """Raise PlannerError for the first field of the language model's config that cannot be meant."""
    for field, (least, most) in _NUMBERS.items():
        _check_number(text.get(field), least, most, f"{name}: {field}")
    for field in _OBJECTS:
        value = text.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise PlannerError(f"{name}: {field} is {_kind(value)} in the config, not an object.")
    for field, kind in _LISTS.items():
        value = text.get(field)
        if value is None or isinstance(value, str):
            continue
        if not isinstance(value, list) or len(value) > 2 * _LAYERS or not all(isinstance(one, kind) for one in value):
            raise PlannerError(f"{name}: {field} is not the list of layers it should be in the config.")
    _check_rope(text.get("rope_scaling"), name)
    _check_quantization(text.get("quantization_config"), name)


def _check_number(value: object, least: int, most: int, what: str) -> None:
    if value is None or isinstance(value, bool | list | Mapping):
        return  # absent, or a spelling another rule reads (per-layer lists)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if not isinstance(value, int):
        raise PlannerError(f"{what} is {_kind(value)} in the config, not a whole number.")
    if not least <= value <= most:
        shown = str(value) if abs(value) < 10**20 else f"about 10^{len(str(abs(value))) - 1}"
        raise PlannerError(f"{what} is {shown} in the config; no model has that ({least} to {most:,}).")


def _check_rope(rope: object, name: str) -> None:
    if not isinstance(rope, Mapping):
        return
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if factor is not None and not (isinstance(factor, int | float) and 0 < factor <= 1 << 20):
        raise PlannerError(
            f"{name}: the factor of rope_scaling is {_kind(factor)} in the config, not a number above 0."
        )
    _check_number(original, 0, _TOKENS, f"{name}: original_max_position_embeddings")


def _check_quantization(config: object, name: str) -> None:
    if not isinstance(config, Mapping):
        return
    groups, inner = config.get("config_groups"), config.get("quantization")
    broken = inner is not None and not isinstance(inner, Mapping)
    if isinstance(groups, Mapping):
        weights = [group.get("weights") if isinstance(group, Mapping) else 0 for group in groups.values()]
        broken = broken or not all(one is None or isinstance(one, Mapping) for one in weights)
    if broken:
        raise PlannerError(f"{name}: quantization_config has parts in the config that are not objects.")


def _kind(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 40 else f"a {type(value).__name__} of {len(words):,} characters"
