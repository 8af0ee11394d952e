"""What a cache dtype asked for is stored as: the checkpoint may declare one, and sparse MLA's rows depend on the card.

Read in vLLM 0.32 ``utils/torch_utils.py``, ``attention.py``, ``mla_attention.py``, ``platforms/cuda.py`` and
``models/config.py``; a 0.15 log (GLM-4.7 NVFP4) and a 0.26 log (GLM-5.2 on GB200) agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gateway.planner.geometry import ModelGeometry, is_deepseek_v4
from gateway.planner.layers import LayerKind

if TYPE_CHECKING:
    from gateway.planner.cards import Card
    from gateway.planner.versions import Behaviour

_BY_ALGORITHM = {"FP8": "fp8", "NVFP4": "nvfp4"}
_PLAIN_FP8 = ("fp8", "fp8_e4m3")


def is_sparse_mla(geometry: ModelGeometry) -> bool:
    """Whether an indexer picks the latent rows a query reads (DeepSeek-V3.2, GLM-5)."""
    return (
        geometry.uses_mla
        and not is_deepseek_v4(geometry.config)
        and any(layer.kind is LayerKind.INDEXER for layer in geometry.layers)
    )


def declared_dtype(quantization: Mapping[str, Any] | None) -> str | None:
    """The cache dtype a quantised checkpoint declares for itself (ModelOpt and llm-compressor do), if any."""
    if not quantization:
        return None
    inner = quantization.get("quantization")
    source = inner if isinstance(inner, Mapping) else {}
    scheme: Any = None
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        scheme = scheme or source.get(key) or quantization.get(key)
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        return {8: "fp8", 4: "nvfp4"}.get(bits) if isinstance(bits, int) else None
    return _BY_ALGORITHM.get(scheme.upper()) if isinstance(scheme, str) else None


def resolved_dtype(geometry: ModelGeometry, kv_dtype: str, card: Card, behaviour: Behaviour) -> str:
    """``kv_dtype`` with ``auto`` replaced by what vLLM makes of it; ``auto`` where that is the model's own dtype."""
    if kv_dtype != "auto":
        return kv_dtype
    if behaviour.checkpoint_decides_kv:
        declared = declared_dtype(geometry.quantization)
        if declared:
            return declared
    if behaviour.rows_by_card and is_sparse_mla(geometry) and _blackwell_server(card):
        return "fp8" if geometry.model_type == "glm_moe_dsa" else "auto"
    return "auto"


def stored_dtype(geometry: ModelGeometry, kv_dtype: str, card: Card, behaviour: Behaviour) -> str:
    """The dtype whose rows are kept. Sparse MLA packs fp8 into 656-byte rows, but on SM100 and AMD keeps them plain."""
    asked = resolved_dtype(geometry, kv_dtype, card, behaviour)
    if not is_sparse_mla(geometry):
        return asked
    if not behaviour.rows_by_card:
        packs = asked.startswith("fp8") or (asked == "auto" and geometry.model_type == "deepseek_v32")
        return "fp8_ds_mla" if packs else asked
    if asked in _PLAIN_FP8:
        return asked if _blackwell_server(card) or card.vendor == "amd" else "fp8_ds_mla"
    consumer = card.sm is not None and card.sm >= 120
    return "fp8_ds_mla" if asked == "auto" and consumer else asked


def with_every_indexer(geometry: ModelGeometry) -> ModelGeometry:
    """``geometry`` as releases keep it that gave every sparse layer an indexer cache, used or not."""
    full = max(geometry.decoder_layers, key=len, default=())
    if not is_sparse_mla(geometry) or all(len(caches) == len(full) for caches in geometry.decoder_layers):
        return geometry
    return replace(geometry, decoder_layers=tuple(full for _ in geometry.decoder_layers))


def _blackwell_server(card: Card) -> bool:
    return card.sm is not None and 100 <= card.sm < 120
