"""Qwen2-Audio: mel frames of at most thirty seconds, halved twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import Family, ModelFiles, Rule, only, whole
from gateway.tokens.media.sizes import AudioSize
from gateway.tokens.media.sounds import resampled


def qwen2_audio(files: ModelFiles, kwargs: Mapping[str, Any]) -> Family:
    """Settings are those of transformers' WhisperFeatureExtractor; what is longer than its chunk is cut off."""
    only(kwargs, ())
    settings = files.feature_extractor
    rate_hz = whole(settings, "sampling_rate", 16_000)
    hop = whole(settings, "hop_length", 160)
    most = whole(settings, "chunk_length", 30) * rate_hz

    def tokens(size: AudioSize) -> int:
        frames = -(-min(resampled(size, rate_hz), most) // hop)
        halved = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        if halved <= 0:
            raise UnknownMedia("a sound too short for the model", refused=True)
        return halved

    return Family(
        audio=Rule(placeholder="Audio {number}: <|audio_bos|><|AUDIO|><|audio_eos|>", target="<|AUDIO|>", tokens=tokens)
    )
