"""Tool calls of chats and their results, put right."""

from __future__ import annotations

from typing import Any

import pytest
from api_repairs import RESULT, USER, call, mended, mended_chat

from gateway.api.repairs.repair import repair
from gateway.types import Dialect, ModelFacts


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"id": "a", "function": {"name": "ls", "arguments": "{}"}}, "{}"),
        ({"id": "a", "type": "function", "function": {"name": "ls"}}, "{}"),
        ({"id": "a", "type": "function", "function": {"name": "ls", "arguments": None}}, "{}"),
        ({"id": "a", "type": "function", "function": {"name": "ls", "arguments": {"b": 1}}}, '{"b": 1}'),
        ({"id": "a", "type": "custom", "custom": {"name": "ls", "input": "x"}}, '{"input": "x"}'),
    ],
)
def test_calls_are_completed(given: dict[str, Any], arguments: str) -> None:
    (_, message) = mended_chat([USER, {"role": "assistant", "tool_calls": [given]}], "tool_calls")
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "ls", "arguments": arguments}}
    ]


def test_calls_without_ids_get_different_ones() -> None:
    bare = {"type": "function", "function": {"name": "ls", "arguments": "{}"}}
    messages = mended_chat([USER, {"role": "assistant", "tool_calls": [bare, {**bare, "id": None}]}], "tool_calls")
    assert [one["id"] for one in messages[1]["tool_calls"]] == ["call_0", "call_1"]


def test_broken_arguments_are_taken_away_only_where_vllm_does_not_take_them() -> None:
    document = {"messages": [USER, call('{"path": "a'), RESULT, USER]}
    old = mended(document, "tool_arguments", facts=ModelFacts((0, 30)))
    assert old["messages"][1]["tool_calls"][0]["function"] == {"name": "ls", "arguments": "{}"}
    for version in ((0, 31), None):
        assert repair(document, Dialect.CHAT, ModelFacts(version)) is None
    assert repair({"messages": [USER, call('{"a": NaN}')]}, Dialect.CHAT, ModelFacts((0, 30))) is None


def test_ids_are_nine_letters_and_digits_alike_in_call_and_result() -> None:
    messages = mended_chat([USER, call(), RESULT], "tool_ids", nine_character_ids=True)
    short = messages[1]["tool_calls"][0]["id"]
    assert messages[2]["tool_call_id"] == short
    assert len(short) == 9
    assert short.isalnum()
    longer = mended_chat([USER, call(), RESULT, USER], "tool_ids", nine_character_ids=True)
    assert longer[1] == messages[1]  # the same in every later turn, for the sake of the prefix cache


def test_a_call_without_result_gets_one_but_not_the_last() -> None:
    messages = mended_chat([USER, call(), USER], "missing_results", takes_open_calls=False)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[2]["tool_call_id"] == "call_1"
    assert repair({"messages": [USER, call()]}, Dialect.CHAT, ModelFacts(takes_open_calls=False)) is None


def test_a_result_without_call_is_told_by_the_user() -> None:
    messages = mended_chat([USER, RESULT], "orphan_results", takes_orphan_results=False)
    assert messages[1] == {"role": "user", "content": "Result of a tool:\na.txt"}
    assert repair({"messages": [USER, call(), RESULT]}, Dialect.CHAT, ModelFacts(takes_orphan_results=False)) is None
