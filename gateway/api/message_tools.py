"""Tools of an Anthropic request as the chat tools that vLLM 0.32 shows the model (``entrypoints/anthropic``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.api.convert import NotConvertible


def tools_of(document: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools in effect at the end of the conversation, as chat tools; ``None`` if the request names none.

    System messages may add tools and take them away. Raises ``NotConvertible``.
    """
    given = document.get("tools")
    if not isinstance(given, list | None):
        raise NotConvertible("tools must be a list")
    changes = list(_changes(document["messages"]))
    if not changes:
        return None if given is None else [_chat_tool(tool) for tool in given]
    tools = {_name(tool): tool for tool in given or ()}
    removed: set[str] = set()
    for kind, change in changes:
        if change.get("type") == "tool_definition":
            definition = change.get("definition")
            name = _name(definition)
            tools[name] = definition
        else:
            name = _name(change)
            if name not in tools:
                raise NotConvertible(f"{name} is not among the tools")
            if kind == "tool_addition":
                tools[name] = {**tools[name], "defer_loading": None}
        if kind == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [_chat_tool(tool) for name, tool in tools.items() if name not in removed]


def choice_of(choice: Any, tools: list[dict[str, Any]] | None) -> Any:
    """``tool_choice`` as a chat request has it."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind is None:
        return None if tools is None else "auto"
    return {"any": "required"}.get(kind, kind) if isinstance(kind, str) else None


def _changes(messages: list[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for block in content if isinstance(content, list) else ():
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind in ("tool_addition", "tool_removal"):
                change = block.get("tool")
                if not isinstance(change, Mapping):
                    raise NotConvertible(f"a {kind} needs a tool")
                yield kind, change


def _name(tool: Any) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    if not isinstance(name, str):
        raise NotConvertible("a tool needs a name")
    return name


def _chat_tool(tool: Any) -> dict[str, Any]:
    name = _name(tool)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise NotConvertible("a tool needs an input_schema")
    function = {
        "name": name,
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
