"""``POST /v1/chat/completions``: a body becomes an ``Ask``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.api.body import integer, model_name, objects_or_none, parse_object, positive, text_or_none, truthy
from gateway.api.budget import read_budget, read_usage_wish
from gateway.exceptions import BadRequest
from gateway.types import Ask, ChatPrompt, Dialect

PATH = "/v1/chat/completions"

# max_completion_tokens wins over the deprecated max_tokens in every vLLM version.
BUDGET_FIELDS = ("max_completion_tokens", "max_tokens")

# Types and, where a part names none, keys of content parts that are not text (vLLM entrypoints/chat_utils.py).
_MEDIA = frozenset(
    {
        "image_url",
        "input_image",
        "image",
        "image_pil",
        "image_embeds",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
        "video_embeds",
        "prompt_embeds",
        "file",
    }
)


def parse(body: bytes, content_type: str | None, path: str = PATH) -> Ask:
    """Read a chat request. Raises ``BadRequest`` for what nobody could serve.

    Fields that only vLLM can judge are left to it: it answers better than we could.
    """
    document = parse_object(body, content_type)
    messages = _messages(document)
    stream = truthy(document.get("stream"))
    budget = read_budget(document, BUDGET_FIELDS)
    usage = read_usage_wish(document, stream)
    return Ask(
        dialect=Dialect.CHAT,
        path=path,
        model=model_name(document),
        prompt=None if is_tokenised(document) else prompt_of(document, messages),
        body=body,
        document=document,
        output_tokens=budget.tokens,
        output_field=budget.field,
        n=positive(document.get("n")),
        stream=stream,
        include_usage=usage.at_end,
        truncate_prompt_tokens=truncation(document),
        has_media=any(has_media(message) for message in messages),
        min_output_tokens=positive(document.get("min_tokens"), 0),
        drop_fields=budget.drop_fields,
        continuous_usage=usage.in_every_chunk,
    )


def truncation(document: Mapping[str, Any]) -> int | None:
    """``truncate_prompt_tokens``: at most so many prompt tokens, -1 for all the window allows; else ``None``."""
    number = integer(document.get("truncate_prompt_tokens"))
    return number if number is not None and number >= -1 else None


def _messages(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = document.get("messages")
    if not isinstance(messages, list):
        missing = "is missing: it" if messages is None else "is wrong: it"
        raise BadRequest(f"`messages` {missing} must be an array of message objects.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest(f"`messages[{index}]` must be an object with `role` and `content`.", f"messages[{index}]")
    return messages


def prompt_of(document: Mapping[str, Any], messages: list[dict[str, Any]]) -> ChatPrompt:
    """``messages`` with all fields of a chat request that change how they are rendered."""
    kwargs = document.get("chat_template_kwargs")
    documents = document.get("documents")
    processor_kwargs, io_kwargs = document.get("mm_processor_kwargs"), document.get("media_io_kwargs")
    return ChatPrompt(
        messages=messages,
        tools=objects_or_none(document.get("tools")),
        tool_choice=document.get("tool_choice"),
        add_generation_prompt=truthy(document.get("add_generation_prompt"), otherwise=True),
        continue_final_message=truthy(document.get("continue_final_message")),
        add_special_tokens=truthy(document.get("add_special_tokens")),
        chat_template=text_or_none(document.get("chat_template")),
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else {},
        documents=documents if isinstance(documents, list) else None,
        reasoning_effort=text_or_none(document.get("reasoning_effort")),
        mm_processor_kwargs=processor_kwargs if isinstance(processor_kwargs, dict) else {},
        media_io_kwargs=io_kwargs if isinstance(io_kwargs, dict) else {},
    )


def is_tokenised(document: Mapping[str, Any]) -> bool:
    """Whether ready-made token ids replace the messages, which then say nothing about the length (vLLM ≥ 0.3x)."""
    transfer = document.get("kv_transfer_params")
    return isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None


def has_media(message: Mapping[str, Any]) -> bool:
    """Whether any content part of a chat message is something else than text."""
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and (_text(part.get("type")) in _MEDIA or not _MEDIA.isdisjoint(part))
        for part in content
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
