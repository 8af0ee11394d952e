"""Repairs of past tool calls in a chat: incomplete or foreign forms, broken arguments, ids a template does not take."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable
from typing import Any

import orjson

from gateway.api.repairs.rule import Document, Message, each_message
from gateway.types import ModelFacts

_ALPHANUMERIC = frozenset(string.ascii_letters + string.digits)
_DIGITS = string.digits + string.ascii_letters
_ID_CHARS = 9

# From this on vLLM itself takes broken arguments for none (renderers/chat_utils.py).
_TAKES_BROKEN_ARGUMENTS = (0, 31)


def _each_call(document: Document, mend: Callable[[dict[str, Any], int], dict[str, Any]]) -> dict[str, Any] | None:
    number = 0

    def mend_message(message: Message) -> Message | None:
        nonlocal number
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return None
        mended = []
        for call in calls:
            mended.append(mend(call, number) if isinstance(call, dict) else call)
            number += 1
        if all(new is old for new, old in zip(mended, calls, strict=True)):
            return None
        return {**message, "tool_calls": mended}

    return each_message(document, mend_message)


def tool_calls(document: Document, _: ModelFacts) -> dict[str, Any] | None:
    """Calls without a type, an id or arguments, with arguments as an object, or of a custom tool."""
    return _each_call(document, _complete)


def _complete(call: dict[str, Any], number: int) -> dict[str, Any]:
    function, custom = call.get("function"), call.get("custom")
    if isinstance(custom, dict) and not isinstance(function, dict):
        given = json.dumps({"input": custom.get("input") or ""}, ensure_ascii=False)
        function = {"name": custom.get("name"), "arguments": given}
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function = {**function, "arguments": "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)}
    given_id = call.get("id")
    named = given_id if isinstance(given_id, str) else f"call_{number}"
    if call.get("function") is function and call.get("type") == "function" and named is given_id:
        return call
    others = {key: value for key, value in call.items() if key not in ("id", "type", "function", "custom")}
    return {"id": named, "type": "function", "function": function, **others}


def tool_arguments(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """Arguments that are no JSON (an answer cut in the middle of a call), where vLLM refuses them for ever after."""
    if facts.vllm_version is None or facts.vllm_version >= _TAKES_BROKEN_ARGUMENTS:
        return None

    def mend(call: dict[str, Any], _: int) -> dict[str, Any]:
        function = call.get("function")
        if not isinstance(function, dict) or _is_object(function.get("arguments")):
            return call
        return {**call, "function": {**function, "arguments": "{}"}}

    return _each_call(document, mend)


def _is_object(arguments: Any) -> bool:
    if not isinstance(arguments, str) or not arguments:
        return True  # vLLM reads none as an empty object
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        try:
            return isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            return False


def tool_ids(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """Ids of calls and of their results as nine letters and digits, for templates that refuse all others (Mistral)."""
    if not facts.nine_character_ids:
        return None

    def mend_call(call: dict[str, Any], _: int) -> dict[str, Any]:
        given = call.get("id")
        return call if not isinstance(given, str) or _is_short(given) else {**call, "id": short_id(given)}

    def mend_result(message: Message) -> Message | None:
        given = message.get("tool_call_id")
        if message.get("role") != "tool" or not isinstance(given, str) or _is_short(given):
            return None
        return {**message, "tool_call_id": short_id(given)}

    mended = _each_call(document, mend_call)
    again = each_message(document if mended is None else mended, mend_result)
    return mended if again is None else again


def short_id(given: str) -> str:
    """Nine letters and digits that follow from ``given`` alone, so a call and its result keep the same."""
    number = int.from_bytes(hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    letters = []
    for _ in range(_ID_CHARS):
        number, digit = divmod(number, len(_DIGITS))
        letters.append(_DIGITS[digit])
    return "".join(letters)


def _is_short(given: str) -> bool:
    return len(given) == _ID_CHARS and _ALPHANUMERIC.issuperset(given)


def missing_results(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """A result for every call that has none, where the template refuses a call without (an aborted turn)."""
    if facts.takes_open_calls:
        return None
    messages = document.get("messages")
    if not isinstance(messages, list):
        return None
    mended: list[Any] = []
    for index, message in enumerate(messages):
        mended.append(message)
        following = _results_after(messages, index)
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(calls, list) or index + 1 + len(following) >= len(messages):
            continue  # calls at the very end are being made
        answered = [result.get("tool_call_id") for result in following]
        open_ids = [call.get("id") for call in calls if isinstance(call, dict) and call.get("id") not in answered]
        mended += [{"role": "tool", "tool_call_id": one, "content": "(no result: it was aborted)"} for one in open_ids]
    return {**document, "messages": mended} if len(mended) != len(messages) else None


def _results_after(messages: list[Any], index: int) -> list[dict[str, Any]]:
    results = []
    for message in messages[index + 1 :]:
        if not isinstance(message, dict) or message.get("role") != "tool":
            break
        results.append(message)
    return results
