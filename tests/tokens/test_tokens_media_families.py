"""Each family's formula gives what vLLM's own processor gives for the same model and size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.families import FAMILIES, ProcessorKwargs, family_of
from gateway.tokens.media.family import ModelFiles
from gateway.tokens.media.gemma import newline_seams
from gateway.tokens.media.kwargs import image_kwargs
from gateway.tokens.media.sizes import AudioSize, ImageSize

# What vLLM 0.32's processing classes said in process, for models of these configurations: "width height tokens", "-"
# where they refuse the image. Made with transformers 5.19 and the functions that vLLM makes its placeholders with.
KNOWN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "media_known.json").read_text())


def files_of(known: dict[str, Any]) -> ModelFiles:
    return ModelFiles(known["config"], known["preprocessor"], known["processor"])


@pytest.mark.parametrize("name", KNOWN)
def test_images_take_the_tokens_that_vllm_says(name: str) -> None:
    known = KNOWN[name]
    rule = family_of(files_of(known), ProcessorKwargs(known["server"], known["request"]), {"image"}).image
    assert rule is not None
    wrong = []
    for line in known["tokens"]:
        width, height, tokens = line.split()
        try:
            ours = str(rule.tokens(ImageSize(int(width), int(height))))
        except UnknownMedia as error:
            ours = "-" if error.refused else error.reason
        if ours != tokens:
            wrong.append((line, ours))
    assert wrong == []


def test_every_image_family_is_known_from_vllm() -> None:
    seen = {architecture for known in KNOWN.values() for architecture in known["config"]["architectures"]}
    # Subclasses of Qwen3-VL in vLLM, with its processor; and a model of sounds.
    alike = {"Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
    assert set(FAMILIES) - alike - {"Qwen2AudioForConditionalGeneration"} <= seen


@pytest.mark.parametrize(
    ("config", "kwargs"),
    [
        ({}, {}),
        ({"architectures": ["LlamaForCausalLM"]}, {}),
        ({"architectures": "Qwen2VLForConditionalGeneration"}, {}),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, {"do_resize": False}),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, {"max_pixels": "many"}),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, {"do_pan_and_scan": True}),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"model_type": "other"}}, {}),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_feature_select_strategy": "class"}, {}),
        ({"architectures": ["LlavaNextForConditionalGeneration"], "image_grid_pinpoints": [[1]]}, {}),
        ({"architectures": ["Llama4ForConditionalGeneration"], "vision_config": {"pixel_shuffle_ratio": 0}}, {}),
        ({"architectures": ["Gemma4ForConditionalGeneration"]}, {"max_soft_tokens": 71}),
    ],
)
def test_what_is_not_known_has_no_formula(config: dict[str, Any], kwargs: dict[str, Any]) -> None:
    with pytest.raises(UnknownMedia):
        family_of(ModelFiles(config), ProcessorKwargs(kwargs), {"image"})


def test_the_request_goes_before_the_server_and_scopes_before_what_is_flat() -> None:
    server = {
        "size": {"shortest_edge": 1, "longest_edge": 2},
        "images_kwargs": {"max_pixels": 3},
        "videos_kwargs": {"a": 1},
    }
    request = {"max_pixels": 4, "images_kwargs": {"size": {"longest_edge": 5}}}
    assert image_kwargs(server, request) == {"size": {"shortest_edge": 1, "longest_edge": 5}, "max_pixels": 4}
    assert image_kwargs({"max_pixels": 1}, {"images_kwargs": None}) == {"max_pixels": 1}


@pytest.mark.parametrize(
    ("samples", "rate_hz", "tokens"),
    # vLLM 0.32's Qwen2AudioMultiModalProcessor in process, at 16 kHz; 48 kHz by torchaudio's length.
    [
        (16_000, 16_000, 25),
        (480_000, 16_000, 750),
        (900_000, 16_000, 750),
        (100_003, 16_000, 156),
        (48_000, 48_000, 25),
    ],
)
def test_sounds_of_qwen2_audio(samples: int, rate_hz: int, tokens: int) -> None:
    files = ModelFiles({"architectures": ["Qwen2AudioForConditionalGeneration"]})
    rule = family_of(files, ProcessorKwargs(), {"audio"}).audio
    assert rule is not None
    assert rule.tokens(AudioSize(samples, rate_hz)) == tokens
    with pytest.raises(UnknownMedia):
        rule.tokens(AudioSize(10, rate_hz))


@pytest.mark.parametrize(
    ("texts", "merged"),
    [
        (["user\n", "What?"], 1),
        (["user", "What?"], 0),
        (["user\n\n\n", "\n\n\nWhat?"], 0),
        (["user\n\n", "\nWhat?"], 2),
        (["", "", ""], 1),
        (["\n", "\n", "\n\n"], 3),
        (["a", "\n\n\n", "b"], 0),
        (["a", "\nx\n", "b"], 2),
        (["", ""], 0),
    ],
)
def test_newlines_merge_around_images_of_gemma_3(texts: list[str], merged: int) -> None:
    assert newline_seams(texts) == merged
