"""Repairs of Anthropic requests: roles, tools and blocks that only Anthropic's own servers know."""

from __future__ import annotations

import json
from typing import Any

from gateway.api.body import integer
from gateway.api.repairs.rule import Document, Message, each_message, text_of, without
from gateway.types import ModelFacts

# Blocks of past answers that Anthropic's servers made; vLLM refuses the whole request for one.
_SERVER_BLOCKS = frozenset({"server_tool_use", "mcp_tool_use", "container_upload", "search_result"})

# vLLM takes `system` inside the messages from some version before this on; which one is not known.
_TAKES_SYSTEM_ROLE = (0, 32)

_LEAST_THINKING_TOKENS = 1024


def leading_roles(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """``developer``, and ``system`` where the vLLM is too old for it, inside the messages (newer Claude Code)."""
    messages = document.get("messages")
    if not isinstance(messages, list):
        return None
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    old = facts.vllm_version is not None and facts.vllm_version < _TAKES_SYSTEM_ROLE
    if "developer" not in roles and not (old and "system" in roles):
        return None
    if not old:
        return each_message(document, lambda m: {**m, "role": "system"} if m.get("role") == "developer" else None)
    leading = [m for m in messages if isinstance(m, dict) and m.get("role") in ("system", "developer")]
    rest = [m for m in messages if not (isinstance(m, dict) and m.get("role") in ("system", "developer"))]
    blocks = [{"type": "text", "text": text_of(message.get("content"))} for message in leading]
    before = document.get("system")
    if isinstance(before, str) and before:
        before = [{"type": "text", "text": before}]
    return {**document, "system": [*(before if isinstance(before, list) else ()), *blocks], "messages": rest}


def server_tools(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Tools without a schema: Anthropic runs them itself (``web_search_20250305``) or trained its models on them.

    A tool in the form of OpenAI's chat gets Anthropic's.
    """
    tools = document.get("tools")
    if not isinstance(tools, list):
        return None
    kept = [own for tool in tools if (own := _own(tool)) is not None]
    if len(kept) == len(tools) and all(new is old for new, old in zip(kept, tools, strict=True)):
        return None
    return {**document, "tools": kept} if kept else without(document, "tools", "tool_choice")


def _own(tool: Any) -> Any:
    if not isinstance(tool, dict) or isinstance(tool.get("input_schema"), dict):
        return tool
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        schema = function.get("parameters")
        own = {"name": function["name"], "input_schema": schema if isinstance(schema, dict) else {"type": "object"}}
        if isinstance(function.get("description"), str):
            own["description"] = function["description"]
        return own
    return None if isinstance(tool.get("type"), str) and tool["type"] != "custom" else tool


def block_forms(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Blocks that vLLM does not know: past server tools go, their results and text documents become text.

    Null content becomes empty, and a call's input given as text the object that it stands for.
    """

    def mend(message: Message) -> Message | None:
        content = message.get("content")
        if content is None and "content" in message:
            return {**message, "content": ""}
        if not isinstance(content, list):
            return None
        blocks = [_block(block) for block in content]
        if all(new is old for new, old in zip(blocks, content, strict=True)):
            return None
        return {**message, "content": [block for block in blocks if block is not None]}

    return each_message(document, mend)


def _block(block: Any) -> Any:
    if not isinstance(block, dict):
        return block
    kind = block.get("type")
    if isinstance(kind, str) and kind in _SERVER_BLOCKS:
        return None
    if kind == "tool_use" and isinstance(block.get("input"), str):
        return {**block, "input": _object(block["input"])}
    if isinstance(kind, str) and kind.endswith("_tool_result"):
        text = _found(block.get("content"))
        return {"type": "text", "text": text} if text else None
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        titled = [part for part in (block.get("title"), source.get("data")) if isinstance(part, str)]
        return {"type": "text", "text": "\n\n".join(titled)}
    return block


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _found(content: Any) -> str:
    """What a server tool found: titles and addresses, or text."""
    if not isinstance(content, list):
        return ""
    lines = []
    for item in content:
        if isinstance(item, dict):
            said = [item[key] for key in ("title", "url", "text") if isinstance(item.get(key), str)]
            lines.append(" ".join(said))
    return "\n".join(line for line in lines if line)


def thinking_budget(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """A thinking budget that is not below the output budget; without room for one the model judges."""
    thinking, most = document.get("thinking"), integer(document.get("max_tokens"))
    budget = integer(thinking.get("budget_tokens")) if isinstance(thinking, dict) else None
    if not isinstance(thinking, dict) or budget is None or most is None or most < 1 or budget < most:
        return None
    if most <= _LEAST_THINKING_TOKENS:
        return {**document, "thinking": {"type": "adaptive"}}
    return {**document, "thinking": {**thinking, "budget_tokens": most - 1}}
