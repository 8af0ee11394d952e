"""Repairs of tool lists and tool choices on the chat path: the forms of other APIs, and tools that only they run."""

from __future__ import annotations

from typing import Any

from gateway.api.repairs.rule import Document, without
from gateway.types import ModelFacts

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input, as free text."}},
    "required": ["input"],
}


def _tools(document: Document) -> list[Any]:
    tools = document.get("tools")
    return tools if isinstance(tools, list) else []


def flat_tools(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Tools in the form of the Responses API (``name`` beside ``type``) or of Anthropic's (``input_schema``)."""
    tools = _tools(document)
    nested = [_nested(tool) for tool in tools]
    return (
        {**document, "tools": nested} if any(new is not old for new, old in zip(nested, tools, strict=True)) else None
    )


def _nested(tool: Any) -> Any:
    if not isinstance(tool, dict) or isinstance(tool.get("function"), dict) or not isinstance(tool.get("name"), str):
        return tool
    kind = tool.get("type")
    if isinstance(tool.get("input_schema"), dict) and kind in (None, "custom"):
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
    elif kind in (None, "function"):
        function = {key: tool[key] for key in ("name", "parameters", "strict") if key in tool}
    elif kind == "custom":
        function = {"name": tool["name"], "parameters": _CUSTOM_PARAMETERS}
    else:
        return tool
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def hosted_tools(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Tools that OpenAI or Anthropic would run themselves are left out; custom tools become functions of one text."""
    tools = _tools(document)
    kept = [_own(tool) for tool in tools if not _is_hosted(tool)]
    if len(kept) == len(tools) and all(new is old for new, old in zip(kept, tools, strict=True)):
        return None
    return {**document, "tools": kept} if kept else without(document, "tools", "tool_choice")


def _is_hosted(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and isinstance(tool.get("type"), str)
        and tool["type"] not in ("function", "custom")
        and not isinstance(tool.get("function"), dict)
    )


def _own(tool: Any) -> Any:
    custom = tool.get("custom") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
        return tool
    function = {"name": custom["name"], "parameters": _CUSTOM_PARAMETERS}
    if isinstance(custom.get("description"), str):
        function["description"] = custom["description"]
    return {"type": "function", "function": function}


def empty_tools(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """An empty list of tools, which vLLM refuses, with or without a choice."""
    return without(document, "tools", "tool_choice") if document.get("tools") == [] else None


def tool_choice(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """A choice in the form of another API, or ``auto`` where there is nothing to choose from."""
    choice = document.get("tool_choice")
    if choice is None or choice in ("none", "required"):
        return None
    if not _tools(document):
        return without(document, "tool_choice") if choice == "auto" else None
    if not isinstance(choice, dict) or isinstance(choice.get("function"), dict):
        return None
    kind, name = choice.get("type"), choice.get("name")
    if kind in ("function", "tool", "custom") and isinstance(name, str):
        return {**document, "tool_choice": {"type": "function", "function": {"name": name}}}
    plain = {"auto": "auto", "any": "required", "none": "none"}.get(kind) if isinstance(kind, str) else None
    if plain is not None:
        return {**document, "tool_choice": plain}
    return _allowed(document, choice) if kind == "allowed_tools" else None


def _allowed(document: Document, choice: dict[str, Any]) -> dict[str, Any] | None:
    """OpenAI's ``allowed_tools``: vLLM cannot hold a model back from some of its tools, so it is shown no others."""
    allowed = choice.get("allowed_tools", choice)
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        return None
    named = [_name(tool) for tool in allowed["tools"]]
    kept = [tool for tool in _tools(document) if _name(tool) is not None and _name(tool) in named]
    if not kept:
        return None
    mode = "required" if allowed.get("mode") == "required" else "auto"
    return {**document, "tools": kept, "tool_choice": mode}


def _name(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return None
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")
