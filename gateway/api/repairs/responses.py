"""Repairs of Responses requests: nulls, tools and items that vLLM refuses the whole request for."""

from __future__ import annotations

import json
from typing import Any

from gateway.api.repairs.rule import Document, text_of, without
from gateway.types import ModelFacts

# Fields whose null vLLM 0.32 does not take; of most others it does.
_NOT_NULL = ("service_tier", "truncation", "tool_choice", "tools", "background", "priority")

# Types of tools that vLLM 0.32 reads (it shows the model functions, namespaces and custom tools, and ignores the rest).
_TOOL_TYPES = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "function",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)

# Types of items that it reads.
_ITEM_TYPES = frozenset(
    {
        "custom_tool_call",
        "custom_tool_call_output",
        "function_call",
        "function_call_output",
        "message",
        "reasoning",
    }
)

# Their calls and outputs say something to a model that knows the tool as a function.
_CALLS = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}
_OUTPUTS = frozenset({"local_shell_call_output", "shell_call_output", "apply_patch_call_output"})


def null_fields(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Fields that are null where vLLM wants them absent."""
    nulls = [name for name in _NOT_NULL if name in document and document[name] is None]
    return without(document, *nulls) if nulls else None


def response_tools(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Tools of unknown types go, functions in the form of the chat API get flat, and grammars of custom tools go."""
    tools = document.get("tools")
    if not isinstance(tools, list):
        return None
    kept = [own for tool in tools if (own := _tool(tool)) is not None]
    if len(kept) == len(tools) and all(new is old for new, old in zip(kept, tools, strict=True)):
        return None
    return {**document, "tools": kept} if kept else without(document, "tools", "tool_choice")


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    kind, function, shape = tool.get("type"), tool.get("function"), tool.get("format")
    if kind in (None, "function") and isinstance(function, dict):
        return {"type": "function", "parameters": None, "strict": None, **function}
    if kind == "custom" and isinstance(shape, dict) and shape.get("type") == "grammar":
        return without(tool, "format")
    return tool if not isinstance(kind, str) or kind in _TOOL_TYPES else None


def input_items(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Items that vLLM does not read go; shells' calls become calls of functions, and chat messages items."""
    given = document.get("input")
    if not isinstance(given, list):
        return None
    kept: list[Any] = []
    changed = False
    for item in given:
        items = _items(item)
        changed = changed or len(items) != 1 or items[0] is not item
        kept += items
    return {**document, "input": kept} if changed else None


def _items(item: Any) -> list[Any]:
    if not isinstance(item, dict):
        return [item]
    kind, role = item.get("type", "message"), item.get("role")
    if not isinstance(kind, str):
        return [item]
    if kind in _CALLS:
        arguments = json.dumps(item.get(_CALLS[kind]), ensure_ascii=False)
        name = kind.removesuffix("_call")
        return [{"type": "function_call", "name": name, "arguments": arguments, "call_id": _call_id(item)}]
    if kind in _OUTPUTS:
        return [{"type": "function_call_output", "call_id": _call_id(item), "output": _text(item.get("output"))}]
    if kind not in _ITEM_TYPES:
        return []
    if role == "tool":
        output = text_of(item.get("content"))
        return [{"type": "function_call_output", "call_id": item.get("tool_call_id"), "output": output}]
    if kind == "reasoning":
        return _reasoning(item)
    if kind == "message":
        return _message(item)
    for key in ("arguments", "output", "input"):
        if key in item and not isinstance(item[key], str | list):
            return [{**item, key: _text(item[key])}]
    return [item]


def _call_id(item: dict[str, Any]) -> Any:
    return item.get("call_id") or item.get("id")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _reasoning(item: dict[str, Any]) -> list[Any]:
    """Encrypted reasoning of another provider can be read by nobody; what stands beside it can."""
    if not item.get("encrypted_content"):
        return [item]
    return [without(item, "encrypted_content")] if item.get("content") or item.get("summary") else []


def _message(item: dict[str, Any]) -> list[Any]:
    content, calls = item.get("content"), item.get("tool_calls")
    said: list[Any] = []
    if isinstance(content, list):
        parts = [_part(part, item.get("role")) for part in content]
        same = all(new is old for new, old in zip(parts, content, strict=True))
        if parts or item.get("role") != "assistant":  # vLLM fails on an assistant's message of no parts
            said = [item if same and "tool_calls" not in item else {**without(item, "tool_calls"), "content": parts}]
    elif isinstance(content, str):
        said = [item if "tool_calls" not in item else without(item, "tool_calls")]
    elif not calls:
        said = [{**item, "content": ""}]
    return said + [call for one in calls if (call := _call(one))] if isinstance(calls, list) else said


def _part(part: Any, role: Any) -> Any:
    """A part as the chat API names it, in the words of this one."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "output_text" if role == "assistant" else "input_text", "text": part["text"]}
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, dict):
        return {"type": "input_image", "image_url": image.get("url"), "detail": image.get("detail") or "auto"}
    return part


def _call(call: Any) -> dict[str, Any] | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    arguments = _text(function.get("arguments")) or "{}"
    return {"type": "function_call", "name": function.get("name"), "arguments": arguments, "call_id": call.get("id")}
