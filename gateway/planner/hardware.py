"""Which KV dtype runs on which card, on which attention backend, and what to set when the default does not take it.

From the backends' ``supports_*`` code of vLLM 0.32 and public issues; where only an issue speaks, the note says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.planner.cards import Card
from gateway.planner.geometry import ModelGeometry
from gateway.planner.kvdtypes import KV_DTYPES
from gateway.planner.layers import LayerKind
from gateway.planner.versions import Behaviour

_FLASHINFER_DIMS = (64, 128, 256, 512)
OFFERED = (
    "auto",
    "fp8",
    "int8_per_token_head",
    "fp8_per_token_head",
    "turboquant_k8v4",
    "nvfp4",
    "int4_per_token_head",
    "turboquant_4bit_nc",
    "turboquant_3bit_nc",
)


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a KV dtype runs; ``backend`` must be set by hand when not empty; ``note`` says why or what it costs."""

    runs: bool
    backend: str = ""
    note: str = ""
    known: bool = True


def kv_support(card: Card, geometry: ModelGeometry, kv_dtype: str, behaviour: Behaviour) -> Support:
    """Support of ``kv_dtype`` for this model on this card and release."""
    since = KV_DTYPES.get(kv_dtype, (0, 0))
    if behaviour.version[:2] < since:
        return Support(False, note=f"vLLM has {kv_dtype} only since {since[0]}.{since[1]}")
    if kv_dtype in ("auto", "bfloat16", "float16"):
        if kv_dtype == "bfloat16" and card.sm is not None and card.sm < 80:
            return Support(False, note="bfloat16 needs compute capability 8.0")
        return Support(True)
    if card.vendor != "nvidia":
        return _other_vendor(card, kv_dtype)
    if card.sm is None:
        return Support(True, note="the card's compute capability is unknown, so this is not checked", known=False)
    if geometry.uses_mla:
        return _latent(card.sm, geometry, kv_dtype)
    return _nvidia(card.sm, geometry, kv_dtype, behaviour)


def backend_flag(backend: str, behaviour: Behaviour) -> tuple[str, str]:
    """(environment, flag) that selects an attention backend in this release; one of the two is empty."""
    if not backend:
        return "", ""
    if behaviour.version[:2] >= (0, 13):
        return "", f"--attention-backend {backend}"
    return f"VLLM_ATTENTION_BACKEND={backend}", ""


def _nvidia(sm: int, geometry: ModelGeometry, kv_dtype: str, behaviour: Behaviour) -> Support:
    dims = {layer.key_dim for layer in geometry.layers if layer.key_dim}
    sinks = geometry.model_type == "gpt_oss"
    if sm < 80:
        return Support(False, note="Turing and older run no quantised KV cache: FlashInfer needs 8.0, Triton fp8 8.9")
    if kv_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return _fp8(sm, dims, sinks, kv_dtype, behaviour)
    if kv_dtype in ("fp8_ds_mla", "nvfp4_ds_mla"):
        return Support(False, note=f"{kv_dtype} is only for sparse MLA models")
    if kv_dtype.startswith("nvfp4"):
        if sm in (100, 103):
            return Support(True, "FLASHINFER" if 64 in dims else "", "through TRTLLM kernels")
        if sm < 89 and behaviour.version[:2] >= (0, 28) and 64 not in dims and not sinks:
            return Support(True, "FLASHINFER", "through the FA2 path, seen in source only")
        return Support(False, note="nvfp4 KV runs on SM100, and on Ampere through FA2, not on this card")
    if kv_dtype == "fp8_per_token_head":
        if sm < 89:
            return Support(False, note="fp8 in Triton needs compute capability 8.9")
        return Support(True, "TRITON_ATTN")
    if kv_dtype in ("int8_per_token_head", "int4_per_token_head"):
        return Support(True, "TRITON_ATTN")
    if kv_dtype.startswith("turboquant"):
        if kv_dtype == "turboquant_k8v4" and sm < 89:
            return Support(True, "TURBOQUANT", "fp8 keys on this card are unproven", known=False)
        return Support(True, "TURBOQUANT", "costs accuracy; measure before relying on it")
    if kv_dtype == "ultraquant_4bit":
        return Support(False, note="ultraquant_4bit is for AMD cards")
    return Support(False, note=f"{kv_dtype} is not for NVIDIA cards")


def _fp8(sm: int, dims: set[int], sinks: bool, kv_dtype: str, behaviour: Behaviour) -> Support:
    if sm < 89:
        if sinks or not dims <= set(_FLASHINFER_DIMS):
            return Support(
                False, note="on Ampere fp8 KV runs only in FlashInfer, which does not take this model's heads"
            )
        if behaviour.version[:2] < (0, 11):
            return Support(True, "FLASHINFER", "the default backend fails with 'type fp8e4nv not supported'")
        return Support(True, "FLASHINFER", "FlashAttention needs SM90 for fp8, Triton SM89")
    if sm == 89:
        return Support(True, "TRITON_ATTN" if sinks else "FLASHINFER", "FlashAttention 2 does not take fp8 KV")
    if kv_dtype == "fp8_e5m2":
        return Support(True, "FLASHINFER", "FlashAttention takes e4m3 only")
    if sm >= 120:
        return Support(True, "TRITON_ATTN" if sinks else "FLASHINFER", "FlashAttention takes no fp8 KV on SM120")
    return Support(True)


def _latent(sm: int, geometry: ModelGeometry, kv_dtype: str) -> Support:
    sparse = any(layer.kind is LayerKind.INDEXER for layer in geometry.layers)
    if kv_dtype == "fp8_e5m2":
        return Support(False, note="no MLA backend takes fp8_e5m2")
    if kv_dtype in ("fp8_ds_mla", "nvfp4_ds_mla"):
        runs = sparse and sm >= 90
        return Support(runs, note="" if runs else "only sparse MLA on SM90, SM100 and SM120")
    if kv_dtype in ("fp8", "fp8_e4m3"):
        if sm < 89:
            return Support(False, note="fp8 MLA needs SM89 (Triton) or newer")
        return Support(True, note="stored as fp8_ds_mla rows of 656 B" if sparse else "")
    return Support(False, note=f"no MLA backend takes {kv_dtype}")


def _other_vendor(card: Card, kv_dtype: str) -> Support:
    if card.vendor == "amd":
        if kv_dtype in ("fp8", "fp8_e4m3"):
            runs = card.capability in ("gfx942", "gfx950", "gfx90a")
            return Support(runs, note="" if runs else "fp8 KV needs an MI200 or newer")
        if kv_dtype == "ultraquant_4bit":
            return Support(card.capability == "gfx950", note="seen in source only", known=False)
        return Support(False, note=f"{kv_dtype} is not for AMD cards")
    if kv_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2") or kv_dtype.startswith("turboquant"):
        return Support(True, note="reported to work on Arc Pro; not checked in source", known=False)
    return Support(False, note=f"{kv_dtype} is not for Intel cards")


def pitfalls(card: Card, tp: int, utilization: float) -> list[str]:
    """What makes a start fail on such a card although the sum says it fits."""
    found: list[str] = []
    if card.shows_a_desktop:
        found.append(
            "A desktop on this card takes 0.3-1.5 GiB that the utilisation does not know of: vLLM refuses to "
            "start when "
            f"free memory is below {utilization:.0%} of the total. Use the integrated graphics for the monitor, "
            f"or lower "
            "--gpu-memory-utilization by what `kvgate gpus` shows in use."
        )
        found.append(
            "Under WSL2 Windows keeps part of the card and paging hides an overfull one: leave 1 GiB more free."
        )
    if card.kind == "unified":
        found.append(
            "Memory is shared with the CPU: page cache counts as used. Drop caches before starting and keep "
            "--gpu-memory-utilization at 0.85 or below."
        )
    if tp > 1:
        found.append(
            "The smallest rank decides the KV size of all: a desktop or a forgotten process on one card costs "
            "every card."
        )
    if card.sm is not None and card.sm < 75:
        found.append("vLLM 0.32 needs compute capability 7.5; this card runs only older releases.")
    if card.sm == 75:
        found.append("Turing has no bfloat16: add --dtype half.")
    return found
