"""A chat or Responses request as the messages of the Harmony format, by vLLM 0.32's rules. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tokens.errors import CannotCount
from gateway.tokens.messages import tools_for_template
from gateway.types import ChatPrompt

Tools = list[dict[str, Any]]

# Tools that vLLM runs itself when it was started with a tool server; their descriptions are not known here.
_BUILT_IN = frozenset({"web_search_preview", "code_interpreter", "container"})


@dataclass(frozen=True, slots=True)
class Said:
    """One message. A developer's has its instructions as its only text."""

    role: str
    texts: tuple[str, ...]
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    name: str | None = None


def chat_messages(prompt: ChatPrompt) -> tuple[str | None, Tools, list[Said]]:
    """Instructions, functions and messages of a chat request. Raises ``CannotCount``."""
    if prompt.reasoning_effort == "none":
        raise CannotCount("Harmony knows no reasoning effort none", refused=True)
    messages = [_checked(message) for message in prompt.messages]
    tools = [tool["function"] for tool in tools_for_template(prompt.tools) or ()]
    instructions = None
    if messages and messages[0]["role"] in ("system", "developer"):
        instructions = _flat(messages[0].get("content"))
        messages = messages[1:]
    names = {
        call.get("id"): call.get("function", {}).get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    return instructions, tools, [said for message in messages for said in _chat_message(message, names)]


def without_old_thoughts(said: Sequence[Said]) -> list[Said]:
    """Thoughts before the last final answer are dropped."""
    last = max((place for place, each in enumerate(said) if _is_final(each)), default=-1)
    return [each for place, each in enumerate(said) if place >= last or each.channel != "analysis"]


def response_messages(document: Mapping[str, Any]) -> tuple[str | None, Tools, list[Said]]:
    """Instructions, functions and messages of a Responses request. Raises ``CannotCount``."""
    instructions, given = document.get("instructions"), document.get("input")
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
    if (
        instructions is None
        and not isinstance(given, str)
        and items
        and items[0].get("role") in ("system", "developer")
    ):
        instructions, items = _flat(items[0].get("content")), items[1:]
    names: dict[Any, str] = {}
    said: list[Said] = []
    for item in items:
        each = _item(item, names)
        if each is not None:
            said.append(each)
        if item.get("type") == "function_call":
            names[item.get("call_id")] = item["name"]
    return instructions, _functions(document.get("tools") or ()), said


def _functions(tools: Sequence[Mapping[str, Any]]) -> Tools:
    if any(tool.get("type") in _BUILT_IN or tool.get("type") == "mcp" for tool in tools):
        raise CannotCount("tools that the server runs itself are described by it")
    if any(tool.get("type") != "function" for tool in tools):
        raise CannotCount("Harmony knows functions only", refused=True)
    return [{key: tool.get(key) for key in ("name", "description", "parameters")} for tool in tools]


def _is_final(said: Said) -> bool:
    return said.role == "assistant" and said.channel == "final"


def _checked(message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise CannotCount("a message is no object with a role", refused=True)
    return message


def _flat(content: Any) -> str | None:
    """Text parts joined by nothing; ``None`` where there is no text at all."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    known = [text for text in texts if text is not None]
    return "".join(known) if known else None


def _chat_message(message: Mapping[str, Any], names: Mapping[Any, Any]) -> list[Said]:
    role, content = message["role"], message.get("content")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    thought = [Said("assistant", (reasoning,), "analysis")] if reasoning and role == "assistant" else []
    if role == "assistant" and message.get("tool_calls"):
        text = _flat(content)
        spoken = [Said("assistant", (text,), "commentary")] if text else []
        return [*spoken, *thought, *(_call(call.get("function", {})) for call in message["tool_calls"])]
    if role == "tool":
        name = names.get(message.get("tool_call_id", ""), "")
        return [Said("tool", (_flat(content) or "",), "commentary", "assistant", name=f"functions.{name}")]
    if role in ("system", "developer"):
        instructions = _flat(content)
        return [] if instructions is None else [Said("developer", (instructions,))]
    texts = (
        (content or "",) if not content or isinstance(content, str) else tuple(part.get("text", "") for part in content)
    )
    if role == "assistant":
        return [*thought, Said("assistant", texts, "final")] if texts[0] else thought
    if role != "user":
        raise CannotCount(f"Harmony knows no role {role}", refused=True)
    return [Said(role, texts)]


def _call(function: Mapping[str, Any]) -> Said:
    recipient = f"functions.{function.get('name', '')}"
    return Said("assistant", (function.get("arguments") or "",), "commentary", recipient, "json")


def _item(item: Mapping[str, Any], names: Mapping[Any, str]) -> Said | None:
    """One item of a Responses request; ``None`` for thoughts and instructions without text."""
    kind = item.get("type", "message")
    if kind == "message":
        return _message_item(item)
    if kind == "function_call_output":
        if item.get("call_id") not in names:
            raise CannotCount("a tool result belongs to no call", refused=True)
        name = f"functions.{names[item['call_id']]}"
        return Said("tool", (item["output"],), "commentary", "assistant", name=name)
    if kind == "reasoning":
        parts = item.get("content")
        return Said("assistant", ("\n".join(part["text"] for part in parts),), "analysis") if parts else None
    if kind == "function_call":
        return _call(item)
    raise CannotCount(f"Harmony knows no item of type {kind}", refused=True)


def _message_item(item: Mapping[str, Any]) -> Said | None:
    role, content = item["role"], item["content"]
    if role in ("system", "developer"):
        text = _flat(content)
        return Said("developer", (text,)) if text else None
    return Said(role, _texts(content), "final" if role == "assistant" else None)


def _texts(content: Any) -> tuple[str, ...]:
    return (content,) if isinstance(content, str) else tuple(part.get("text", "") for part in content)
