"""What vLLM takes beside weights and KV: the profile run's peak, memory outside torch, CUDA graphs. Estimates.

The shape is vLLM's profile run: the vision encoder with its largest items, a dummy forward of the whole batch, then the
sampler over ``max_num_seqs`` rows of logits; the highest of the three moments counts, with what attention keeps aside.
The sampler's constant was fitted to start-up logs (tests/planner/test_planner_memory.py holds each of them out once),
those of memory outside torch and graphs were read in logs; they carry their spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.planner.figures import GIB, Figure, Kind
from gateway.planner.geometry import ModelGeometry, first_int
from gateway.planner.layers import LayerKind
from gateway.planner.versions import Behaviour

# Bytes the first runner's sampler takes a logit: bf16 and fp32 logits, sorted copy, indices, the sort's own buffers.
SAMPLER_BYTES_FIRST_RUNNER = 36
_SAMPLER_BYTES_SECOND_RUNNER = 9  # sorts nothing while profiling (vLLM 0.32 v1/worker/gpu/model_runner.py)
_GRAPH_GIB_PER_LAYER = 0.0245
_NON_TORCH_GIB = 0.35  # CUDA context and kernels on one GPU: 0.30 to 0.47 in the logs that state it
_NON_TORCH_UNIFIED_GIB = (
    1.35  # the processes' own memory and the page cache come out of the same pool: 0.7 and 2.0 seen
)
_NON_TORCH_TP_GIB = 0.55
_RESIDUAL_COPIES = 3
# Rows of latent attention gathered for prefills: sparse models five windows, others at most 64k tokens.
_SPARSE_WINDOWS, _LATENT_WORKSPACE_TOKENS = 5, 64 << 10
_TOWER_WIDTH, _QWEN_TOKENS_AN_IMAGE = 1152, 16384
# Widths of a patch held at once in the tower: pixels and residuals on every rank, the MLP's two sides divided.
_TOWER_COPIED, _TOWER_DIVIDED = 6.5, 7.5


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The flags overheads depend on."""

    batched_tokens: int
    seqs: int
    tp: int = 1
    eager: bool = False
    lora_rank: int = 0
    lora_adapters: int = 0
    max_model_len: int = 8192
    unified: bool = False
    packed_rows: bool = False


@dataclass(frozen=True, slots=True)
class Overheads:
    """GiB on one GPU. ``graphs`` are subtracted from the KV budget only by vLLM 0.20 and later."""

    activation: Figure
    non_torch: Figure
    graphs: Figure
    lora: Figure


def overheads(geometry: ModelGeometry, run: RunSettings, behaviour: Behaviour, *, last_stage: bool = True) -> Overheads:
    """Estimated overheads with the range they were seen in. Only the last pipeline stage runs the sampler."""
    activation = forward_bytes(geometry, run)
    if last_stage:
        activation = max(activation, sampler_bytes(geometry, run, behaviour))
    if geometry.multimodal:
        encoded = encoder_tokens(geometry, run) * geometry.hidden * geometry.model_bytes
        activation = max(encoder_bytes(geometry, run), encoded + activation)
    activation += workspace_bytes(geometry, run, behaviour)
    outside = (_NON_TORCH_UNIFIED_GIB if run.unified else _NON_TORCH_GIB) + (_NON_TORCH_TP_GIB if run.tp > 1 else 0.0)
    graphs = graph_gib(geometry, run)
    return Overheads(
        activation=_around(activation / GIB, 0.6, 1.5),
        non_torch=_around(outside, 0.4, 2.0),
        graphs=Figure(0.0, Kind.EXACT) if run.eager else _around(graphs, 0.25, 2.0),
        lora=_lora(geometry, run),
    )


def forward_bytes(geometry: ModelGeometry, run: RunSettings) -> float:
    """The widest moment of a dummy forward pass, in bytes on one GPU."""
    text, hidden = geometry.config, geometry.hidden
    dense = first_int(text, "dense_intermediate_size", "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
    experts = first_int(text, "n_routed_experts", "num_local_experts", "num_experts")
    chosen = first_int(text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts") or 2
    if experts:
        each = (first_int(text, "moe_intermediate_size") or dense) / run.tp
        width = chosen * (max(2 * each, hidden) + each) + hidden
    else:
        width = 3 * dense / run.tp
    per_token = (width + _RESIDUAL_COPIES * hidden) * geometry.model_bytes
    return per_token * run.batched_tokens


def sampler_bytes(geometry: ModelGeometry, run: RunSettings, behaviour: Behaviour) -> float:
    """The sampler's temporaries over ``max_num_seqs`` rows; V0 profiled without them."""
    if behaviour.engine_v0:
        return 0.0
    if behaviour.version[:2] < (0, 8):
        # The first V1 profiled no sampler, but logits of every token of the batch (0.7 v1/worker/gpu_model_runner.py).
        return float(run.batched_tokens) * (geometry.vocab + geometry.hidden) * geometry.model_bytes
    each = _SAMPLER_BYTES_SECOND_RUNNER if behaviour.second_runner else SAMPLER_BYTES_FIRST_RUNNER
    return float(run.seqs) * geometry.vocab * each


def encoder_tokens(geometry: ModelGeometry, run: RunSettings) -> int:
    """Encoder output tokens of the profile run: the batch, or one largest image. Qwen's may have any size."""
    return max(run.batched_tokens, _QWEN_TOKENS_AN_IMAGE if "qwen" in geometry.model_type else 0)


def encoder_bytes(geometry: ModelGeometry, run: RunSettings) -> float:
    """The widest moment of the vision tower over those tokens; 4 (Qwen), 9 (Gemma 4) or 16 patches make a token."""
    tower = geometry.config.get("_vision_config")
    width = (first_int(tower, "hidden_size", "embed_dim") if isinstance(tower, Mapping) else None) or _TOWER_WIDTH
    ratio = 4 if "qwen" in geometry.model_type else 9 if geometry.model_type.startswith("gemma4") else 16
    held = width * (_TOWER_COPIED + _TOWER_DIVIDED / run.tp)
    # A tower that makes 16 patches a token runs on images of a fixed size, some at a time.
    return encoder_tokens(geometry, run) * min(ratio, 9) * held * geometry.model_bytes


def workspace_bytes(geometry: ModelGeometry, run: RunSettings, behaviour: Behaviour) -> float:
    """What latent attention keeps for prefills; it grows with the window (vLLM 0.32 flashmla_sparse, mla_attention)."""
    if not geometry.uses_mla:
        return 0.0
    text = geometry.config
    row = (first_int(text, "kv_lora_rank") or 512) + (first_int(text, "qk_rope_head_dim") or 64)
    if any(layer.kind is LayerKind.INDEXER for layer in geometry.layers):
        if not run.packed_rows:
            return 0.0  # only packed rows are unpacked into a workspace (0.26 on GB200: no such peak)
        # 0.32 takes two windows above 256k; when that began was not looked up, and a 0.24 log agrees with five.
        windows = 2 if behaviour.version[:2] >= (0, 32) and run.max_model_len > 256 << 10 else _SPARSE_WINDOWS
        return float(windows * run.max_model_len) * row * geometry.model_bytes
    tokens = min(max(8 * run.max_model_len, 64 * run.seqs), _LATENT_WORKSPACE_TOKENS)
    widened = (first_int(text, "qk_nope_head_dim") or 128) + (first_int(text, "v_head_dim") or 128)
    heads = max(geometry.attention_heads // run.tp, 1)
    return float(tokens) * (row + heads * widened) * geometry.model_bytes


def graph_gib(geometry: ModelGeometry, run: RunSettings) -> float:
    """CUDA graph memory: by layer, and by how many batch sizes ``max_num_seqs`` lets it capture."""
    largest = min(2 * run.seqs, 512)
    sizes = 3 + min(largest, 256) / 8 + max(largest - 256, 0) / 16
    return _GRAPH_GIB_PER_LAYER * len(geometry.decoder_layers) * min(1.0, sizes / 51)


def _lora(geometry: ModelGeometry, run: RunSettings) -> Figure:
    if not run.lora_adapters:
        return Figure(0.0, Kind.EXACT)
    dense = first_int(geometry.config, "intermediate_size") or 4 * geometry.hidden
    rows = 8 * geometry.hidden + 6 * dense
    size = len(geometry.decoder_layers) * rows * (run.lora_rank or 16) * geometry.model_bytes
    return _around(size * run.lora_adapters / run.tp / GIB, 0.8, 1.3)


def _around(gib: float, low: float, high: float) -> Figure:
    return Figure(gib, Kind.ESTIMATED, gib * low, gib * high)
