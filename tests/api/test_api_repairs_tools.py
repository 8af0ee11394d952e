"""Chat requests put right around their messages: other APIs' bodies, options, tools and choices."""

from __future__ import annotations

from typing import Any

import pytest
from api_repairs import KNOWN, SCHEMA, TOOL, USER, mended

from gateway.api.repairs.repair import repair
from gateway.types import Dialect


def test_a_responses_body_on_the_chat_path() -> None:
    document = {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": "List."},
            {"type": "function_call", "name": "ls", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "a"},
        ],
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "ls", "parameters": SCHEMA}],
        "tool_choice": "auto",
        "max_output_tokens": 9,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "stream": True,
    }
    chat = mended(document, "responses_body")
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant", "tool"]
    assert chat["tools"] == [{"type": "function", "function": {"name": "ls", "parameters": SCHEMA}}]
    assert (chat["tool_choice"], chat["max_completion_tokens"], chat["reasoning_effort"]) == ("auto", 9, "low")
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert chat["stream"] is True
    assert not {"input", "instructions", "max_output_tokens", "reasoning", "text"} & chat.keys()


def test_options_of_a_stream_that_is_none() -> None:
    document = {"messages": [USER], "stream_options": {"include_usage": True}, "stream": False}
    assert mended(document, "stream_options") == {"messages": [USER], "stream": False}
    text = {"prompt": "x", "stream_options": {}}
    assert mended(text, "stream_options", dialect=Dialect.COMPLETIONS) == {"prompt": "x"}


def test_an_empty_suffix() -> None:
    assert mended({"prompt": "x", "suffix": ""}, "empty_suffix", dialect=Dialect.COMPLETIONS) == {"prompt": "x"}


@pytest.mark.parametrize(
    "flat",
    [
        {"type": "function", "name": "ls", "description": "List.", "parameters": SCHEMA},
        {"name": "ls", "description": "List.", "input_schema": SCHEMA},
        {"type": "custom", "name": "ls", "description": "List.", "input_schema": SCHEMA},
    ],
)
def test_tools_of_other_apis(flat: dict[str, Any]) -> None:
    assert mended({"messages": [USER], "tools": [flat, TOOL]}, "flat_tools")["tools"] == [TOOL, TOOL]


def test_hosted_tools_are_left_out_and_custom_ones_become_functions() -> None:
    custom = {"type": "custom", "custom": {"name": "patch", "description": "Patch.", "format": {"type": "text"}}}
    tools = mended({"messages": [USER], "tools": [TOOL, {"type": "web_search"}, custom]}, "hosted_tools")["tools"]
    assert tools[0] == TOOL
    assert (tools[1]["function"]["name"], tools[1]["function"]["parameters"]["required"]) == ("patch", ["input"])
    none_left = mended({"messages": [USER], "tools": [{"type": "web_search"}], "tool_choice": "auto"}, "hosted_tools")
    assert none_left == {"messages": [USER]}


def test_an_empty_list_of_tools() -> None:
    assert mended({"messages": [USER], "tools": [], "tool_choice": "auto"}, "empty_tools") == {"messages": [USER]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "ls"}, {"type": "function", "function": {"name": "ls"}}),
        ({"type": "function", "name": "ls"}, {"type": "function", "function": {"name": "ls"}}),
    ],
)
def test_choices_of_other_apis(choice: Any, expected: Any) -> None:
    assert (
        mended({"messages": [USER], "tools": [TOOL], "tool_choice": choice}, "tool_choice")["tool_choice"] == expected
    )


def test_of_allowed_tools_only_those_are_shown() -> None:
    other = {"type": "function", "function": {"name": "rm"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "ls"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    chat = mended({"messages": [USER], "tools": [TOOL, other], "tool_choice": choice}, "tool_choice")
    assert (chat["tools"], chat["tool_choice"]) == ([TOOL], "required")


def test_nothing_to_choose_from() -> None:
    assert mended({"messages": [USER], "tool_choice": "auto"}, "tool_choice") == {"messages": [USER]}
    assert repair({"messages": [USER], "tool_choice": "required"}, Dialect.CHAT, KNOWN) is None  # a real mistake
