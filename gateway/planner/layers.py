"""The kinds of layer that hold a cache, as plain data: what each stores for a token or for a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.planner.figures import ceil_div


class LayerKind(StrEnum):
    """How a layer's cache grows with the sequence."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    INDEXER = "indexer"
    STATE = "state"
    CROSS = "cross"


@dataclass(frozen=True, slots=True)
class StateShape:
    """A recurrent layer's state of one request, before tensor parallelism divides it.

    ``conv_channels`` × (``conv_kernel`` − 1 + drafted tokens) elements of the cache dtype, and ``ssm_elements`` of
    ``ssm_bytes`` each (None: the cache dtype). ``groups`` × ``group_elements`` channels are replicated when fewer
    groups than ranks exist (Mamba2). Shapes: vLLM ``mamba_utils.MambaStateShapeCalculator``.
    """

    family: str
    conv_channels: int = 0
    conv_kernel: int = 0
    ssm_elements: int = 0
    ssm_bytes: int | None = None
    groups: int = 0
    group_elements: int = 0
    drafts_extend_conv: bool = True

    def bytes_per_request(self, tp: int, drafted_tokens: int, cache_bytes: int) -> int:
        """Bytes of one request's state in one layer on one GPU."""
        extra = tp - self.groups if self.groups and self.groups % tp else 0
        channels = self.conv_channels + max(extra, 0) * self.group_elements
        columns = self.conv_kernel - 1 + (drafted_tokens if self.drafts_extend_conv else 0) if self.conv_kernel else 0
        conv = (channels // tp) * columns * cache_bytes
        return conv + (self.ssm_elements // tp) * (self.ssm_bytes or cache_bytes)


@dataclass(frozen=True, slots=True)
class Layer:
    """One cache-holding layer. ``span_tokens`` is the window or chunk; ``latent_dim`` the MLA or indexer row."""

    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    span_tokens: int = 0
    latent_dim: int = 0
    state: StateShape | None = None
    drafter: bool = False

    def heads_per_gpu(self, tp: int) -> int:
        """KV heads one rank holds: at least one, since heads are replicated once ``tp`` exceeds them."""
        return max(1, ceil_div(self.kv_heads, tp)) if self.kv_heads else 0


def full(kv_heads: int, key_dim: int, value_dim: int | None = None, *, drafter: bool = False) -> Layer:
    """A layer that keeps every token."""
    return Layer(LayerKind.FULL, kv_heads, key_dim, key_dim if value_dim is None else value_dim, drafter=drafter)


def sliding(kv_heads: int, key_dim: int, window_tokens: int, value_dim: int | None = None) -> Layer:
    """A layer that keeps the last ``window_tokens``."""
    return Layer(
        LayerKind.SLIDING, kv_heads, key_dim, key_dim if value_dim is None else value_dim, span_tokens=window_tokens
    )


def chunked(kv_heads: int, key_dim: int, chunk_tokens: int) -> Layer:
    """A layer that attends within chunks (Llama 4)."""
    return Layer(LayerKind.CHUNKED, kv_heads, key_dim, key_dim, span_tokens=chunk_tokens)


def mla(latent_dim: int) -> Layer:
    """A latent-attention layer: one row a token for all heads."""
    return Layer(LayerKind.MLA, latent_dim=latent_dim)


def indexer(row_bytes: int) -> Layer:
    """The sparse-attention indexer's own cache; its row is bytes whatever the KV dtype."""
    return Layer(LayerKind.INDEXER, latent_dim=row_bytes)


def recurrent(state: StateShape) -> Layer:
    """A Mamba or linear-attention layer."""
    return Layer(LayerKind.STATE, state=state)


def cross(kv_heads: int, key_dim: int) -> Layer:
    """A decoder layer's cross attention over the encoder's tokens."""
    return Layer(LayerKind.CROSS, kv_heads, key_dim, key_dim)
