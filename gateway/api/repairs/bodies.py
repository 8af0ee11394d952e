"""Repairs of what stands beside the messages of a chat: other APIs' bodies on the chat path, options out of place."""

from __future__ import annotations

from typing import Any

from gateway.api.body import truthy
from gateway.api.convert import NotConvertible
from gateway.api.repairs.rule import Document, without
from gateway.api.responses import prompt_of
from gateway.types import ModelFacts

# Fields of a Responses request that the chat path knows by another name, or not at all.
_RESPONSES_ONLY = (
    "input",
    "instructions",
    "max_output_tokens",
    "text",
    "reasoning",
    "tools",
    "tool_choice",
    "truncation",
    "include",
    "previous_response_id",
    "background",
)


def responses_body(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """``input`` and flat tools on the chat path (Cursor) become messages and chat tools."""
    if document.get("messages") is not None or document.get("input") is None:
        return None
    try:
        prompt = prompt_of(document)
    except NotConvertible:
        prompt = None
    if prompt is None:
        return None
    chat = without(document, "messages", *_RESPONSES_ONLY) | {"messages": prompt.messages}
    if prompt.tools:
        chat["tools"] = prompt.tools
        if document.get("tool_choice") is not None:
            chat["tool_choice"] = document["tool_choice"]
    if document.get("max_output_tokens") is not None:
        chat.setdefault("max_completion_tokens", document["max_output_tokens"])
    if prompt.reasoning_effort is not None:
        chat.setdefault("reasoning_effort", prompt.reasoning_effort)
    shape = _response_format(document.get("text"))
    if shape is not None:
        chat.setdefault("response_format", shape)
    return chat


def _response_format(text: Any) -> dict[str, Any] | None:
    """``text.format`` as the chat path's ``response_format``."""
    shape = text.get("format") if isinstance(text, dict) else None
    if not isinstance(shape, dict):
        return None
    if shape.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": without(shape, "type")}
    return {"type": "json_object"} if shape.get("type") == "json_object" else None


def stream_options(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Options of a stream where none is asked for."""
    if document.get("stream_options") is None or truthy(document.get("stream")):
        return None
    return without(document, "stream_options")


def empty_suffix(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """An empty ``suffix``, which no model that cannot fill in the middle is given."""
    return without(document, "suffix") if document.get("suffix") == "" else None
