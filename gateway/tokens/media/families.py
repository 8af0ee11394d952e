"""Which formula a model's architecture has: the registry, and how a family is made for one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import Family, ModelFiles
from gateway.tokens.media.gemma import gemma3, gemma4
from gateway.tokens.media.internvl import internvl
from gateway.tokens.media.kwargs import image_kwargs
from gateway.tokens.media.llama4 import llama4
from gateway.tokens.media.llava import llava, llava_next, llava_onevision
from gateway.tokens.media.pixtral import mistral3, pixtral
from gateway.tokens.media.qwen import qwen_vl
from gateway.tokens.media.qwen_audio import qwen2_audio

Build = Callable[[ModelFiles, Mapping[str, Any]], Family]
"""Makes the family of one model from its files and the arguments of its image processor. Raises ``UnknownMedia``."""


def _llava_or_pixtral(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    return pixtral(files, kwargs) if files.vision.get("model_type") == "pixtral" else llava(files, kwargs)


FAMILIES: Mapping[str, Build] = {
    "Qwen2VLForConditionalGeneration": qwen_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen_vl,
    "Qwen3VLForConditionalGeneration": qwen_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen_vl,
    "Qwen3_5ForConditionalGeneration": qwen_vl,
    "Qwen3_5MoeForConditionalGeneration": qwen_vl,
    "Qwen2AudioForConditionalGeneration": qwen2_audio,
    "LlavaForConditionalGeneration": _llava_or_pixtral,
    "LlavaNextForConditionalGeneration": llava_next,
    "LlavaOnevisionForConditionalGeneration": llava_onevision,
    "Mistral3ForConditionalGeneration": mistral3,
    "Gemma3ForConditionalGeneration": gemma3,
    "Gemma4ForConditionalGeneration": gemma4,
    "InternVLChatModel": internvl,
    "Llama4ForConditionalGeneration": llama4,
}
"""Formulas by ``architectures`` of ``config.json``, each held against vLLM 0.32 (tests/tokens/media_known.json)."""


def family_of(files: ModelFiles, server: Mapping[str, Any], request: Mapping[str, Any]) -> Family:
    """The family of a model under ``mm_processor_kwargs``. Raises ``UnknownMedia`` if there is no formula for it."""
    architectures = files.config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if name in FAMILIES:
            return FAMILIES[name](files, image_kwargs(server, request))
    raise UnknownMedia("what this architecture makes of media is not known here")
