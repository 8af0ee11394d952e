"""How many parameters a geometry has, by part: what is quantised, what stays wide, what tensor parallelism divides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.planner.geometry import ModelGeometry, first_int, head_dim_of, kv_heads_of
from gateway.planner.recurrent import layer_kinds

_PLAIN_MLP = frozenset(
    [
        "gpt2",
        "gpt_neox",
        "gptj",
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "starcoder2",
        "gpt_bigcode",
        "phi",
        "nemotron",
        "whisper",
    ]
)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts. ``embedding`` counts once when input and output share it (then ``head`` is 0)."""

    embedding: int = 0
    head: int = 0
    attention: int = 0
    state: int = 0
    dense: int = 0
    shared: int = 0
    experts: int = 0
    router: int = 0
    vision: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)


PARTS = ("embedding", "head", "attention", "state", "dense", "shared", "experts", "router", "vision", "other")


def count_parameters(geometry: ModelGeometry) -> Parameters:
    """Parameters by part from the config's sizes: exact for plain dense models, within about 2 % for the others."""
    text, hidden = geometry.config, geometry.hidden
    count = len(geometry.decoder_layers)
    kinds = layer_kinds(text, geometry.model_type, count) or ["attention"] * count
    attention = sum(kind in ("attention", "both") for kind in kinds) * _attention(geometry)
    state = sum(kind in ("state", "both") for kind in kinds) * _state(geometry)
    dense = shared = experts = router = 0
    for index, kind in enumerate(kinds):
        mlp = _mlp(geometry, index, kind)
        dense, shared, experts, router = dense + mlp[0], shared + mlp[1], experts + mlp[2], router + mlp[3]
    if isinstance(text.get("block_configs"), list):
        attention, dense = _per_block(geometry)
    embedding = geometry.vocab * hidden
    per_layer = first_int(text, "hidden_size_per_layer_input") or 0
    wide = (first_int(text, "vocab_size_per_layer_input") or geometry.vocab) * per_layer * count if per_layer else 0
    return Parameters(
        embedding=embedding,
        head=0 if text.get("tie_word_embeddings") else embedding,
        attention=attention,
        state=state,
        dense=dense,
        shared=shared,
        experts=experts,
        router=router,
        vision=_vision(text) if geometry.multimodal else 0,
        other=2 * hidden * count + hidden + wide,
    )


def _attention(geometry: ModelGeometry) -> int:
    text, hidden, heads = geometry.config, geometry.hidden, geometry.attention_heads
    if text.get("kv_lora_rank"):
        return _latent_attention(text, hidden, heads)
    key_dim, kv_heads = head_dim_of(text, hidden, heads), kv_heads_of(text, heads)
    value_dim = first_int(text, "v_head_dim") or key_dim
    queries = heads * key_dim * (2 if _output_gate(geometry) else 1)
    weights = hidden * queries + hidden * kv_heads * (key_dim + value_dim) + heads * value_dim * hidden
    if text.get("attention_bias"):
        weights += queries + kv_heads * (key_dim + value_dim)
    return weights


def _output_gate(geometry: ModelGeometry) -> bool:
    return bool(geometry.config.get("attn_output_gate")) or geometry.model_type.startswith(("qwen3_5", "qwen3_next"))


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    rank, rope = int(text["kv_lora_rank"]), int(text.get("qk_rope_head_dim") or 0)
    nope, value = int(text.get("qk_nope_head_dim") or 128), int(text.get("v_head_dim") or 128)
    query_rank = text.get("q_lora_rank")
    width = heads * (nope + rope)
    queries = hidden * query_rank + query_rank * width if query_rank else hidden * width
    weights = int(queries) + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    index_heads, index_dim = first_int(text, "index_n_heads"), first_int(text, "index_head_dim")
    if index_heads and index_dim:
        weights += int(query_rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
    return weights


def _state(geometry: ModelGeometry) -> int:
    """Projections of one recurrent layer."""
    text, hidden = geometry.config, geometry.hidden
    state = next((layer.state for layer in geometry.layers if layer.state is not None), None)
    if state is None:
        return 0
    if state.family == "gated_delta_net":
        value = int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])
        return hidden * (state.conv_channels + value + 2 * int(text["linear_num_value_heads"])) + value * hidden
    if state.family == "kda":
        width = state.conv_channels // 3
        return hidden * (state.conv_channels + 2 * width) + width * hidden
    if state.family == "mamba2":
        inner = state.conv_channels - state.groups * state.group_elements
        heads = first_int(text, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads") or 0
        return hidden * (inner + state.conv_channels + heads) + inner * hidden
    if state.family == "mamba1":
        rank = hidden // 16
        states = state.ssm_elements // state.conv_channels
        return state.conv_channels * (3 * hidden + 2 * rank + 3 * states)
    return 4 * hidden * max(state.conv_channels, hidden)


def _mlp(geometry: ModelGeometry, index: int, kind: str) -> tuple[int, int, int, int]:
    """(dense, shared, routed experts, router) parameters of the feed-forward part of one decoder layer."""
    text, hidden = geometry.config, geometry.hidden
    matrices = 2 if geometry.model_type in _PLAIN_MLP else 3
    pattern = text.get("hybrid_override_pattern")
    listed = text.get("layers_block_type")
    if geometry.model_type == "nemotron_h":
        mark = pattern[index] if isinstance(pattern, str) else str(listed[index]) if isinstance(listed, list) else ""
        return _nemotron_mlp(text, hidden, mark)
    inner = (
        first_int(text, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim") or 4 * hidden
    )
    if geometry.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return 0, 0, 0, 0
    total = first_int(text, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts") or 0
    if not total or not _routed(text, geometry.model_type, index):
        wide = first_int(text, "dense_intermediate_size", "intermediate_size_mlp")
        doubled = 2 if text.get("use_double_wide_mlp") and _shares_cache(text, index) else 1
        return matrices * hidden * (wide or inner) * doubled, 0, 0, 0
    each = first_int(text, "moe_intermediate_size", "expert_ffn_hidden_size") or inner
    width = first_int(text, "routed_expert_hidden_size", "moe_latent_size") or hidden
    shared_inner = first_int(text, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared_count = first_int(text, "n_shared_experts", "num_shared_experts") or 0
    if shared_inner is None:
        shared_inner = each * shared_count
        if geometry.model_type.startswith("llama4"):
            shared_inner = inner
    beside = matrices * hidden * inner if text.get("enable_moe_block") else 0  # Gemma 4: a dense MLP runs beside
    return beside, matrices * hidden * shared_inner, total * matrices * width * each, hidden * total


def _nemotron_mlp(text: Mapping[str, Any], hidden: int, mark: str) -> tuple[int, int, int, int]:
    """Nemotron-H: a layer is one of mixer, attention, MLP (``-``) or experts (``E``), without gating."""
    if mark in ("-", "mlp"):
        return 2 * hidden * int(text.get("intermediate_size") or 0), 0, 0, 0
    if mark not in ("E", "moe"):
        return 0, 0, 0, 0
    total, each = int(text.get("n_routed_experts") or 0), int(text.get("moe_intermediate_size") or 0)
    width = first_int(text, "moe_latent_size") or hidden
    shared = int(text.get("moe_shared_expert_intermediate_size") or 0) * int(text.get("n_shared_experts") or 1)
    latent = 2 * hidden * width if width != hidden else 0
    return latent, 2 * hidden * shared, total * 2 * width * each, hidden * total


def _shares_cache(text: Mapping[str, Any], index: int) -> bool:
    count = first_int(text, "num_hidden_layers") or 0
    return index >= count - (first_int(text, "num_kv_shared_layers") or 0)


def _routed(text: Mapping[str, Any], model_type: str, index: int) -> bool:
    """Whether decoder layer ``index`` has experts."""
    if index < (first_int(text, "first_k_dense_replace") or 0):
        return False
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list) and index < len(frequency):
        return bool(frequency[index])
    step = first_int(text, "interleave_moe_layer_step", "decoder_sparse_step")
    if step and step > 1:
        return (index + 1) % step == 0
    period = first_int(text, "expert_layer_period")
    if period:
        return index % period == (first_int(text, "expert_layer_offset") or 0)
    if isinstance(frequency, int) and frequency > 1:
        return index % frequency == 0
    return True


def _per_block(geometry: ModelGeometry) -> tuple[int, int]:
    """Nemotron-NAS blocks: (attention, dense) summed over blocks of different widths."""
    hidden, heads = geometry.hidden, geometry.attention_heads
    key_dim = head_dim_of(geometry.config, hidden, heads)
    attention = dense = 0
    for block, caches in zip(geometry.config["block_configs"], geometry.decoder_layers, strict=False):
        if caches:
            attention += 2 * hidden * heads * key_dim + 2 * hidden * caches[0].kv_heads * key_dim
        feed = block.get("ffn", {})
        if not feed.get("no_op"):
            inner = int(2 * (feed.get("ffn_mult") or 4.0) * hidden / 3)
            dense += 3 * hidden * (-(-inner // 256) * 256)
    return attention, dense


def _vision(text: Mapping[str, Any]) -> int:
    """A vision tower's parameters: from its own sizes where the config has them, else a usual 0.4 billion."""
    tower = text.get("_vision_config")
    if not isinstance(tower, Mapping):
        return 400_000_000
    width = first_int(tower, "hidden_size", "embed_dim", "width") or 1152
    depth = first_int(tower, "num_hidden_layers", "depth", "layers") or 27
    inner = first_int(tower, "intermediate_size") or 4 * width
    return depth * (4 * width * width + 2 * width * inner) + 4 * width * width + width * 3 * 14 * 14
