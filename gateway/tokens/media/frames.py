"""Which frames of a video reach the model: the samplers of vLLM 0.32 (multimodal/video.py) and their settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.sizes import VideoSize

_MOST_FPS = 30
_MOST_FRAMES = 768
_LEAST_FRAMES = 4
_NEUTRAL = frozenset({"num_frames", "fps", "min_frames", "max_frames", "max_duration"})


def video_io_kwargs(server: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the video loader: the server's ``--media-io-kwargs``, then the request's ``media_io_kwargs``.

    A request that sets one of ``fps`` and ``num_frames`` unsets the server's other one. Raises ``UnknownMedia`` for
    arguments whose effect is not known here (other decoders, frame recovery).
    """
    below, above = server.get("video") or {}, request.get("video") or {}
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        raise UnknownMedia("media_io_kwargs.video is no object")
    merged = {**below, **above}
    for one, other in (("num_frames", "fps"), ("fps", "num_frames")):
        if one in above and other not in above:
            merged.pop(other, None)
    for key, value in merged.items():
        if (key, value) in (("backend", "opencv"), ("frame_recovery", False)):
            continue
        if key not in _NEUTRAL or isinstance(value, bool) or not isinstance(value, int | float):
            raise UnknownMedia(f"what media_io_kwargs.video.{key} does is not known here")
    return merged


def uniform_frames(video: VideoSize, io: Mapping[str, Any]) -> int:
    """How many frames the plain loader samples: ``num_frames`` (32) or one each ``1 / fps`` s, whichever is less."""
    wanted, fps = io.get("num_frames", 32), io.get("fps", -1)
    count = min(wanted, video.frames) if wanted > 0 else video.frames
    if fps > 0:
        count = min(count, math.floor(video.duration_s * fps))
    return int(max(1, count))


def qwen2_frames(video: VideoSize, io: Mapping[str, Any]) -> int:
    """How many frames the loader of Qwen2-VL and Qwen2.5-VL samples; now and then one more than it aims at."""
    most = min(io.get("max_frames", _MOST_FRAMES), _MOST_FRAMES, video.frames) // 2 * 2
    aim = video.frames / video.fps * min(io.get("fps", 2), _MOST_FPS)
    aim = min(max(aim, io.get("min_frames", _LEAST_FRAMES)), most, video.frames) // 2 * 2
    if aim <= 0:
        raise UnknownMedia("a video of too few frames for the model", refused=True)
    step: float = video.frames / aim
    return math.ceil(video.frames / step)


def qwen3_frames(video: VideoSize, io: Mapping[str, Any]) -> list[int]:
    """Numbers of the frames that the loader of Qwen3-VL and Qwen3.5 samples."""
    least, most = io.get("min_frames", _LEAST_FRAMES), min(io.get("max_frames", _MOST_FRAMES), _MOST_FRAMES)
    return spread(video, min(io.get("fps", 2), _MOST_FPS), least, most)


def spread(video: VideoSize, fps: float, least: int, most: int) -> list[int]:
    """Evenly spread frames from the first to the last: ``fps`` a second within ``least`` and ``most``."""
    count = min(max(int(video.frames / video.fps * fps), least), most, video.frames)
    if count <= 0 or int(count) != count:
        raise UnknownMedia("a video of which no frame is sampled", refused=True)
    last = video.frames - 1
    step = last / (count - 1) if count > 1 else 0.0
    return [round(index * step) for index in range(int(count) - 1)] + [last if count > 1 else 0]
