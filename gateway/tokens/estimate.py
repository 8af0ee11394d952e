"""An estimate of a prompt's tokens from its size, with a ratio learned from what the backends report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.tokens.messages import MEDIA_PARTS
from gateway.types import ChatPrompt, Prompt, TextPrompts, TokenPrompts

# Before anything is learned: English and code take 3.3 to 4.3 bytes a token with vocabularies of 100,000 to 250,000.
_START_TOKENS_PER_BYTE = 0.27
_MESSAGE_TOKENS = 5
# Anything from 64 (thumbnails) to 16,000 (large images at full size); the common case of one screen is near this.
_MEDIA_TOKENS = 1200
_LEARNING_RATE = 0.2
_LEAST_BYTES_TO_LEARN = 200


@dataclass(frozen=True, slots=True)
class Size:
    """What an estimate starts from. ``prompts_bytes``: UTF-8 bytes of the text of each prompt."""

    prompts_bytes: tuple[int, ...]
    messages: int = 0
    media: int = 0

    @property
    def fixed_tokens(self) -> int:
        """What is not text: message frames and media."""
        return self.messages * _MESSAGE_TOKENS + self.media * _MEDIA_TOKENS


class Estimator:
    """Learns one model's tokens per byte."""

    def __init__(self) -> None:
        self.tokens_per_byte = _START_TOKENS_PER_BYTE
        self.observations = 0

    def estimate(self, size: Size) -> tuple[int, ...]:
        """Tokens of each prompt, at least one."""
        return tuple(
            max(1, round(count_bytes * self.tokens_per_byte) + size.fixed_tokens) for count_bytes in size.prompts_bytes
        )

    def learn(self, size: Size, prompt_tokens: int) -> None:
        """Take in that a request of ``size`` had ``prompt_tokens``. Media and short texts teach nothing."""
        total_bytes = sum(size.prompts_bytes)
        if size.media or total_bytes < _LEAST_BYTES_TO_LEARN:
            return
        seen = (prompt_tokens - size.fixed_tokens) / total_bytes
        if not 0.01 <= seen <= 2:  # truncated by the server, or not text at all
            return
        rate = _LEARNING_RATE if self.observations else 1.0
        self.tokens_per_byte += rate * (seen - self.tokens_per_byte)
        self.observations += 1


def size_of(prompt: Prompt) -> Size:
    """Measure a prompt without rendering it."""
    match prompt:
        case TokenPrompts():
            return Size(())
        case TextPrompts(texts=texts):
            return Size(tuple(_utf8_bytes(text) for text in texts))
        case ChatPrompt():
            text_bytes, media = 0, 0
            for message in prompt.messages:
                more_bytes, more_media = _message_size(message)
                text_bytes += more_bytes
                media += more_media
            for extra in (prompt.tools, prompt.documents):
                if extra:
                    text_bytes += _utf8_bytes(json.dumps(extra, ensure_ascii=False, default=str))
            return Size((text_bytes,), len(prompt.messages) + 1, media)


def _message_size(message: Any) -> tuple[int, int]:
    if not isinstance(message, Mapping):
        return 0, 0
    parts = message.get("content")
    media = 0
    if isinstance(parts, list):
        media = sum(_is_media(part) for part in parts)
        parts = [part for part in parts if not _is_media(part)]
    others = (message.get(key) for key in ("reasoning", "reasoning_content", "tool_calls"))
    return _text_bytes((parts, *others)), media


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and not MEDIA_PARTS.isdisjoint(part)


def _text_bytes(value: Any) -> int:
    """UTF-8 bytes of all strings within ``value``."""
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += _utf8_bytes(item)
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, Iterable):
            pending.extend(item)
    return total


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
