"""``POST /v1/messages`` (Anthropic): a body becomes an ``Ask``, its blocks chat messages as vLLM 0.32 makes them.

The order of keys and parts, what is joined by what and what is left out follow ``entrypoints/anthropic/serving.py``,
since each changes the prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from gateway.api.body import model_name, parse_object, text_or_none, truthy
from gateway.api.budget import read_budget
from gateway.api.chat import has_media, is_tokenised
from gateway.api.convert import NotConvertible
from gateway.api.message_tools import choice_of, tools_of
from gateway.exceptions import BadRequest
from gateway.types import Ask, ChatPrompt, Dialect

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"

# Claude Code's first system block changes with every request; vLLM leaves it out for the sake of its prefix cache.
BILLING_HEADER = "x-anthropic-billing-header"

_BLOCKS = frozenset(
    {
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    }
)

Message = dict[str, Any]


def parse(body: bytes, content_type: str | None, path: str = PATH) -> Ask:
    """Read a messages request. Raises ``BadRequest`` for what nobody could serve.

    The prompt is ``None`` where vLLM refuses the request or would be given ready-made token ids.
    """
    document = parse_object(body, content_type)
    if not isinstance(document.get("messages"), list):
        raise BadRequest("`messages` must be an array of message objects.", "messages")
    budget = read_budget(document, ("max_tokens",))
    prompt = prompt_of(document)
    return Ask(
        dialect=Dialect.MESSAGES,
        path=path,
        model=model_name(document),
        prompt=prompt,
        body=body,
        document=document,
        output_tokens=budget.tokens,
        output_field=budget.field,
        stream=truthy(document.get("stream")),
        include_usage=True,
        has_media=prompt is not None and any(map(has_media, prompt.messages)),
        continuous_usage=True,
    )


def prompt_of(document: Mapping[str, Any]) -> ChatPrompt | None:
    """The chat that vLLM renders for the request, or ``None`` if it cannot be known here."""
    if is_tokenised(document):
        return None
    try:
        tools = tools_of(document)
        messages = _messages(document)
        effort = _effort(document)
        choice = choice_of(document.get("tool_choice"), tools)
    except NotConvertible:
        return None
    kwargs = document.get("chat_template_kwargs")
    return ChatPrompt(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else {},
        reasoning_effort=effort,
        from_messages=True,
    )


def _messages(document: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    system = _system_text(document.get("system"), strip_string=False)
    if system:
        messages.append({"role": "system", "content": system})
    for message in document["messages"]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise NotConvertible("a message needs the role user, assistant or system")
        content = message.get("content")
        if not isinstance(content, str | list):
            raise NotConvertible("content must be a string or a list of blocks")
        if role == "system":
            text = _system_text(content, strip_string=True)
            if text:
                messages.append({"role": "system", "content": text})
        elif isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            _take(role, content, messages)
    return messages


def _system_text(content: Any, *, strip_string: bool) -> str:
    """A system prompt's text: that of its blocks, joined by nothing, without billing headers."""
    if content is None:
        return ""
    if isinstance(content, str):
        return "" if strip_string and content.startswith(BILLING_HEADER) else content
    if not isinstance(content, list):
        raise NotConvertible("system must be a string or a list of blocks")
    texts = (_text(block.get("text")) for block in map(_block, content) if block["type"] == "text")
    return "".join(text for text in texts if text and not text.startswith(BILLING_HEADER))


def _take(role: str, blocks: list[Any], messages: list[Message]) -> None:
    """Add a message of blocks; tool results of the user go before it, as messages of their own."""
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block in map(_block, blocks):
        match block["type"]:
            case "text":
                if text := _text(block.get("text")):
                    parts.append({"type": "text", "text": text})
            case "image":
                if block.get("source"):
                    parts.append(_image(block["source"]))
            case "thinking":
                if block.get("thinking") is not None:
                    thoughts.append(_text(block["thinking"]))
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                messages.extend(_results(block))
            case "tool_result":
                parts.append(
                    {"type": "text", "text": f"Tool result: {str(block['content']) if block.get('content') else ''}"}
                )
            case "tool_addition" | "tool_removal":
                raise NotConvertible("tools change in system messages only")
    message: Message = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        message["content"] = parts[0]["text"]
    elif parts:
        message["content"] = parts
    if role != "user" or parts:
        messages.append(message)


def _block(block: Any) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or block.get("type") not in _BLOCKS:
        raise NotConvertible("an unknown kind of block")
    return block


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise NotConvertible("text must be a string")
    return value


def _image(source: Any) -> Message:
    return {"type": "image_url", "image_url": {"url": _url(source)}}


def _url(source: Any) -> str:
    if not isinstance(source, Mapping):
        raise NotConvertible("an image's source must be an object")
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _call(block: Mapping[str, Any]) -> Message:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str | None) or not isinstance(given, dict | None):
        raise NotConvertible("a tool_use needs a name and an object as its input")
    function = {"name": name or "", "arguments": json.dumps(given or {})}
    return {"id": block.get("id") or f"call_{int(time.time())}", "type": "function", "function": function}


def _results(block: Mapping[str, Any]) -> list[Message]:
    """A tool's result: its text, then its images in the user's name, then references to tools."""
    content, called = block.get("content"), block.get("tool_use_id") or ""
    texts, images, references = [], [], []
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, list):
        for item in content:
            if not isinstance(item, Mapping):
                raise NotConvertible("a result's parts must be objects")
            match item.get("type"):
                case "text":
                    texts.append(_text(item.get("text", "")))
                case "image":
                    images.append(_image(item.get("source", {})))
                case "tool_reference" if item.get("tool_name") or item.get("name"):
                    references.append({"type": "tool_reference", "name": item.get("tool_name") or item.get("name")})
    elif content is not None:
        raise NotConvertible("a result must be a string or a list of parts")
    messages: list[Message] = [{"role": "tool", "tool_call_id": called, "content": "\n".join(texts)}]
    if images:
        messages.append({"role": "user", "content": images})
    if references:
        messages.append({"role": "tool", "tool_call_id": called, "content": references})
    return messages


def _effort(document: Mapping[str, Any]) -> str | None:
    """The reasoning effort asked for; ``none`` when thinking is switched off."""
    thinking, config = document.get("thinking"), document.get("output_config")
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        return "none"
    return text_or_none(config.get("effort")) if isinstance(config, Mapping) else None
