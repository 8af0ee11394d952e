"""What vLLM takes beside weights and KV: the profile run's peak, memory outside torch, CUDA graphs. Estimates.

The shape comes from how vLLM profiles (a dummy forward of ``max_num_batched_tokens``, then the sampler over
``max_num_seqs`` rows of logits); the constants were fitted to start-up logs of 0.6 to 0.32 and carry their spread.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.planner.figures import GIB, Figure, Kind
from gateway.planner.geometry import ModelGeometry, first_int
from gateway.planner.versions import Behaviour

# Bytes the sampler's temporaries take a logit: fp32 logits, sorted copy, int64 indices, probabilities.
_SAMPLER_BYTES_FIRST_RUNNER = 34
_SAMPLER_BYTES_SMALL_VOCABULARY = 27  # up to 131,072 entries: fitted to logs, like the other two
_SAMPLER_BYTES_SECOND_RUNNER = 9
_GRAPH_GIB_PER_LAYER = 0.0245
_NON_TORCH_GIB = 0.30
_NON_TORCH_TP_GIB = 0.55
_RESIDUAL_COPIES = 3


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
        activation += encoder_bytes(geometry, run)
    outside = _NON_TORCH_GIB + (_NON_TORCH_TP_GIB if run.tp > 1 else 0.0)
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
    small = geometry.vocab <= 131_072
    first = _SAMPLER_BYTES_SMALL_VOCABULARY if small else _SAMPLER_BYTES_FIRST_RUNNER
    each = _SAMPLER_BYTES_SECOND_RUNNER if behaviour.second_runner else first
    return float(run.seqs) * geometry.vocab * each


def encoder_bytes(geometry: ModelGeometry, run: RunSettings) -> float:
    """The vision encoder profiled with its largest image: grows with the encoder budget."""
    patches = 4 * min(max(run.batched_tokens, 2048), 16384)
    # Qwen's towers take images of any size, up to the whole budget; others resize to a fixed one.
    widths = 16.0 if "qwen" in geometry.model_type else 4.0
    return patches * 1152 * geometry.model_bytes * widths


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
