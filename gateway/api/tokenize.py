"""``POST /tokenize``, both of vLLM's shapes: what is to be tokenised, and what to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.api.body import model_name, objects_or_none, parse_object, text_or_none, truthy
from gateway.api.chat import has_media
from gateway.types import Ask, ChatPrompt, Dialect, TextPrompts

PATH = "/tokenize"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client of ``/tokenize`` asks for. ``ask.prompt`` is ``None`` for a shape that vLLM refuses."""

    ask: Ask
    token_strs: bool


def parse(body: bytes, content_type: str | None, path: str = PATH) -> Wish:
    """Read a tokenize request. Raises ``BadRequest`` for a body that is no JSON object.

    vLLM's ``/tokenize`` does not know ``reasoning_effort`` and ``documents``; here they count as they do in a chat.
    """
    document = parse_object(body, content_type)
    prompt = _prompt(document)
    ask = Ask(
        dialect=Dialect.OTHER,
        path=path,
        model=model_name(document),
        prompt=prompt,
        body=body,
        document=document,
        include_usage=True,
        has_media=isinstance(prompt, ChatPrompt) and any(map(has_media, prompt.messages)),
    )
    return Wish(ask, truthy(document.get("return_token_strs")))


def _prompt(document: dict[str, Any]) -> ChatPrompt | TextPrompts | None:
    text = document.get("prompt")
    if isinstance(text, str):
        return TextPrompts((text,), truthy(document.get("add_special_tokens"), otherwise=True))
    messages = objects_or_none(document.get("messages"))
    if messages is None:
        return None
    kwargs, documents = document.get("chat_template_kwargs"), document.get("documents")
    return ChatPrompt(
        messages=messages,
        tools=objects_or_none(document.get("tools")),
        add_generation_prompt=truthy(document.get("add_generation_prompt"), otherwise=True),
        continue_final_message=truthy(document.get("continue_final_message")),
        add_special_tokens=truthy(document.get("add_special_tokens")),
        chat_template=text_or_none(document.get("chat_template")),
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else {},
        documents=documents if isinstance(documents, list) else None,
        reasoning_effort=text_or_none(document.get("reasoning_effort")),
        mm_processor_kwargs=processor if isinstance(processor := document.get("mm_processor_kwargs"), dict) else {},
        media_io_kwargs=loader if isinstance(loader := document.get("media_io_kwargs"), dict) else {},
    )
