"""Embeddings, pooling, classification and scoring: prompts go in, no tokens come out. A body becomes an ``Ask``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.api.body import model_name, objects_or_none, parse_object, text_or_none, truthy
from gateway.api.chat import has_media, truncation
from gateway.api.completions import prompts_of
from gateway.types import Ask, ChatPrompt, Dialect, Prompt, TextPrompts

INPUT_PATHS = ("/v1/embeddings", "/pooling", "/classify")
PAIR_PATHS = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
PATHS = INPUT_PATHS + PAIR_PATHS

# The names that vLLM gives to the two sides of a pair, newest first.
_LEFT = ("queries", "data_1", "text_1", "query")
_RIGHT = ("documents", "items", "data_2", "text_2")


def parse(body: bytes, content_type: str | None, path: str) -> Ask:
    """Read a request of ``PATHS``. Raises ``BadRequest`` for a body that is no JSON object.

    The prompt is ``None`` where it cannot be counted here: several conversations at once, images, wrong shapes.
    """
    document = parse_object(body, content_type)
    prompt = _pairs(document) if path in PAIR_PATHS else _input(document)
    return Ask(
        dialect=Dialect.POOLING,
        path=path,
        model=model_name(document),
        prompt=prompt,
        body=body,
        document=document,
        include_usage=True,
        truncate_prompt_tokens=truncation(document),
        has_media=isinstance(prompt, ChatPrompt) and any(map(has_media, prompt.messages)),
        continuous_usage=True,
    )


def _input(document: Mapping[str, Any]) -> Prompt | None:
    """``messages`` are one conversation; ``input`` is a text, token ids, lists of either, or one conversation."""
    if document.get("padding") == "max_length":
        return None
    messages = objects_or_none(document.get("messages"))
    given = document.get("input")
    if messages is None and "messages" not in document and isinstance(given, list):
        messages = objects_or_none(given)
    if messages is not None:
        return _chat(document, messages)
    return prompts_of(given, truthy(document.get("add_special_tokens"), otherwise=True))


def _chat(document: Mapping[str, Any], messages: list[dict[str, Any]]) -> ChatPrompt:
    kwargs = document.get("chat_template_kwargs")
    return ChatPrompt(
        messages=messages,
        add_generation_prompt=truthy(document.get("add_generation_prompt")),
        continue_final_message=truthy(document.get("continue_final_message")),
        add_special_tokens=truthy(document.get("add_special_tokens")),
        chat_template=text_or_none(document.get("chat_template")),
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else {},
        mm_processor_kwargs=processor if isinstance(processor := document.get("mm_processor_kwargs"), dict) else {},
        media_io_kwargs=loader if isinstance(loader := document.get("media_io_kwargs"), dict) else {},
    )


def _pairs(document: Mapping[str, Any]) -> TextPrompts | None:
    """Each pair as one text: how a model joins its sides depends on the model, so that its count is an estimate."""
    left, right = _side(document, _LEFT), _side(document, _RIGHT)
    if not left or not right or len(left) not in (1, len(right)):
        return None
    if len(left) == 1:
        left = left * len(right)
    return TextPrompts(tuple(map("\n".join, zip(left, right, strict=True))), approximate=True)


def _side(document: Mapping[str, Any], names: tuple[str, ...]) -> list[str] | None:
    for name in names:
        value = document.get(name)
        if value is not None:
            texts = value if isinstance(value, list) else [value]
            return texts if all(isinstance(text, str) for text in texts) else None
    return None
