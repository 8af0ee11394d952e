"""KV cache dtypes: bytes a token takes in one layer, and since which vLLM the name exists.

Formulas from vLLM 0.32 ``v1/kv_cache_interface.py``, the attention backends' ``customize_spec`` (FlashInfer for nvfp4,
Triton for the per-token-head kinds, TurboQuant) and ``mla_attention.py`` (the packed ``ds_mla`` rows).
"""

from __future__ import annotations

from gateway.planner.errors import ContradictoryFlags
from gateway.planner.figures import ceil_div

# name -> first vLLM release (major, minor) whose --kv-cache-dtype takes it
KV_DTYPES: dict[str, tuple[int, int]] = {
    "auto": (0, 0),
    "fp8": (0, 0),
    "fp8_e4m3": (0, 0),
    "fp8_e5m2": (0, 0),
    "fp8_inc": (0, 10),
    "bfloat16": (0, 11),
    "fp8_ds_mla": (0, 11),
    "float16": (0, 18),
    "turboquant_k8v4": (0, 20),
    "turboquant_4bit_nc": (0, 20),
    "turboquant_k3v4_nc": (0, 20),
    "turboquant_3bit_nc": (0, 20),
    "int8_per_token_head": (0, 20),
    "fp8_per_token_head": (0, 20),
    "nvfp4": (0, 20),
    "int4_per_token_head": (0, 25),
    "nvfp4_4over6": (0, 28),
    "nvfp4_ds_mla": (0, 30),
    "ultraquant_4bit": (0, 32),
}

ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}

# (key bits, value bits); keys of 8 bits are plain fp8, the others carry a 2-byte norm
_TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
_PACKED_MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_TURBOQUANT_SKIPPED_AT_EACH_END = 2


def canonical_kv_dtype(name: str) -> str:
    """vLLM's own spelling of ``name``. Raises ContradictoryFlags for an unknown one."""
    spelled = ALIASES.get(name.lower(), name.lower())
    if spelled not in KV_DTYPES:
        raise ContradictoryFlags(f"Unknown KV dtype {name!r}. Known: {', '.join(KV_DTYPES)}.")
    return spelled


def is_quantised(kv_dtype: str) -> bool:
    """Whether the cache holds fewer bits than the model computes in."""
    return kv_dtype not in ("auto", "bfloat16", "float16")


def element_bytes(kv_dtype: str, model_bytes: int) -> int:
    """Bytes of one stored element for the plain (not sub-byte) kinds; 1 for every quantised kind."""
    if kv_dtype == "auto":
        return model_bytes
    return 2 if kv_dtype in ("bfloat16", "float16") else 1


def attention_token_bytes(heads: int, key_dim: int, value_dim: int, kv_dtype: str, model_bytes: int) -> int:
    """Bytes one token takes in one attention layer on one GPU, for ``heads`` KV heads held there."""
    if kv_dtype in _TURBOQUANT:
        return heads * _turboquant_slot(kv_dtype, key_dim, value_dim)
    if kv_dtype == "ultraquant_4bit":
        # packed fp4 plus one scale byte per group of 32
        return heads * (ceil_div(key_dim + value_dim, 2) + ceil_div(key_dim + value_dim, 32))
    if kv_dtype.startswith("nvfp4") and kv_dtype != "nvfp4_ds_mla":
        return heads * sum(dim // 2 + ceil_div(dim, 16) for dim in (key_dim, value_dim))
    if kv_dtype in ("int8_per_token_head", "fp8_per_token_head"):
        return heads * (key_dim + value_dim + 8)
    if kv_dtype == "int4_per_token_head":
        return heads * (key_dim // 2 + value_dim // 2 + 8)
    return heads * (key_dim + value_dim) * element_bytes(kv_dtype, model_bytes)


def mla_token_bytes(latent_dim: int, kv_dtype: str, model_bytes: int) -> int:
    """Bytes one token takes in one MLA layer: one latent row, the same on every tensor-parallel rank."""
    packed = _PACKED_MLA_BYTES.get(kv_dtype)
    return packed if packed is not None else latent_dim * element_bytes(kv_dtype, model_bytes)


def unquantised_layers(kv_dtype: str, attention_layers: int, hybrid: bool) -> int:
    """Attention layers TurboQuant leaves in the model's dtype: two at each end, none in a hybrid model."""
    if kv_dtype not in _TURBOQUANT or hybrid:
        return 0
    return 2 * min(_TURBOQUANT_SKIPPED_AT_EACH_END, attention_layers // 2)


def _turboquant_slot(kv_dtype: str, key_dim: int, value_dim: int) -> int:
    key_bits, value_bits = _TURBOQUANT[kv_dtype]
    key = key_dim if key_bits == 8 else ceil_div(key_dim * key_bits, 8) + 2
    slot = key + ceil_div(value_dim * value_bits, 8) + 4
    return slot + slot % 2
