"""``POST /tokenize``, both of vLLM's shapes: what is to be tokenised, and what to answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gateway.api.body import model_name, objects_or_none, parse_object, truthy
from gateway.api.chat import has_media, prompt_of
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
    return replace(prompt_of(document, messages), tool_choice=None)  # vLLM's /tokenize does not know it
