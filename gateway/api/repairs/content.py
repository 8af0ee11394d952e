"""Repairs of what messages of a chat hold: null names, content of odd types, parts and blocks of other APIs."""

from __future__ import annotations

import json
from typing import Any

from gateway.api.repairs.look import BLOCKS, TAKEN_PARTS
from gateway.api.repairs.rule import Document, Message, each_message, text_of, without
from gateway.types import ModelFacts


def null_name(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """``name: null``, the one null key of a message that vLLM refuses."""

    def mend(message: Message) -> Message | None:
        return without(message, "name") if message.get("name", "") is None and message.get("role") != "tool" else None

    return each_message(document, mend)


def content_type(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Content that is null (but of an assistant), a number, or an object, where text or parts must be."""

    def mend(message: Message) -> Message | None:
        content = message.get("content")
        if isinstance(content, str | list) or "content" not in message:
            return None
        if content is None:
            return None if message.get("role") == "assistant" else {**message, "content": ""}
        if isinstance(content, dict) and isinstance(content.get("type"), str):
            return {**message, "content": [content]}
        return {**message, "content": json.dumps(content, ensure_ascii=False)}

    return each_message(document, mend)


def content_parts(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Parts as the Responses API or Anthropic's name them; those without text, or that no chat model reads, go."""

    def mend(message: Message) -> Message | None:
        content = message.get("content")
        if not isinstance(content, list):
            return None
        parts = [_part(part) for part in content]
        if all(new is old for new, old in zip(parts, content, strict=True)):
            return None
        return {**message, "content": [part for part in parts if part is not None]}

    return each_message(document, mend)


def _part(part: Any) -> Any:
    """The part as vLLM takes it, ``None`` to leave it out, or itself if it is not known here."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        return part
    kind, text = part.get("type"), part.get("text")
    if kind == "text":
        return part if isinstance(text, str) else None
    if kind in TAKEN_PARTS or kind in BLOCKS:
        return part
    if kind in ("input_text", "output_text") or (kind is None and isinstance(text, str)):
        return {**part, "type": "text"} if isinstance(text, str) else None
    if kind in ("reasoning", "redacted_thinking"):
        return None
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "image":
        return _image(part)
    return part


def _image(part: dict[str, Any]) -> Any:
    """Anthropic's image block as OpenAI's part."""
    source = part.get("source")
    if not isinstance(source, dict):
        return part
    url = source.get("url")
    if isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type', 'image/png')};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}} if isinstance(url, str) else part


def anthropic_blocks(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """``tool_use`` and ``tool_result`` blocks on the chat path become tool calls and messages of the role ``tool``."""
    messages = document.get("messages")
    if not isinstance(messages, list):
        return None
    mended: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in BLOCKS for part in content):
            mended += _unblocked(message, content)
        else:
            mended.append(message)
    return {**document, "messages": mended} if mended != messages else None


def _unblocked(message: Message, content: list[Any]) -> list[Message]:
    calls = [_call(part) for part in content if isinstance(part, dict) and part.get("type") == "tool_use"]
    results = [_result(part) for part in content if isinstance(part, dict) and part.get("type") == "tool_result"]
    rest = [part for part in content if not (isinstance(part, dict) and part.get("type") in BLOCKS)]
    spoken = {**message, "content": rest or None}
    if calls:
        before = message.get("tool_calls")
        spoken["tool_calls"] = [*(before if isinstance(before, list) else ()), *calls]
    # Results stand before what the user says beside them, as they answer the message before.
    return [*results, spoken] if rest or calls else list(results)


def _call(part: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(part.get("input") or {}, ensure_ascii=False)
    function = {"name": part.get("name"), "arguments": arguments}
    return {"id": part.get("id"), "type": "function", "function": function}


def _result(part: dict[str, Any]) -> Message:
    content = part.get("content")
    if isinstance(content, list) and all(isinstance(item, dict) and item.get("type") == "text" for item in content):
        content = text_of(content)
    return {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": content or ""}
