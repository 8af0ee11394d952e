"""Responses requests put right."""

from __future__ import annotations

from typing import Any

import pytest
from api_repairs import SCHEMA, TOOL, call, mended

from gateway.types import Dialect


def response(*names: str, **fields: Any) -> dict[str, Any]:
    return mended({"input": "x", **fields}, *names, dialect=Dialect.RESPONSES)


def test_fields_that_may_not_be_null() -> None:
    nulls = dict.fromkeys(["service_tier", "truncation", "tool_choice", "tools", "background", "priority"])
    assert response("null_fields", **nulls, metadata=None) == {"input": "x", "metadata": None}


def test_tools_of_a_responses_request() -> None:
    grammar = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    assert response("response_tools", tools=[{"type": "x_search"}, TOOL, grammar])["tools"] == [
        {"type": "function", "name": "ls", "description": "List.", "parameters": SCHEMA, "strict": None},
        {"type": "custom", "name": "patch"},
    ]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"type": "web_search_call", "id": "w"}, []),
        ({"type": "item_reference", "id": "x"}, []),
        ({"type": "ghost_snapshot"}, []),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, []),
        ({"type": "message", "role": "assistant", "content": []}, []),
        ({"role": "user", "content": None}, [{"role": "user", "content": ""}]),
        (
            {"type": "reasoning", "summary": [{"text": "y"}], "encrypted_content": "x"},
            [{"type": "reasoning", "summary": [{"text": "y"}]}],
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            [{"type": "function_call", "name": "local_shell", "arguments": '{"command": ["ls"]}', "call_id": "c"}],
        ),
        (
            {"type": "local_shell_call_output", "id": "c", "output": "a"},
            [{"type": "function_call_output", "call_id": "c", "output": "a"}],
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": {"a": 1}},
            [{"type": "function_call_output", "call_id": "c", "output": '{"a": 1}'}],
        ),
        (
            {"role": "tool", "tool_call_id": "c", "content": "a"},
            [{"type": "function_call_output", "call_id": "c", "output": "a"}],
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "x"},
                        {"type": "input_image", "image_url": "u", "detail": "auto"},
                    ],
                }
            ],
        ),
        (
            call(),
            [{"type": "function_call", "name": "ls", "arguments": "{}", "call_id": "call_1"}],
        ),
    ],
)
def test_items_that_vllm_does_not_read(item: dict[str, Any], expected: list[Any]) -> None:
    question = {"type": "message", "role": "user", "content": "x"}
    assert response("input_items", input=[question, item])["input"] == [question, *expected]
