"""A model's geometry read from its config.json: which layer caches what, and what the weights consist of.

Reads plain JSON only. Where a config leaves something out, the default of vLLM 0.32 applies
(``transformers_utils/model_arch_config_convertor.py`` and the model files); what had to be assumed stands in ``notes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.planner import recurrent
from gateway.planner.config_shape import check_shape
from gateway.planner.errors import GeometryMissing
from gateway.planner.layers import Layer, LayerKind, chunked, cross, full, indexer, mla, sliding

# vLLM 0.32 is_deepseek_mla: other configs with a kv_lora_rank (MiniCPM3) cache expanded keys and values.
MLA_TYPES = frozenset(
    [
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_mtp",
        "glm5_next",
        "glm5_next_text",
        "glm_moe_dsa",
        "glm4_moe_lite",
        "kimi_k2",
        "kimi_k25",
        "kimi_linear",
        "kimi_k3",
        "longcat_flash",
        "pangu_ultra_moe",
        "bailing_hybrid",
        "hy_v4",
        "dots3_note",
        "mistral4",
    ]
)
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float": 4, "half": 2}
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_ENCODER_ONLY = frozenset(
    ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "nomic_bert", "gte", "electra"]
)


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What the planner knows of a model. ``decoder_layers[i]`` are the caches decoder layer ``i`` owns (0, 1 or 2)."""

    name: str
    model_type: str
    architecture: str
    decoder_layers: tuple[tuple[Layer, ...], ...]
    hidden: int
    attention_heads: int
    vocab: int
    model_bytes: int
    max_position: int | None
    rope_scaled: bool
    quantization: Mapping[str, Any] | None
    mtp_layers: int
    encoder_tokens: int
    multimodal: bool
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every cache-holding layer, in order."""
        return tuple(layer for caches in self.decoder_layers for layer in caches)

    @property
    def hybrid(self) -> bool:
        """Whether recurrent layers share the pool with attention layers."""
        kinds = {layer.kind for layer in self.layers}
        return LayerKind.STATE in kinds and len(kinds) > 1

    @property
    def uses_mla(self) -> bool:
        return any(layer.kind is LayerKind.MLA for layer in self.layers)

    @property
    def has_local_layers(self) -> bool:
        return any(layer.kind in (LayerKind.SLIDING, LayerKind.CHUNKED) for layer in self.layers)

    def stage(self, index: int, stages: int) -> tuple[Layer, ...]:
        """The cached layers of pipeline stage ``index`` of ``stages``, cut as vLLM's ``get_pp_indices`` does."""
        count = len(self.decoder_layers)
        sizes = [count // stages] * stages
        for back in range(2, count % stages + 2):
            sizes[-back] += 1
        start = sum(sizes[:index])
        return tuple(layer for caches in self.decoder_layers[start : start + sizes[index]] for layer in caches)

    def drafter_layer(self) -> Layer:
        """The cached layer an EAGLE or MTP head adds: as the last keep-everything layer of the target."""
        for layer in reversed(self.layers):
            if layer.kind in (LayerKind.FULL, LayerKind.MLA):
                return layer
        return full(max(self.attention_heads, 1), 128, drafter=True)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config, with what only the outer part states (dtype, tying) filled in."""
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping) and ("num_hidden_layers" in inner or any(k in inner for k in _NESTED)):
            merged = text_config(inner)
            for outer in ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "architectures"):
                if outer in config and merged.get(outer) in (None, []):
                    merged[outer] = config[outer]
            return merged
    return dict(config)


def read_geometry(config: Mapping[str, Any], name: str = "model") -> ModelGeometry:
    """Geometry of a parsed config.json. Raises GeometryMissing for absent fields, PlannerError for wild ones."""
    try:
        return _read_geometry(config, name)
    except KeyError as error:
        field_name = str(error.args[0])
        raise GeometryMissing(
            f"{name}: the config has no {field_name}, which a model of this kind must state.", (field_name,)
        ) from error


def _read_geometry(config: Mapping[str, Any], name: str) -> ModelGeometry:
    text = text_config(config)
    check_shape(text, name)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    architectures = config.get("architectures") or text.get("architectures") or [""]
    count = first_int(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
    listed = text.get("layers_block_type") or text.get("layer_types")
    if count is None and isinstance(listed, list):
        count = len(listed)
    hidden = first_int(text, "hidden_size", "n_embd", "d_model", "dim")
    heads = first_int(text, "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads") or 0
    missing = tuple(
        field_name for field_name, value in (("num_hidden_layers", count), ("hidden_size", hidden)) if not value
    )
    if missing or count is None or hidden is None:
        raise GeometryMissing(
            f"{name}: the config has no {' and no '.join(missing)}, so neither weights nor KV cache can be computed. "
            "Is this the model's config.json (not tokenizer_config.json or an adapter's)?",
            missing,
        )
    notes: list[str] = []
    layers = _decoder_layers(text, config, model_type, count, hidden, heads, notes)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return ModelGeometry(
        name=name,
        model_type=model_type,
        architecture=str(architectures[0]) if architectures else "",
        decoder_layers=layers,
        hidden=hidden,
        attention_heads=heads,
        vocab=first_int(text, "vocab_size", "padded_vocab_size") or first_int(config, "vocab_size") or 0,
        model_bytes=_DTYPE_BYTES.get(
            str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch."), 2
        ),
        max_position=derived_max_len(text),
        rope_scaled=isinstance(rope, Mapping) and bool(rope.get("factor") or rope.get("type") == "yarn"),
        quantization=text.get("quantization_config") or config.get("compression_config"),
        mtp_layers=first_int(text, "num_nextn_predict_layers", "mtp_num_hidden_layers") or 0,
        encoder_tokens=_encoder_tokens(text, config),
        multimodal=any(key in config for key in ("vision_config", "audio_config", "visual")),
        config=text,
        notes=tuple(notes),
    )


def is_deepseek_v4(text: Mapping[str, Any]) -> bool:
    """Whether the caches are compressed layer by layer, as DeepSeek-V4's are."""
    return isinstance(text.get("compress_ratios"), list) and bool(text["compress_ratios"])


def derived_max_len(text: Mapping[str, Any]) -> int | None:
    """The window vLLM derives from a config: the largest position count, times a rope factor where one applies."""
    length = first_int(
        text,
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_target_positions",
    )
    rope = text.get("rope_scaling")
    if length and isinstance(rope, Mapping):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        factor = rope.get("factor")
        original = rope.get("original_max_position_embeddings")
        if kind == "yarn" and factor:
            return int((original or length) * factor)
        if factor and kind in ("linear", "dynamic"):
            return int(length * factor)
    return length


def first_int(source: Mapping[str, Any], *names: str) -> int | None:
    """The first of ``names`` that holds a whole number."""
    for name in names:
        value = source.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def head_dim_of(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Key size of one head: stated, or the hidden size shared among the heads."""
    stated = first_int(text, "head_dim", "attention_head_dim", "kv_channels", "d_kv")
    return stated or (hidden // heads if heads else 0)


def kv_heads_of(text: Mapping[str, Any], heads: int) -> int:
    """KV heads: stated, one for multi-query configs, else as many as attention heads."""
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        return first_int(text, "multi_query_group_num") or 1
    if text.get("multi_query_attention"):
        return first_int(text, "multi_query_group_num") or 1
    attention = text.get("attn_config")
    inner = attention if isinstance(attention, Mapping) else {}
    stated = first_int(text, "num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads", "num_query_groups")
    return stated or first_int(inner, "kv_n_heads") or heads


def _decoder_layers(
    text: Mapping[str, Any],
    config: Mapping[str, Any],
    model_type: str,
    count: int,
    hidden: int,
    heads: int,
    notes: list[str],
) -> tuple[tuple[Layer, ...], ...]:
    if model_type in _ENCODER_ONLY:
        notes.append("An encoder-only model: vLLM keeps no KV cache for it.")
        return ((),) * count
    if is_deepseek_v4(text):
        notes.append(
            "DeepSeek-V4's packed caches are planned for the fp8 format, as two 0.26 logs show; no drafter but MTP."
        )
        return _deepseek_v4_layers(text, count)
    attention = _attention_layers(text, model_type, count, hidden, heads, notes)
    layers = recurrent.apply(text, model_type, attention, hidden, notes)
    shared = first_int(text, "num_kv_shared_layers") or 0
    if shared:
        # Gemma 3n and 4: the last layers read an earlier layer's cache and allocate none (vLLM gemma4.py).
        notes.append(f"The last {shared} layers share the cache of earlier ones and allocate nothing.")
        layers = tuple(() if index >= count - shared else caches for index, caches in enumerate(layers))
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        added = cross(kv_heads_of(text, heads), head_dim_of(text, hidden, heads))
        layers = tuple((*caches, added) for caches in layers)
    return layers


def _attention_layers(
    text: Mapping[str, Any], model_type: str, count: int, hidden: int, heads: int, notes: list[str]
) -> tuple[tuple[Layer, ...], ...]:
    if text.get("kv_lora_rank") and (model_type in MLA_TYPES or "mla" in model_type or not model_type):
        return _mla_layers(text, count)
    if isinstance(text.get("block_configs"), list):
        return _per_block_layers(text, hidden, heads)
    if not heads and model_type not in recurrent.ATTENTION_FREE:
        raise GeometryMissing(
            f"The config of this {model_type or 'model'} states no num_attention_heads, so its KV cache is unknown.",
            ("num_attention_heads",),
        )
    kv_heads, key_dim = kv_heads_of(text, heads), head_dim_of(text, hidden, heads)
    if text.get("kv_lora_rank") and text.get("qk_nope_head_dim"):
        key_dim = int(text["qk_nope_head_dim"]) + int(text.get("qk_rope_head_dim", 0))
        notes.append(f"{model_type} has a latent rank but vLLM caches its expanded heads.")
    value_dim = first_int(text, "v_head_dim") or key_dim
    if text.get("kv_lora_rank"):
        value_dim = key_dim  # vLLM pads the value head up to the key head here
    everything = (full(kv_heads, key_dim, value_dim),)
    local = _local_layer(text, model_type, kv_heads, key_dim, value_dim)
    if model_type == "minimax_m3" or isinstance(text.get("sparse_attention_config"), Mapping):
        return _with_block_indexer(text, count, everything[0])
    flags = local_layer_flags(text, model_type, count)
    if local is None or not any(flags):
        return (everything,) * count
    wide = _global_layer(text, kv_heads, key_dim, value_dim)
    return tuple((local,) if flag else (wide,) for flag in flags)


def _mla_layers(text: Mapping[str, Any], count: int) -> tuple[tuple[Layer, ...], ...]:
    latent = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    caches: tuple[Layer, ...] = (mla(latent),)
    index_dim = first_int(text, "index_head_dim")
    if index_dim:
        # fp8 row plus one fp32 scale a 128-wide group (vLLM deepseek_v2.py Indexer)
        caches = (mla(latent), indexer(index_dim + index_dim // 128 * 4))
    without = caches[:1]
    return tuple(caches if chooses else without for chooses in _choosing_layers(text, count))


def _choosing_layers(text: Mapping[str, Any], count: int) -> list[bool]:
    """Sparse MLA: whether a layer chooses rows itself, or reuses an earlier layer's choice (GLM-5.2, IndexCache)."""
    pattern = text.get("index_topk_pattern")
    if isinstance(pattern, str):
        return [index >= len(pattern) or pattern[index] != "S" for index in range(count)]
    every, offset = first_int(text, "index_topk_freq") or 1, first_int(text, "index_skip_topk_offset")
    start = 2 if offset is None else offset  # defaults of vLLM 0.32 deepseek_v2.py
    return [max(index - start + 1, 0) % max(every, 1) == 0 for index in range(count)]


def _per_block_layers(text: Mapping[str, Any], hidden: int, heads: int) -> tuple[tuple[Layer, ...], ...]:
    """Nemotron-NAS: each block states its own grouping, or that it has no attention at all."""
    key_dim = head_dim_of(text, hidden, heads)
    layers: list[tuple[Layer, ...]] = []
    for block in text["block_configs"]:
        attention = block.get("attention", {})
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layers.append(())
            continue
        queries_per_kv = attention.get("n_heads_in_group")
        kv_heads = attention.get("num_key_value_heads") or (heads // queries_per_kv if queries_per_kv else heads)
        layers.append((full(int(kv_heads), key_dim),))
    return tuple(layers)


def _with_block_indexer(text: Mapping[str, Any], count: int, layer: Layer) -> tuple[tuple[Layer, ...], ...]:
    """MiniMax-M3: some layers carry an indexer cache of one bf16 row a token beside their KV heads."""
    sparse = text.get("sparse_attention_config") or {}
    flags = sparse.get("sparse_attention_freq") or [0] * count
    row = int(sparse.get("sparse_index_dim") or 0) * 2
    return tuple(
        (layer, indexer(row)) if row and index < len(flags) and flags[index] else (layer,) for index in range(count)
    )


def _local_layer(text: Mapping[str, Any], model_type: str, kv_heads: int, key_dim: int, value_dim: int) -> Layer | None:
    chunk = first_int(text, "attention_chunk_size")
    if chunk and model_type.startswith("llama4"):
        return chunked(kv_heads, key_dim, chunk)
    window = first_int(text, "sliding_window", "sliding_window_size")
    if window is None or window <= 0 or text.get("use_sliding_window") is False:
        return None
    return sliding(
        first_int(text, "swa_num_key_value_heads") or kv_heads,
        first_int(text, "swa_head_dim") or key_dim,
        window,
        first_int(text, "swa_v_head_dim") or value_dim,
    )


def _global_layer(text: Mapping[str, Any], kv_heads: int, key_dim: int, value_dim: int) -> Layer:
    """Gemma 4's full layers have heads of another size and number than its sliding ones."""
    wide_dim = first_int(text, "global_head_dim")
    wide_heads = first_int(text, "num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return full(wide_heads or kv_heads, wide_dim or key_dim, wide_dim or value_dim)


def local_layer_flags(text: Mapping[str, Any], model_type: str, count: int) -> list[bool]:
    """Per decoder layer: whether it attends locally (window or chunk)."""
    types = text.get("layer_types") or text.get("attention_layer_types")
    if isinstance(types, list) and len(types) >= count:
        local = ("sliding_attention", "chunked_attention", "local", "sliding", "sliding_window")
        return [str(kind) in local for kind in types[:count]]
    counted = first_int(text, "sliding_layers")
    if counted is not None:
        return [index < counted for index in range(count)]
    pattern = text.get("hybrid_layer_pattern")
    if isinstance(pattern, list) and len(pattern) >= count:
        return [bool(flag) for flag in pattern[:count]]
    no_rope = text.get("no_rope_layers")
    if model_type.startswith("llama4"):
        if isinstance(no_rope, list) and len(no_rope) >= count:
            return [bool(flag) for flag in no_rope[:count]]
        return [(index + 1) % 4 != 0 for index in range(count)]
    step = first_int(text, "sliding_window_pattern", "_sliding_window_pattern")
    if step is None:
        step = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}.get(model_type)
    if step:
        return [(index + 1) % step != 0 for index in range(count)]
    if model_type in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        first = first_int(text, "max_window_layers")
        if text.get("use_sliding_window") is not True:
            return [False] * count
        return [index >= (first or 0) for index in range(count)]
    return [True] * count


def _deepseek_v4_layers(text: Mapping[str, Any], count: int) -> tuple[tuple[Layer, ...], ...]:
    """Each layer keeps a window of latent rows; compressed layers keep every 4th or 128th row (584 B packed)."""
    ratios = list(text.get("compress_ratios") or [])
    window = first_int(text, "sliding_window") or 128
    layers: list[tuple[Layer, ...]] = []
    for index in range(count):
        ratio = int(ratios[index]) if index < len(ratios) else 0
        caches = [Layer(LayerKind.SLIDING, 1, 584, 0, span_tokens=window, latent_dim=584)]
        if ratio:
            caches.append(Layer(LayerKind.MLA, latent_dim=max(1, 584 // ratio)))
        if ratio == 4:
            caches.append(Layer(LayerKind.INDEXER, latent_dim=132 // 4))
        layers.append(tuple(caches))
    return tuple(layers)


def _encoder_tokens(text: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    if not (config.get("is_encoder_decoder") or text.get("is_encoder_decoder")):
        return 0
    return first_int(text, "max_source_positions") or first_int(text, "max_position_embeddings") or 1500
