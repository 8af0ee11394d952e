"""What the weights take on one GPU: exact from safetensors headers, else from the geometry and the quantisation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.planner.errors import ContradictoryFlags, PlannerError
from gateway.planner.figures import GIB, Figure, Kind
from gateway.planner.geometry import ModelGeometry
from gateway.planner.parameters import PARTS, Parameters, count_parameters
from gateway.planner.recurrent import layer_kinds

# Bits a quantised weight takes, scales and zero points of the usual group size included.
QUANT_BITS: dict[str, float] = {
    "none": 16.0,
    "fp32": 32.0,
    "fp8": 8.0,
    "int8": 8.0,
    "w8a8": 8.0,
    "int6": 6.25,
    "awq": 4.16,  # 4 bits + (16-bit scale + 4-bit zero) / 128
    "gptq": 4.16,
    "int4": 4.16,
    "w4a16": 4.16,
    "nvfp4": 4.5,  # 4 bits + an fp8 scale for 16
    "mxfp4": 4.25,  # 4 bits + an e8m0 scale for 32
    "mxfp8": 8.25,
    "bnb-4bit": 4.13,
    "bnb-8bit": 8.1,
    "int3": 3.2,
    "int2": 2.2,
    "q8_0": 8.5,
    "q6_k": 6.56,
    "q5_k_m": 5.7,
    "q4_k_m": 4.85,
    "q4_0": 4.55,
    "q3_k_m": 3.9,
    "q2_k": 3.0,
}
_ALIASES = {"bf16": "none", "bfloat16": "none", "fp16": "none", "float16": "none", "w4a4": "nvfp4", "4bit": "int4",
            "8bit": "int8", "bitsandbytes": "bnb-4bit", "modelopt_fp4": "nvfp4", "modelopt": "fp8", "autoround": "int4",
            "auto-round": "int4", "compressed-tensors": "int4", "marlin": "int4", "awq_marlin": "awq",
            "gptq_marlin": "gptq", "fbgemm_fp8": "fp8", "ptpc_fp8": "fp8", "fp4": "nvfp4"}  # fmt: skip
# A bare 4-bit name tells no group size, nor what of a mixture or hybrid stays wide: at most all but the experts.
_GROUPS_OF_32_BITS = {"awq": 4.66, "gptq": 4.66, "int4": 4.66, "w4a16": 4.66, "nvfp4": 4.5, "mxfp4": 4.25}
_WIDE_AT_MOST = {"attention": 1.0, "shared": 1.0, "state": 1.0}
_REPLICATED = ("router", "other")
_WIDE_ALWAYS = ("embedding", "head", "router", "vision", "other")
_PART_PATTERNS = {
    "attention": re.compile(
        r"(self_attn|\.attn|attention)(\*|\.\*|$|\.(q|k|v|o|qkv|q_a|q_b|kv_a|kv_b)_proj)|mixer\.[qkvo]_proj"
    ),
    "state": re.compile(r"linear_attn(\*|\.\*|$|\.(in|out)_proj)|mixer\.(in|out)_proj|mamba"),
    "shared": re.compile(r"shared_experts?(\*|\.|$)"),
    "dense": re.compile(r"mlp(\*|$|\.(gate_proj|down_proj|up_proj)|\\?\.\()"),
    "experts": re.compile(r"(?<!shared_)experts(\*|\.|$)"),
}
# A mixed checkpoint keeps these in fp8 (as a share of the way from 4.5 to 16 bits) or wide.
_MIXED_SHARES = {"attention": 0.3, "shared": 0.3, "state": 1.0}
# vLLM pads gpt-oss expert matrices (2880 wide) for its kernels: 13.72 GiB logged against 12.81 GiB of files.
_MXFP4_EXPERT_PADDING = 1.095
_SAFETENSORS_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class Weights:
    """``per_gpu`` in GiB on the busiest rank; ``whole`` in GiB over all; ``quant`` the scheme assumed."""

    per_gpu: Figure
    whole: Figure
    quant: str
    parameters: int


def canonical_quant(name: str) -> str:
    """The table's spelling of a quantisation name. Raises ContradictoryFlags for one not known."""
    lowered = name.lower()
    spelled = _ALIASES.get(lowered, lowered)
    if spelled not in QUANT_BITS:
        raise ContradictoryFlags(f"Unknown quantisation {name!r}. Known: {', '.join(QUANT_BITS)}.")
    return spelled


def quant_of(config: Mapping[str, Any] | None) -> str:
    """The scheme a checkpoint's ``quantization_config`` (or catalogue entry) declares; ``none`` without one."""
    if not config:
        return "none"
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    algorithm = str(config.get("quant_algo") or (config.get("quantization") or {}).get("quant_algo") or "").upper()
    bits, kind = config.get("bits"), str(config.get("type") or "")
    groups = config.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        weights = next(iter(groups.values())).get("weights") or {}
        bits, kind = weights.get("num_bits", bits), str(weights.get("type") or kind)
    if "NVFP4" in algorithm or "MIXED" in algorithm or config.get("format") == "nvfp4-pack-quantized":
        return "nvfp4"
    if "FP8" in algorithm or method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method == "mxfp4" or "mxfp4" in str(config.get("format") or ""):
        return "mxfp4"
    if method == "bitsandbytes":
        return "bnb-8bit" if config.get("load_in_8bit") else "bnb-4bit"
    if bits in (2, 3, 4, 6, 8):
        if bits == 8:
            return "fp8" if kind == "float" else "int8"
        return method if method in ("awq", "gptq") else "nvfp4" if kind == "float" else f"int{bits}"
    return _ALIASES.get(method, method if method in QUANT_BITS else "none")


def unquantised_parts(config: Mapping[str, Any] | None, layers: Mapping[str, int]) -> dict[str, float]:
    """Share of each part the checkpoint's ignore list leaves wide, 0..1. ``layers`` counts the layers having a part."""
    if not config:
        return {}
    ready = config.get("unquantised")
    if isinstance(ready, Mapping):
        return {str(part): float(share) for part, share in ready.items()}
    inner = config.get("quantization")
    source = inner if isinstance(inner, Mapping) else config
    if "MIXED" in str(source.get("quant_algo") or "").upper():
        return dict(_MIXED_SHARES)
    ignored: list[str] = []
    for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"):
        ignored.extend(str(entry) for entry in source.get(key) or [])
    shares: dict[str, float] = {}
    for part, pattern in _PART_PATTERNS.items():
        hits = [entry for entry in ignored if pattern.search(entry)]
        numbers = {match[1] for entry in hits if (match := re.search(r"layers\.(\d+)", entry))}
        everywhere = any(not re.search(r"layers\.\d+", entry) for entry in hits)
        share = 1.0 if everywhere else min(1.0, len(numbers) / max(layers.get(part, 1), 1))
        if share > 0.05:
            shares[part] = round(share, 2)
    return shares


def layers_by_part(geometry: ModelGeometry) -> dict[str, int]:
    """How many decoder layers have attention, a state, or a feed-forward part."""
    kinds = layer_kinds(geometry.config, geometry.model_type, len(geometry.decoder_layers))
    count = len(geometry.decoder_layers)
    if kinds is None:
        return {"attention": count, "state": 0, "shared": count, "dense": count, "experts": count}
    attention = sum(kind in ("attention", "both") for kind in kinds)
    state = sum(kind in ("state", "both") for kind in kinds)
    feed = sum(kind == "none" for kind in kinds) or count
    return {"attention": attention, "state": state, "shared": feed, "dense": feed, "experts": feed}


def weights_of(
    geometry: ModelGeometry,
    *,
    quant: str | None,
    tp: int,
    pp: int,
    known_parameters: int | None = None,
    vision_parameters: int | None = None,
    exact_bytes: int | None = None,
) -> Weights:
    """Weights on the busiest GPU. ``exact_bytes`` of the checkpoint's tensors, when known, replace the estimate."""
    counted = count_parameters(geometry)
    scheme = canonical_quant(quant) if quant else quant_of(geometry.quantization)
    parts = part_bytes(geometry, counted, scheme, known_parameters, vision_parameters)
    whole = float(sum(parts.values()))
    most = whole
    if scheme in _GROUPS_OF_32_BITS and not geometry.quantization and (geometry.hybrid or counted.experts):
        bits = _GROUPS_OF_32_BITS[scheme]
        loose = part_bytes(geometry, counted, scheme, known_parameters, vision_parameters, _WIDE_AT_MOST, bits)
        most = max(whole, float(sum(loose.values())))
    kind, spread = Kind.ESTIMATED, 0.04
    if known_parameters:
        spread = 0.01 if scheme == "none" else 0.03
    if exact_bytes is not None:
        parts = {part: size * exact_bytes / whole for part, size in parts.items()}
        whole, kind, spread = float(exact_bytes), Kind.EXACT, 0.0
        most = whole
    per_gpu = _busiest(geometry, parts, tp, pp)
    split = tp * pp > 1
    return Weights(
        per_gpu=_spread(per_gpu / GIB, Kind.ESTIMATED if split else kind, spread + 0.01 * split, most / whole),
        whole=_spread(whole / GIB, kind, spread, most / whole),
        quant=scheme,
        parameters=known_parameters or counted.total,
    )


def part_bytes(
    geometry: ModelGeometry,
    counted: Parameters,
    scheme: str,
    known_parameters: int | None,
    vision_parameters: int | None,
    wide_shares: Mapping[str, float] | None = None,
    bits: float | None = None,
) -> dict[str, float]:
    """Bytes of each part of the whole model under a quantisation scheme; the last two instead of what is usual."""
    counts = {part: float(getattr(counted, part)) for part in PARTS}
    if vision_parameters is not None:
        counts["vision"] = float(vision_parameters)
    if known_parameters:
        # The difference between the known total and the count goes to the largest part, where estimates err most.
        largest = max(counts, key=lambda part: counts[part])
        counts[largest] = max(0.0, counts[largest] + known_parameters - sum(counts.values()))
    wide = geometry.model_bytes
    shares = unquantised_parts(geometry.quantization, layers_by_part(geometry))
    if scheme == "nvfp4" and not geometry.quantization and geometry.hybrid:
        shares = dict(_MIXED_SHARES)  # as the published nvfp4 checkpoints of hybrids are
    if scheme == "mxfp4":
        shares = {**shares, "attention": 1.0}
    shares = dict(wide_shares) if wide_shares is not None else shares
    narrow = (bits or QUANT_BITS[scheme]) / 8 if scheme != "none" else wide
    sizes: dict[str, float] = {}
    for part, number in counts.items():
        share = 1.0 if part in _WIDE_ALWAYS else shares.get(part, 0.0)
        sizes[part] = number * (share * wide + (1 - share) * narrow)
    if scheme == "fp8" and str(geometry.config.get("expert_dtype")) == "fp4":
        sizes["experts"] = counts["experts"] * QUANT_BITS["mxfp4"] / 8  # DeepSeek-V4: fp8, but experts in fp4
    if scheme == "mxfp4" and geometry.model_type == "gpt_oss":
        sizes["experts"] *= _MXFP4_EXPERT_PADDING
    return sizes


def safetensors_bytes(files: Sequence[Path]) -> int:
    """Bytes of all tensors in ``files``, from their headers alone. Raises PlannerError on a broken file."""
    total = 0
    for path in files:
        try:
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if not 2 <= length <= 100 << 20:
                    raise ValueError("header length")
                header = json.loads(stream.read(length))
            for name, tensor in header.items():
                if name != "__metadata__":
                    start, end = tensor["data_offsets"]
                    total += int(end) - int(start)
        except (OSError, ValueError, RecursionError) as error:
            raise PlannerError(f"{path.name} is not a readable safetensors file ({error}).") from error
        except (TypeError, KeyError, AttributeError) as error:
            raise PlannerError(
                f"{path.name} is not a readable safetensors file (its header lists no tensors)."
            ) from error
    return total


def _busiest(geometry: ModelGeometry, parts: Mapping[str, float], tp: int, pp: int) -> float:
    """Bytes on the fullest rank: matrices are cut by ``tp``, small parts copied, layers dealt out by ``pp``."""
    layered = sum(size for part, size in parts.items() if part not in ("embedding", "head", "vision", *_REPLICATED))
    copied = parts["router"] + parts["other"]
    ends = parts["embedding"] + parts["head"]
    if pp == 1:
        return (layered + ends + parts["vision"]) / tp + copied
    count = len(geometry.decoder_layers)
    longest = -(-count // pp)
    edge = max(parts["embedding"] + parts["vision"], parts["head"] or parts["embedding"])
    return (layered * longest / count + edge) / tp + copied * longest / count


def _spread(gib: float, kind: Kind, share: float, most: float = 1.0) -> Figure:
    return Figure(gib, kind, gib * (1 - share), gib * most * (1 + share))
