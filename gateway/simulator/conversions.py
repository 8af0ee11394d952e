"""Responses and Anthropic requests as chat requests, the way vLLM 0.32 turns them: for the simulator's routes.

Written from vLLM's sources apart from the gateway's parsers, which it must agree with and therefore does not use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.simulator.errors import ApiError

BILLING = "x-anthropic-billing-header"
Chat = list[dict[str, Any]]


def chat_of_responses(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat request. Raises ``ApiError`` for items that vLLM does not take."""
    messages: Chat = []
    if document.get("instructions"):
        messages.append({"role": "system", "content": document["instructions"]})
    given = document.get("input")
    last: Any = None
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and all(isinstance(item, dict) for item in given):
        rest: Chat = []
        for item in given:
            _append_item(rest, item)
        messages += rest
        last = given[-1] if given else None
    else:
        raise _unsupported("input must be a string or a list of items")
    partial = (
        isinstance(last, dict)
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in ("in_progress", "incomplete")
    )
    effort = (document.get("reasoning") or {}).get("effort")
    kept = ("model", "ignore_eos", "chat_template_kwargs")
    return {
        **{key: document[key] for key in kept if key in document},
        "messages": messages,
        "tools": [shown for tool in document.get("tools") or () for shown in _response_tools(tool)] or None,
        "add_generation_prompt": not partial,
        "continue_final_message": partial,
        **({"reasoning_effort": effort} if effort is not None else {}),
    }


def _unsupported(text: str) -> ApiError:
    return ApiError(text, kind="invalid_request_error", param="input")


def _append_item(messages: Chat, item: Mapping[str, Any]) -> None:
    open_turn = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    kind = item.get("type", "message")
    addition: dict[str, Any]
    if kind in ("function_call", "custom_tool_call"):
        name, arguments = item.get("name"), item.get("arguments")
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        elif item.get("namespace"):
            name = f"{item['namespace']}__{name}"
        call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
        if open_turn is not None:
            open_turn.setdefault("tool_calls", []).append(call)
            return
        addition = {"tool_calls": [call]}
    elif kind == "reasoning":
        if item.get("encrypted_content"):
            raise _unsupported("Encrypted content is not supported.")
        texts = item.get("content") or item.get("summary") or [{"text": ""}]
        addition = {"reasoning": texts[0]["text"]}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        return
    elif kind == "message" and item.get("role") == "assistant":
        content = item.get("content")
        addition = {"content": content if isinstance(content, str) else (content or [{}])[0].get("text")}
    elif kind == "message":
        messages.append({"role": item.get("role", "user"), "content": item.get("content")})
        return
    else:
        raise _unsupported(f"input item of type {kind!r} is not supported")
    (key,) = addition
    if key != "tool_calls" and open_turn is not None and open_turn.get(key) is None:
        open_turn.update(addition)
    else:
        messages.append({"role": "assistant", **addition})


def _response_tools(tool: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = tool.get("type")
    if kind == "namespace":
        inner = [one for one in tool.get("tools") or () if one.get("type") == "function"]
        return [shown for one in inner for shown in _response_tools({**one, "name": f"{tool['name']}__{one['name']}"})]
    if kind == "custom":
        text = {"type": "string", "description": "The freeform text payload for this tool."}
        schema = {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        }
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
        return [{"type": "function", "function": function}]
    if kind != "function":
        return []
    return [{"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}]


def chat_of_messages(document: Mapping[str, Any], *, system_first: bool) -> dict[str, Any]:
    """The fields of a chat request. ``system_first``: the template takes no system message but the first."""
    if not isinstance(document.get("messages"), list):
        raise ApiError("messages must be a list", kind="Bad Request", param="body.messages")
    system = document.get("system")
    texts = [system] if isinstance(system, str) else _texts(system or [])
    turns = [message for message in document["messages"] if message.get("role") == "system"]
    inline = {id(turn): _inline(turn.get("content")) for turn in turns}
    if system_first:
        texts += [text for text in inline.values() if text]
    first = "".join(texts)
    chat: Chat = [{"role": "system", "content": first}] if first else []
    for message in document["messages"]:
        role, content = str(message.get("role")), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ApiError(f"messages: {role!r} is no role", kind="Bad Request", param="body.messages")
        if role == "system":
            if not system_first and inline[id(message)]:
                chat.append({"role": "system", "content": inline[id(message)]})
        elif isinstance(content, str):
            chat.append({"role": role, "content": content})
        else:
            chat.extend(_turn(role, content or [], chat))
    choice = document.get("tool_choice") or {}
    kinds: dict[Any, Any] = {"any": "required"}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    kept = ("model", "ignore_eos", "min_tokens", "chat_template_kwargs")
    effort = (document.get("output_config") or {}).get("effort")
    if (document.get("thinking") or {}).get("type") == "disabled":
        effort = "none"
    return {
        **{key: document[key] for key in kept if key in document},
        "messages": chat,
        "tools": _messages_tools(document),
        "tool_choice": {**kinds, "tool": named}.get(choice.get("type")),
        "stop": document.get("stop_sequences"),
        **({"reasoning_effort": effort} if effort is not None else {}),
    }


def _texts(blocks: list[dict[str, Any]]) -> list[str]:
    found = [str(block.get("text") or "") for block in blocks if block.get("type") == "text"]
    return [text for text in found if not text.startswith(BILLING)]


def _inline(content: Any) -> str:
    if isinstance(content, str):
        return "" if content.startswith(BILLING) else content
    return "".join(_texts(content or []))


def _messages_tools(document: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = {tool.get("name"): tool for tool in document.get("tools") or ()}
    gone: set[Any] = set()
    for message in document["messages"]:
        for block in message.get("content") if isinstance(message.get("content"), list) else ():
            change = block.get("tool") or {}
            name = (change.get("definition") or change).get("name")
            if block.get("type") == "tool_addition":
                tools[name] = change.get("definition") or tools.get(name) or {}
                gone.discard(name)
            elif block.get("type") == "tool_removal":
                gone.add(name)
    shown = [
        {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": {**schema, **({} if "type" in schema else {"type": "object"})},
            **{key: tool[key] for key in ("strict", "defer_loading") if tool.get(key) is not None},
        }
        for name, tool in tools.items()
        if name not in gone
        for schema in [tool.get("input_schema") or {}]
    ]
    return [{"type": "function", "function": function} for function in shown] or None


def _turn(role: str, blocks: list[dict[str, Any]], before: Chat) -> Chat:
    """The message of one turn. Results of tools stand ``before`` it."""
    parts, calls, thoughts = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "tool_result" and role == "user":
            before.extend(_result(block))
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise ApiError(f"content blocks of type {kind!r} are not supported by this model")
    message: dict[str, Any] = {"role": role}
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return [message] if role != "user" or parts else []


def _result(block: Mapping[str, Any]) -> Chat:
    content, called = block.get("content"), block.get("tool_use_id") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    text = "\n".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")
    names = [part.get("tool_name") or part.get("name") for part in parts if part.get("type") == "tool_reference"]
    results: Chat = [{"role": "tool", "tool_call_id": called, "content": text}]
    if names:
        # A template that takes strings is given the names, one a line.
        results.append({"role": "tool", "tool_call_id": called, "content": "\n".join(map(str, names))})
    return results
