"""Which families are proven: each a chat template, and the tiny model with a real tokenizer that carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Two layers of 64; a head size of 32 is the smallest that vLLM's CPU attention takes.
_LAYERS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny model: ``config.json`` of a real architecture, and a tokenizer. ``flags`` go to vLLM."""

    name: str
    tokenizer: str
    vocab_size: int
    architecture: str
    config: Mapping[str, Any]
    flags: tuple[str, ...] = ()

    def config_json(self, architecture: str | None = None) -> dict[str, Any]:
        """The whole ``config.json``, with ``architecture`` in the place of its own."""
        architectures = [architecture or self.architecture]
        return {**_LAYERS, "vocab_size": self.vocab_size, "architectures": architectures, **self.config}


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table: a template on a model. ``template`` ``None``: the tokenizer's own, or no Jinja at all.

    ``architecture``: of the real model, where a server on CPU needs another that is told how to render.
    """

    name: str
    model: str
    template: str | None
    kwargs: tuple[Mapping[str, Any], ...] = ()
    architecture: str | None = None


def _mode(mode: str, tool_parser: str = "hermes") -> tuple[str, ...]:
    return ("--tokenizer-mode", mode, "--tool-call-parser", tool_parser)


_LLAMA = {"model_type": "llama", "rope_theta": 500000.0}
_QWEN3 = {"model_type": "qwen3", "rope_theta": 1000000.0}
_QWEN2 = {"model_type": "qwen2", "rope_theta": 1000000.0}

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("qwen3", "qwen3", 151936, "Qwen3ForCausalLM", _QWEN3),
        Model("qwen2.5", "qwen2_5", 151936, "Qwen2ForCausalLM", _QWEN2),
        Model("qwen3.5", "qwen3_5", 248320, "Qwen3ForCausalLM", _QWEN3),
        Model("llama3.1", "llama3_1", 128256, "LlamaForCausalLM", _LLAMA),
        Model("llama2", "llama2", 32064, "LlamaForCausalLM", _LLAMA),
        Model("smollm2", "smollm2", 49152, "LlamaForCausalLM", _LLAMA),
        Model("deepseek-v3", "deepseek_v3", 129280, "LlamaForCausalLM", _LLAMA),
        Model(
            "gemma3",
            "gemma3",
            262208,
            "Gemma3ForCausalLM",
            {
                "model_type": "gemma3_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 32,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"],
                "bos_token_id": 2,
                "eos_token_id": 1,
                "pad_token_id": 0,
            },
        ),
        Model("gemma4", "gemma4", 262144, "LlamaForCausalLM", _LLAMA),
        Model(
            "gpt-oss",
            "gptoss",
            201088,
            "GptOssForCausalLM",
            {
                "model_type": "gpt_oss",
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_theta": 150000.0,
                "tie_word_embeddings": False,
            },
            flags=("--tool-call-parser", "openai"),
        ),
        Model("mistral", "tekken", 131072, "LlamaForCausalLM", _LLAMA, flags=_mode("mistral", "mistral")),
        Model("deepseek-v3.2", "deepseek_v4", 129280, "LlamaForCausalLM", _LLAMA, flags=_mode("deepseek_v32")),
        Model("deepseek-v4", "deepseek_v4", 129280, "LlamaForCausalLM", _LLAMA, flags=_mode("deepseek_v4")),
    )
}

FAMILIES: tuple[Family, ...] = (
    Family("Qwen 2.5", "qwen2.5", "trl/qwen2_5"),
    Family("Qwen 3", "qwen3", "trl/qwen3"),
    Family("Qwen 3 2507", "qwen3", "trl/qwen3_instruct_2507"),
    Family("Qwen 3 Coder", "qwen3", "llama.cpp/Qwen3-Coder"),
    Family("QwQ", "qwen2.5", "llama.cpp/Qwen-QwQ-32B"),
    Family("Qwen 3.5", "qwen3.5", "trl/qwen3_5_think"),
    Family("Qwen 3.6", "qwen3.5", "trl/qwen3_6", kwargs=({"preserve_thinking": True},)),
    Family("Llama 3.1", "llama3.1", "trl/llama3_1"),
    Family("Llama 3.2", "llama3.1", "trl/llama3_2"),
    Family("Llama 3.3", "llama3.1", "llama.cpp/meta-llama-Llama-3.3-70B-Instruct"),
    Family("Gemma 3", "gemma3", "trl/gemma3"),
    Family("Gemma 4", "gemma4", "trl/gemma4_v5"),
    Family("SmolLM2", "smollm2", None),
    Family("DeepSeek V3", "deepseek-v3", "trl/deepseekv3"),
    Family("DeepSeek V3.1", "deepseek-v3", "llama.cpp/deepseek-ai-DeepSeek-V3.1", kwargs=({"thinking": True},)),
    Family("DeepSeek R1 distilled", "deepseek-v3", "trl/deepseek_r1_distill"),
    Family("Phi 3.5", "llama2", "trl/phi3_5"),
    Family("GLM 4.5", "qwen3", "trl/glm4moe"),
    Family("GLM 4.6", "qwen3", "llama.cpp/GLM-4.6"),
    Family("GLM 4.7", "qwen3", "llama.cpp/GLM-4.7-Flash", kwargs=({"clear_thinking": False},)),
    Family("Kimi K2", "qwen3", "llama.cpp/moonshotai-Kimi-K2"),
    Family("MiniMax M2", "qwen3", "llama.cpp/MiniMax-M2"),
    Family("Nemotron 3 Nano", "qwen3", "trl/nemotron_3_nano"),
    Family("Granite 4", "qwen3", "llama.cpp/ibm-granite-granite-4.0"),
    Family("Seed-OSS", "qwen3", "llama.cpp/ByteDance-Seed-OSS", kwargs=({"thinking_budget": 512},)),
    Family("gpt-oss", "gpt-oss", None),
    Family("Mistral (tekken)", "mistral", None),
    Family("DeepSeek V3.2", "deepseek-v3.2", None, ({"thinking": True},), "DeepseekV32ForCausalLM"),
    Family("DeepSeek V4", "deepseek-v4", None, ({"thinking": False},), "DeepseekV4ForCausalLM"),
    Family("Mistral Small 3.2 (Jinja)", "qwen3", "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506"),
)
