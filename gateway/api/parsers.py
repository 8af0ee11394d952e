"""Which parser reads a request: one for each path whose prompt can be counted, the generic one for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.api import chat, completions, generic, messages, pooling, responses
from gateway.types import Ask

Parse = Callable[[bytes, str | None, str], Ask]

COUNTED: dict[str, Parse] = {
    chat.PATH: chat.parse,
    completions.PATH: completions.parse,
    responses.PATH: responses.parse,
    messages.PATH: messages.parse,
    **dict.fromkeys(pooling.PATHS, pooling.parse),
}


def parser_of(method: str, path: str) -> Parse:
    """The parser of requests to a normalised ``path``."""
    return COUNTED.get(path, generic.parse) if method == "POST" else generic.parse


def guessed_path(document: Mapping[str, Any]) -> str | None:
    """The path that a body of this shape is most likely meant for; ``None`` if it has no prompt.

    Anthropic's requests are told by ``system``, tools with an ``input_schema`` and their blocks; else messages are a
    chat.
    """
    if "messages" in document:
        return messages.PATH if _is_anthropic(document) else chat.PATH
    if "prompt" in document:
        return completions.PATH
    return responses.PATH if "input" in document else None


def _is_anthropic(document: Mapping[str, Any]) -> bool:
    if "system" in document or any("input_schema" in tool for tool in _objects(document.get("tools"))):
        return True
    blocks = (block for message in _objects(document["messages"]) for block in _objects(message.get("content")))
    return any(block.get("type") in ("tool_use", "tool_result", "thinking") for block in blocks)


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
