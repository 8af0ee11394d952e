"""Which formula a model's architecture has: the registry, and how a family is made for one model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import Family, ModelFiles, Rule
from gateway.tokens.media.frames import video_io_kwargs
from gateway.tokens.media.gemma import gemma3, gemma4
from gateway.tokens.media.internvl import internvl
from gateway.tokens.media.kwargs import image_kwargs, video_kwargs
from gateway.tokens.media.llama4 import llama4
from gateway.tokens.media.llava import llava, llava_next, llava_onevision, onevision_video
from gateway.tokens.media.pixtral import mistral3, pixtral
from gateway.tokens.media.qwen import qwen_images
from gateway.tokens.media.qwen_audio import qwen2_audio
from gateway.tokens.media.qwen_video import qwen2_video, qwen3_video
from gateway.tokens.media.sizes import VideoSize

Build = Callable[[ModelFiles, Mapping[str, Any]], Family]
"""Makes the family of one model from its files and the arguments of its image processor. Raises ``UnknownMedia``."""


def _llava_or_pixtral(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    return pixtral(files, kwargs) if files.vision.get("model_type") == "pixtral" else llava(files, kwargs)


def _qwen_vl(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    return Family(image=qwen_images(files, kwargs))


FAMILIES: Mapping[str, Build] = {
    "Qwen2VLForConditionalGeneration": _qwen_vl,
    "Qwen2_5_VLForConditionalGeneration": _qwen_vl,
    "Qwen3VLForConditionalGeneration": _qwen_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen_vl,
    "Qwen3_5ForConditionalGeneration": _qwen_vl,
    "Qwen3_5MoeForConditionalGeneration": _qwen_vl,
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


VideoBuild = Callable[[ModelFiles, Mapping[str, Any], Mapping[str, Any]], Rule[VideoSize]]
"""Makes the rule for videos from a model's files, the arguments of its video processor and those of vLLM's loader."""

VIDEOS: Mapping[str, tuple[VideoBuild, str]] = {
    "Qwen2VLForConditionalGeneration": (qwen2_video, "Qwen2VLVideoProcessor"),
    "Qwen2_5_VLForConditionalGeneration": (qwen2_video, "Qwen2VLVideoProcessor"),
    "Qwen3VLForConditionalGeneration": (qwen3_video, "Qwen3VLVideoProcessor"),
    "Qwen3VLMoeForConditionalGeneration": (qwen3_video, "Qwen3VLVideoProcessor"),
    "Qwen3_5ForConditionalGeneration": (qwen3_video, "Qwen3VLVideoProcessor"),
    "Qwen3_5MoeForConditionalGeneration": (qwen3_video, "Qwen3VLVideoProcessor"),
    "LlavaOnevisionForConditionalGeneration": (onevision_video, "LlavaOnevisionVideoProcessor"),
}
"""Formulas for videos, and the video processor by which vLLM 0.32 chooses how it samples frames."""


@dataclass(frozen=True, slots=True)
class ProcessorKwargs:
    """Arguments of the server and of the request: ``mm_processor_kwargs`` and ``media_io_kwargs``.

    ``interleave``: the server runs with ``--interleave-mm-strings``.
    """

    server: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    server_io: Mapping[str, Any] = field(default_factory=dict)
    request_io: Mapping[str, Any] = field(default_factory=dict)
    interleave: bool = False


def family_of(files: ModelFiles, kwargs: ProcessorKwargs, modalities: Collection[str]) -> Family:
    """The family of a model under such arguments, for items of these modalities. Raises ``UnknownMedia`` for others."""
    architectures = files.config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if name in FAMILIES:
            family = Family()
            if set(modalities) - {"video"}:
                family = FAMILIES[name](files, image_kwargs(kwargs.server, kwargs.request))
            return replace(family, video=_videos(name, files, kwargs)) if "video" in modalities else family
    raise UnknownMedia("what this architecture makes of media is not known here")


def _videos(name: str, files: ModelFiles, kwargs: ProcessorKwargs) -> Rule[VideoSize]:
    if name not in VIDEOS:
        raise UnknownMedia("what this architecture makes of videos is not known here")
    build, processor = VIDEOS[name]
    named = [one.get("video_processor_type") for one in (files.video_preprocessor, files.preprocessor)]
    if next((one for one in named if one is not None), processor) != processor:
        raise UnknownMedia("the model's video processor is not known here")
    io = video_io_kwargs(kwargs.server_io, kwargs.request_io)
    return build(files, video_kwargs(kwargs.server, kwargs.request), io)
