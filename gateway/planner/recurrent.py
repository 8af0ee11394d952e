"""Recurrent layers read from a config: Mamba 1 and 2, gated delta net, KDA, lightning attention, short convolutions.

State shapes follow vLLM 0.32 ``mamba_utils.py`` and each model's ``get_mamba_state_shape_from_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.planner.errors import GeometryMissing
from gateway.planner.layers import Layer, StateShape, recurrent

ATTENTION_FREE = frozenset(("mamba", "mamba2", "falcon_mamba", "codestral_mamba"))
_BOTH_IN_EACH_LAYER = frozenset(("falcon_h1",))
_SSM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_RECURRENT_NAMES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "kda", "gdn")

Caches = tuple[tuple[Layer, ...], ...]


def apply(text: Mapping[str, Any], model_type: str, attention: Caches, hidden: int, notes: list[str]) -> Caches:
    """``attention`` with the recurrent layers' states in the places the config names; unchanged for a plain model."""
    kinds = layer_kinds(text, model_type, len(attention))
    if kinds is None:
        return attention
    state = state_shape(text, model_type, hidden)
    if state is None:
        raise GeometryMissing(
            f"{model_type or 'This model'} has recurrent layers of a kind the planner does not know, so the size of "
            "their state cannot be computed. A start-up log of the model (kvgate doctor) gives the numbers.",
            ("recurrent state shape",),
        )
    if model_type == "qwen3_next":
        notes.append("Without mamba_ssm_dtype in the config the recurrent state has the model's dtype.")
    added = (recurrent(state),)
    caches: list[tuple[Layer, ...]] = []
    for kind, own in zip(kinds, attention, strict=False):
        caches.append((own if kind in ("attention", "both") else ()) + (added if kind in ("state", "both") else ()))
    return tuple(caches)


def layer_kinds(text: Mapping[str, Any], model_type: str, count: int) -> list[str] | None:
    """Per decoder layer ``attention``, ``state``, ``both`` or ``none``; None when the model is not recurrent at all."""
    if model_type in ATTENTION_FREE:
        return ["state"] * count
    if model_type in _BOTH_IN_EACH_LAYER:
        return ["both"] * count
    for reader in (_from_pattern, _from_types, _from_linear_config, _from_positions, _from_counts, _from_interval):
        kinds = reader(text, count)
        if kinds is not None:
            return kinds
    return None


def state_shape(text: Mapping[str, Any], model_type: str, hidden: int) -> StateShape | None:
    """The state one recurrent layer keeps for one request; None when no known set of fields is there."""
    ssm_bytes = _SSM_BYTES.get(str(text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or ""))
    if isinstance(text.get("linear_attn_config"), Mapping):
        return _kda(text["linear_attn_config"])
    if text.get("linear_num_value_heads"):
        return _gated_delta_net(text, ssm_bytes)
    if text.get("conv_L_cache"):
        return StateShape(
            "short_conv", int(text.get("conv_dim") or hidden), int(text["conv_L_cache"]), drafts_extend_conv=False
        )
    heads = _any(text, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    if heads or model_type == "mamba2":
        return _mamba2(text, model_type, hidden, heads, ssm_bytes)
    if text.get("attn_type_list") or model_type.startswith("minimax_text"):
        dim = int(text.get("head_dim") or 0)
        return StateShape("lightning", ssm_elements=int(text.get("num_attention_heads") or 0) * dim * dim)
    state_size = _any(text, "mamba_d_state", "state_size", "d_state")
    if state_size:
        inner = _any(text, "intermediate_size") if model_type in ATTENTION_FREE else None
        channels = inner or int((_any(text, "mamba_expand", "expand") or 2) * hidden)
        kernel = _any(text, "mamba_d_conv", "conv_kernel", "d_conv") or 4
        return StateShape("mamba1", channels, kernel, channels * state_size, ssm_bytes, drafts_extend_conv=False)
    return None


def _gated_delta_net(text: Mapping[str, Any], ssm_bytes: int | None) -> StateShape:
    key_heads, value_heads = int(text["linear_num_key_heads"]), int(text["linear_num_value_heads"])
    key_dim, value_dim = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
    return StateShape(
        "gated_delta_net",
        conv_channels=2 * key_heads * key_dim + value_heads * value_dim,
        conv_kernel=int(text.get("linear_conv_kernel_dim") or 4),
        ssm_elements=value_heads * value_dim * key_dim,
        ssm_bytes=ssm_bytes,
    )


def _kda(linear: Mapping[str, Any]) -> StateShape:
    """Kimi delta attention; its recurrent state stays float32 unless told otherwise (vLLM ``kda_state_dtype``)."""
    heads, dim = int(linear["num_heads"]), int(linear["head_dim"])
    return StateShape(
        "kda",
        conv_channels=3 * heads * dim,
        conv_kernel=int(linear.get("short_conv_kernel_size") or 4),
        ssm_elements=heads * dim * dim,
        ssm_bytes=4,
    )


def _mamba2(
    text: Mapping[str, Any], model_type: str, hidden: int, heads: int | None, ssm_bytes: int | None
) -> StateShape:
    heads = heads or int(text["num_heads"])
    dim = _any(text, "mamba_head_dim", "mamba_d_head", "mamba_headdim") or int(text.get("head_dim") or 64)
    state = _any(text, "ssm_state_size", "mamba_d_state", "state_size", "mamba_state_dim") or 128
    groups = _any(text, "n_groups", "mamba_n_groups", "mamba_ngroups") or 1
    inner = _any(text, "mamba_d_ssm")
    if inner is None:
        expand = _any(text, "mamba_expand", "expand") or 2
        inner = heads * dim if model_type == "nemotron_h" else expand * hidden
    if ssm_bytes is None and model_type == "nemotron_h":
        ssm_bytes = 4  # vLLM NemotronHForCausalLMConfig: float32 unless the config says otherwise
    return StateShape(
        "mamba2",
        conv_channels=inner + 2 * groups * state,
        conv_kernel=_any(text, "conv_kernel", "mamba_d_conv", "conv_kernel_size") or 4,
        ssm_elements=heads * dim * state,
        ssm_bytes=ssm_bytes,
        groups=groups,
        group_elements=2 * state,
    )


def _from_pattern(text: Mapping[str, Any], count: int) -> list[str] | None:
    pattern = text.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return None
    letters = pattern.replace("|", "")[:count]
    return [{"M": "state", "*": "attention"}.get(letter, "none") for letter in letters]


def _from_types(text: Mapping[str, Any], count: int) -> list[str] | None:
    for name in ("layer_types", "layers_block_type", "layer_block_types"):
        types = text.get(name)
        if not isinstance(types, list) or not any(str(kind) in (*_RECURRENT_NAMES, "hybrid", "moe") for kind in types):
            continue
        words = {"hybrid": "both", "mlp": "none", "moe": "none"}
        return [
            "state" if str(kind) in _RECURRENT_NAMES else words.get(str(kind), "attention") for kind in types[:count]
        ]
    return None


def _from_linear_config(text: Mapping[str, Any], count: int) -> list[str] | None:
    linear = text.get("linear_attn_config")
    if not isinstance(linear, Mapping) or not isinstance(linear.get("kda_layers"), list):
        return None
    numbered_from_one = set(linear["kda_layers"])
    return ["state" if index + 1 in numbered_from_one else "attention" for index in range(count)]


def _from_positions(text: Mapping[str, Any], count: int) -> list[str] | None:
    marks = text.get("attn_type_list")
    if isinstance(marks, list) and 0 in marks:
        return ["attention" if mark == 1 else "state" for mark in marks[:count]]
    indices = text.get("attn_layer_indices") or text.get("full_attn_idxs")
    if isinstance(indices, list) and (_any(text, "mamba_n_heads", "mamba_d_state", "conv_L_cache")):
        return ["attention" if index in indices else "state" for index in range(count)]
    period = _any(text, "attn_layer_period", "mamba_step")
    if period and _any(text, "mamba_d_state"):
        offset = int(text.get("attn_layer_offset") or 0)
        return ["attention" if index % period == offset else "state" for index in range(count)]
    return None


def _from_counts(text: Mapping[str, Any], count: int) -> list[str] | None:
    """Summaries that only count their layers; grouping does not depend on the order."""
    states = _any(text, "linear_attention_layers", "mamba2_layers", "mamba_layers")
    attention = _any(text, "full_attention_layers")
    if states is None or attention is None:
        return None
    rest = max(count - states - attention, 0)
    return (["state"] * states + ["attention"] * attention + ["none"] * rest)[:count]


def _from_interval(text: Mapping[str, Any], count: int) -> list[str] | None:
    """Qwen3-Next and 3.5 without ``layer_types``: every n-th layer attends to everything."""
    step = _any(text, "full_attention_interval")
    if not step or not text.get("linear_num_value_heads"):
        return None
    return ["attention" if (index + 1) % step == 0 else "state" for index in range(count)]


def _any(text: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = text.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            return int(value)
    return None
