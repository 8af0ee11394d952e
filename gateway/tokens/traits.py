"""What a model's chat template takes, found by rendering small chats as vLLM would.

A template says no by raising, and vLLM answers 400 to that. So each trait is one chat that a client might send, held
against one like it that every template takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.tokens.errors import CannotCount
from gateway.tokens.local import LocalCounter
from gateway.types import ChatPrompt, ModelFacts

Message = dict[str, Any]

_MARK = "kvgate-probe"
_LONG_ID = "call_0123456789abcdef"
_SHORT_ID = "abcdefghi"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
    }
]


def facts_of(
    local: LocalCounter, default_kwargs: Mapping[str, Any], vllm_version: tuple[int, int] | None
) -> ModelFacts:
    """The facts of the model that ``local`` counts. Renders a dozen chats of a few words: a few milliseconds."""

    def text(*messages: Message, tools: list[dict[str, Any]] | None = None) -> str | None:
        try:
            return local.render(ChatPrompt(list(messages), tools), default_kwargs)
        except CannotCount:
            return None

    def takes(*messages: Message, tools: list[dict[str, Any]] | None = None) -> bool:
        return text(*messages, tools=tools) is not None

    if not takes(_user()):
        return ModelFacts(vllm_version)  # it is not rendered here
    calls = takes(_user(), _call(_SHORT_ID), _result(_SHORT_ID), tools=_TOOLS)
    system = takes(_says("system"), _user())
    return ModelFacts(
        vllm_version,
        takes_system=system,
        takes_late_system=not system or takes(_says("system"), _user(), _assistant(), _says("system"), _user()),
        takes_developer=_MARK in (text(_says("developer", _MARK), _user()) or ""),
        takes_repeated_roles=takes(_user(), _user()),
        takes_assistant_first=takes(_assistant(), _user()),
        takes_user_after_tool=not calls or takes(_user(), _call(_SHORT_ID), _result(_SHORT_ID), _user(), tools=_TOOLS),
        takes_no_user=not system or bool(text(_says("system"))),
        takes_open_calls=not calls or takes(_user(), _call(_SHORT_ID), _user(), tools=_TOOLS),
        takes_orphan_results=not calls or takes(_user(), _result(_SHORT_ID), tools=_TOOLS),
        nine_character_ids=calls and not takes(_user(), _call(_LONG_ID), _result(_LONG_ID), tools=_TOOLS),
    )


def _says(role: str, text: str = "Be brief.") -> Message:
    return {"role": role, "content": text}


def _user() -> Message:
    return _says("user", "Hello.")


def _assistant() -> Message:
    return _says("assistant", "Hello.")


def _call(call_id: str) -> Message:
    function = {"name": "look", "arguments": "{}"}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def _result(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": "look", "content": "Nothing."}
