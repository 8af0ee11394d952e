"""``POST /v1/responses``: a body becomes an ``Ask``, its items chat messages as vLLM 0.32 makes them.

vLLM renders chats from the items (``entrypoints/openai/responses/utils.py``), with rules of its own: of an assistant's
message only the first part counts, calls and thoughts join the assistant's message before them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.api.body import model_name, parse_object, text_or_none, truthy
from gateway.api.budget import read_budget
from gateway.api.chat import has_media, is_tokenised
from gateway.api.convert import NotConvertible
from gateway.api.response_tools import CUSTOM_INPUT, flat_name, tools_of
from gateway.exceptions import BadRequest
from gateway.types import Ask, ChatPrompt, Dialect

PATH = "/v1/responses"

Message = dict[str, Any]


def parse(body: bytes, content_type: str | None, path: str = PATH) -> Ask:
    """Read a Responses request. Raises ``BadRequest`` for what is no JSON object or has no input.

    The prompt is ``None`` when it cannot be known here: history that a backend stored, ready-made token ids, items that
    vLLM refuses.
    """
    document = parse_object(body, content_type)
    if document.get("input") is None and document.get("previous_input_messages") is None:
        raise BadRequest("`input` is missing: it must be a string or an array of items.", "input")
    budget = read_budget(document, ("max_output_tokens",))
    prompt = prompt_of(document)
    return Ask(
        dialect=Dialect.RESPONSES,
        path=path,
        model=model_name(document),
        prompt=prompt,
        body=body,
        document=document,
        output_tokens=budget.tokens,
        output_field=budget.field,
        stream=truthy(document.get("stream")),
        include_usage=True,
        truncate_prompt_tokens=-1 if is_cut(document) else None,
        has_media=prompt is not None and any(map(has_media, prompt.messages)),
        drop_fields=budget.drop_fields,
        continuous_usage=True,
    )


def is_cut(document: Mapping[str, Any]) -> bool:
    """Whether vLLM cuts the prompt to the window: anything but ``disabled`` does, null too."""
    return "truncation" in document and document["truncation"] != "disabled"


def prompt_of(document: Mapping[str, Any]) -> ChatPrompt | None:
    """The chat that vLLM renders for the request, or ``None`` if it cannot be known here."""
    if any(document.get(name) is not None for name in ("previous_response_id", "prompt", "previous_input_messages")):
        return None
    if is_tokenised(document):
        return None
    try:
        messages, tools = _messages(document), tools_of(document.get("tools"))
    except NotConvertible:
        return None
    reasoning = document.get("reasoning")
    kwargs = document.get("chat_template_kwargs")
    continued = _is_open(document.get("input"))
    return ChatPrompt(
        messages=messages,
        tools=tools,
        tool_choice=document.get("tool_choice", "auto") if tools else "none",
        add_generation_prompt=not continued,
        continue_final_message=continued,
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else {},
        reasoning_effort=text_or_none(reasoning.get("effort")) if isinstance(reasoning, dict) else None,
        responses=document,
        mm_processor_kwargs=processor if isinstance(processor := document.get("mm_processor_kwargs"), dict) else {},
        media_io_kwargs=loader if isinstance(loader := document.get("media_io_kwargs"), dict) else {},
    )


def _messages(document: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    instructions, given = document.get("instructions"), document.get("input")
    if not isinstance(instructions, str | None):
        raise NotConvertible("instructions must be a string")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise NotConvertible("input must be a string or a list")
    converted: list[Message] = []
    for item in given:
        _take(item, converted)
    return messages + converted


def _take(item: Any, messages: list[Message]) -> None:
    """Add what ``item`` says to ``messages``: a message of its own, or more of the assistant's before it."""
    if not isinstance(item, Mapping):
        raise NotConvertible("an item must be an object")
    kind, role = item.get("type", "message"), item.get("role")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _function_call(item) if kind == "function_call" else _custom_call(item)
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        elif last.get("tool_calls") is None:
            last["tool_calls"] = [call]
        else:
            last["tool_calls"].append(call)
    elif kind == "reasoning":
        _say(messages, last, "reasoning", _thoughts(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind != "message" or not isinstance(role, str):
        raise NotConvertible(f"items of type {kind!r} are not rendered")
    elif role == "assistant":
        _take_answer(item, messages, last)
    else:
        messages.append(dict(item))


def _say(messages: list[Message], last: Message | None, key: str, text: str) -> None:
    if last is not None and last.get(key) is None:
        last[key] = text
    else:
        messages.append({"role": "assistant", key: text})


def _take_answer(item: Mapping[str, Any], messages: list[Message], last: Message | None) -> None:
    """An assistant's message: only the first of its parts is rendered."""
    content = item.get("content")
    if isinstance(content, list) and content:
        first = content[0]
        content = first.get("text") if isinstance(first, Mapping) else None
    if not isinstance(content, str):  # no content, or a refusal: vLLM fails
        raise NotConvertible("an assistant's message begins with no text")
    _say(messages, last, "content", content)


def _thoughts(item: Mapping[str, Any]) -> str:
    """The first part of the reasoning's content, else of its summary."""
    if item.get("encrypted_content"):
        raise NotConvertible("encrypted reasoning cannot be rendered")
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            text = parts[0].get("text") if isinstance(parts[0], Mapping) else None
            if not isinstance(text, str):
                raise NotConvertible("reasoning without text")
            return text
    return ""


def _function_call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise NotConvertible("a function call needs a name and its arguments as a string")
    namespace = item.get("namespace")
    return _call(item, flat_name(namespace, name) if isinstance(namespace, str) and namespace else name, arguments)


def _custom_call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, given = item.get("name"), item.get("input") or ""
    if not isinstance(name, str) or not isinstance(given, str):
        raise NotConvertible("a call of a custom tool needs a name and its input as a string")
    return _call(item, name, json.dumps({CUSTOM_INPUT: given}, ensure_ascii=False))


def _call(item: Mapping[str, Any], name: str, arguments: str) -> dict[str, Any]:
    # vLLM builds the function before its name is printed, so the keys stand in this order.
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}, "type": "function"}


def _is_open(given: Any) -> bool:
    """Whether the last item is an answer or a thought to be continued."""
    if not isinstance(given, list) or not given or not isinstance(given[-1], Mapping):
        return False
    last = given[-1]
    return last.get("type", "message") in ("message", "reasoning") and last.get("status") in (
        "in_progress",
        "incomplete",
    )
