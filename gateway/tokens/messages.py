"""Messages and tools as vLLM hands them to a chat template, from what the client sent.

vLLM 0.32 validates the body with pydantic and then flattens the messages (``renderers/chat_utils.py``); both steps
drop, add, rename and reorder keys, and templates print some of them as JSON, so each step changes token counts. Pure
functions; nothing that is passed in is changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from gateway.tokens.errors import CannotCount
from gateway.tokens.media.parts import KNOWN_PART_KEYS, MEDIA_KEYS, MediaPart, is_media, placeholders_first

ContentFormat = Literal["string", "openai"]
Message = dict[str, Any]

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
MEDIA_PARTS = MEDIA_KEYS

# Claude Code's first system line changes with every request; vLLM ≥ 0.31 drops it for the sake of its prefix cache.
_BILLING_HEADER = "x-anthropic-billing-header"


def has_media(messages: Iterable[Any]) -> bool:
    """Whether any content part is something else than text."""
    return any(
        isinstance(part, Mapping) and (_kind(part) in MEDIA_PARTS or not MEDIA_PARTS.isdisjoint(part))
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def conversation(messages: Sequence[Any], content_format: ContentFormat) -> list[Message]:
    """The messages as a chat template sees them.

    ``content_format``: ``openai`` keeps content as a list of typed parts, ``string`` joins the text parts by newlines.
    Raises ``CannotCount`` for media without stand-ins (``media.prompt``), and for what vLLM refuses too (wrong types,
    unknown parts, no messages).
    """
    if not messages:
        raise CannotCount("there are no messages", refused=True)
    if content_format == "string":
        messages = [message if _is_plain(message) else placeholders_first(message) for message in messages]
    return [_message(message, content_format) for message in messages]


def tools_for_template(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tool definitions as vLLM's models print them: fixed key order, unknown keys dropped, absent ones null.

    ``strict`` and ``defer_loading`` appear only when set; the tool's ``defer_loading`` is copied into its function.
    """
    return None if tools is None else [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CannotCount("a tool has no function with a name", refused=True)
    if tool.get("type", "function") != "function":
        raise CannotCount("only tools of type function exist here", refused=True)
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise CannotCount("a tool's description must be a string and its parameters an object", refused=True)
    printed = {"name": function["name"], "description": description, "parameters": parameters}
    strict, defer = _flag(function.get("strict")), _flag(tool.get("defer_loading"))
    inner_defer = _flag(function.get("defer_loading"))
    if inner_defer is None:
        inner_defer = defer
    if strict is not None:
        printed["strict"] = strict
    if inner_defer is not None:
        printed["defer_loading"] = inner_defer
    outer: dict[str, Any] = {"type": "function", "function": printed}
    if defer is not None:
        outer["defer_loading"] = defer
    return outer


def _flag(value: Any) -> bool | None:
    """A boolean as pydantic reads it leniently."""
    if value is None or isinstance(value, bool):
        return value
    word = value.lower() if isinstance(value, str) else value
    if word in (1, "1", "true", "t", "yes", "y", "on"):
        return True
    if word in (0, "0", "false", "f", "no", "n", "off"):
        return False
    raise CannotCount(f"not a boolean: {value!r}", refused=True)


def _is_plain(message: Any) -> bool:
    """Whether the message is, as almost always, one whose content has no parts."""
    return type(message) is dict and type(message.get("content")) is not list


def _message(message: Any, content_format: ContentFormat) -> Message:
    if type(message) is not dict and not isinstance(message, Mapping):  # the first is quick, and almost always so
        raise CannotCount("a message is not an object", refused=True)
    role = message.get("role")
    if not isinstance(role, str):
        raise CannotCount("a message has no role", refused=True)
    content = message.get("content")
    if type(content) is not str or content.startswith(_BILLING_HEADER):
        content = _content(content, role, content_format)
    elif content_format == "openai":
        content = [{"type": "text", "text": content}]
    rendered: Message = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant_keys(rendered, message)
    elif role == "tool":
        if "tool_call_id" in message:
            rendered["tool_call_id"] = message["tool_call_id"]
        rendered["content"] = _flat_tool_result(rendered["content"])
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            rendered[key] = message[key]
    if role == "developer":
        rendered["tools"] = message.get("tools")
    return rendered


def _content(content: Any, role: str, content_format: ContentFormat) -> str | list[Any]:
    parts = _parts(content)
    if role == "system":
        parts = [kept for part in parts if (kept := _without_billing_header(part)) is not None]
    # Empty parts leave no newline behind when texts are joined (vLLM keeps what is truthy: a string or a whole part).
    read = [shown for part in parts if (shown := _part(part, content_format))]
    return read if content_format == "openai" else "\n".join(read)


def _add_assistant_keys(rendered: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise CannotCount("tool_calls must be a list", refused=True)
        if calls:
            rendered["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise CannotCount("content must be a string or a list of parts", refused=True)


def _part(part: Any, content_format: ContentFormat) -> Any:
    """What becomes of one content part; ``None`` if nothing does."""
    as_parts = content_format == "openai"
    if isinstance(part, str):
        return {"type": "text", "text": part} if as_parts else part
    if not isinstance(part, Mapping):
        raise CannotCount("a content part must be a string or an object", refused=True)
    if isinstance(part, MediaPart):
        return dict(part)
    if is_media(part):
        raise CannotCount("its media are not counted here", media=True)
    kind = _kind(part)
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": part.get("name")} if as_parts else _text(part.get("name"))
    if kind not in TEXT_PARTS:
        raise CannotCount(f"unknown content part {kind!r}", refused=True)
    text = part.get(TEXT_PARTS[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    text = _text(text)
    if not as_parts:
        return text
    return {"type": "text", "text": text} | {key: part[key] for key in part if key not in KNOWN_PART_KEYS}


def _kind(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    return kind if kind is None or isinstance(kind, str) else repr(kind)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CannotCount("the text of a content part must be a string", refused=True)
    return value


def _without_billing_header(part: Any) -> Any:
    """The part less its billing line; ``None`` if nothing is left of it."""
    text = part
    if isinstance(part, Mapping):
        text = part.get("text") if part.get("type") == "text" else None
    if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return {**part, "text": rest} if isinstance(part, Mapping) else rest


def _flat_tool_result(content: Any) -> Any:
    """Tool results of text parts only become one string, since most templates take nothing else there."""
    if not isinstance(content, list) or any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _tool_call(call: Any) -> dict[str, Any]:
    """One past tool call: pydantic's key order (id, function, type, others), arguments as an object."""
    function = call.get("function") if type(call) is dict or isinstance(call, Mapping) else None
    if not (type(function) is dict or isinstance(function, Mapping)) or call.get("type", "function") != "function":
        raise CannotCount("past tool calls must be of type function", refused=True)
    called = _ordered(function, ("arguments", "name"))
    called["arguments"] = _arguments(function.get("arguments"))
    return _ordered({**call, "function": called}, ("id", "function", "type"))


def _ordered(mapping: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    ordered = {key: mapping[key] for key in first if key in mapping}
    if len(ordered) < len(mapping):
        ordered |= {key: mapping[key] for key in mapping if key not in ordered}
    return ordered


def _arguments(value: Any) -> dict[str, Any]:
    """Arguments as an object. What is not a JSON object becomes an empty one, as in vLLM ≥ 0.31."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {}
        except (ValueError, RecursionError) as error:  # digits beyond int's limit; nesting beyond the stack
            raise CannotCount(f"tool call arguments cannot be read: {error}", refused=True) from None
    return value if isinstance(value, dict) else {}
