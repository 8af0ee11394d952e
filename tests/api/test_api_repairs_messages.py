"""Requests of Anthropic's dialect put right."""

from __future__ import annotations

from typing import Any

from api_repairs import KNOWN, SCHEMA, SYSTEM, TOOL, USER, mended

from gateway.types import Dialect, ModelFacts


def anthropic(*names: str, facts: ModelFacts = KNOWN, **fields: Any) -> dict[str, Any]:
    return mended({"max_tokens": 50, "messages": [USER], **fields}, *names, dialect=Dialect.MESSAGES, facts=facts)


def test_developer_in_anthropics_messages() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert anthropic("leading_roles", messages=[developer, USER])["messages"] == [SYSTEM, USER]


def test_system_in_anthropics_messages_of_an_old_vllm() -> None:
    old = anthropic("leading_roles", messages=[USER, SYSTEM], system="First.", facts=ModelFacts((0, 20)))
    assert old["messages"] == [USER]
    assert old["system"] == [{"type": "text", "text": "First."}, {"type": "text", "text": "Be brief."}]


def test_tools_that_anthropic_runs_itself() -> None:
    own = {"name": "ls", "input_schema": SCHEMA, "description": "List."}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert anthropic("server_tools", tools=[search, own, TOOL])["tools"] == [own, own]
    assert "tools" not in anthropic("server_tools", tools=[search], tool_choice={"type": "auto"})


def test_blocks_that_only_anthropic_knows() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "content": [{"title": "T", "url": "http://h"}]},
        {"type": "document", "title": "D", "source": {"type": "text", "data": "text"}},
        {"type": "tool_use", "id": "t", "name": "ls", "input": '{"a": 1}'},
    ]
    (message,) = anthropic("block_forms", messages=[{"role": "assistant", "content": blocks}])["messages"]
    assert message["content"] == [
        {"type": "text", "text": "T http://h"},
        {"type": "text", "text": "D\n\ntext"},
        {"type": "tool_use", "id": "t", "name": "ls", "input": {"a": 1}},
    ]
    empty = anthropic("block_forms", messages=[USER, {"role": "assistant", "content": None}])
    assert empty["messages"][1]["content"] == ""


def test_a_thinking_budget_stays_below_the_output_budget() -> None:
    thinking = {"type": "enabled", "budget_tokens": 31_999}
    assert anthropic("thinking_budget", thinking=thinking, max_tokens=8000)["thinking"]["budget_tokens"] == 7999
    assert anthropic("thinking_budget", thinking=thinking, max_tokens=1000)["thinking"] == {"type": "adaptive"}
