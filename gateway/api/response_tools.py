"""Tools of a Responses request as the chat tools that vLLM 0.32 shows the model (``tool_parsers/utils.py``).

Functions are shown; those of a namespace under ``<namespace>__<name>``; a custom tool becomes a function of one string.
Hosted tools (web search, file search, MCP and so on) are never rendered by a chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.api.convert import NotConvertible

_SHOWN = ("name", "description", "parameters", "strict", "defer_loading")

# The function that vLLM makes of a custom tool has one argument.
CUSTOM_INPUT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


def flat_name(namespace: str, name: str) -> str:
    """The name under which a function of a namespace is shown."""
    return f"{namespace}__{name}"


def tools_of(given: Any) -> list[dict[str, Any]] | None:
    """Chat tools for the template; empty if only hosted ones were given, ``None`` if none were.

    Raises ``NotConvertible``.
    """
    if given is None:
        return None
    if not isinstance(given, list):
        raise NotConvertible("tools must be a list")
    shown: list[dict[str, Any]] = []
    for tool in given:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise NotConvertible("a tool must be an object with a type")
        if kind == "function":
            shown.append(_function(tool, _name(tool)))
        elif kind == "custom":
            shown.append(_custom(tool))
        elif kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise NotConvertible("a namespace needs a list of tools")
            shown += [
                _function(one, flat_name(_name(tool), _name(one)))
                for one in inner
                if isinstance(one, Mapping) and one.get("type") == "function"
            ]
    return shown if given else None


def _name(tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise NotConvertible("a tool needs a name")
    return name


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = {key: tool[key] for key in _SHOWN if key in tool}
    return {"type": "function", "function": {**function, "name": name}}


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"name": _name(tool), "description": tool.get("description"), "parameters": CUSTOM_PARAMETERS}
    return {"type": "function", "function": described}
