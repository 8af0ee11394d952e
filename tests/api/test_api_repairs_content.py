"""What chat messages hold, put right: names, contents of odd types, other APIs' parts and blocks."""

from __future__ import annotations

from typing import Any

import pytest
from api_repairs import USER, mended_chat


def test_a_name_that_is_null() -> None:
    assert mended_chat([{**USER, "name": None}], "null_name") == [USER]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, ""), (5, "5"), ({"a": 1}, '{"a": 1}'), ({"type": "text", "text": "x"}, [{"type": "text", "text": "x"}])],
)
def test_content_of_odd_types(content: Any, expected: Any) -> None:
    assert mended_chat([{"role": "user", "content": content}], "content_type")[0]["content"] == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "input_text", "text": "x"}, [{"type": "text", "text": "x"}]),
        ({"type": "output_text", "text": "x"}, [{"type": "text", "text": "x"}]),
        ({"text": "x"}, [{"type": "text", "text": "x"}]),
        ("x", [{"type": "text", "text": "x"}]),
        ({"type": "text", "text": None}, []),
        ({"type": "redacted_thinking", "data": "x"}, []),
        ({"type": "reasoning", "text": "x"}, []),
        ({"type": "input_image", "image_url": "u"}, [{"type": "image_url", "image_url": {"url": "u"}}]),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}},
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}],
        ),
        (
            {"type": "image", "source": {"type": "url", "url": "http://h/i"}},
            [{"type": "image_url", "image_url": {"url": "http://h/i"}}],
        ),
    ],
)
def test_parts_of_other_apis(part: Any, expected: list[Any]) -> None:
    text = {"type": "text", "text": "y"}
    (message,) = mended_chat([{"role": "user", "content": [part, text]}], "content_parts")
    assert message["content"] == [*expected, text]


def test_anthropics_blocks_on_the_chat_path() -> None:
    said = {"type": "text", "text": "I look."}
    used = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"a": 1}}
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.txt"}]}
    asked = {"type": "text", "text": "Go on."}
    messages = [USER, {"role": "assistant", "content": [said, used]}, {"role": "user", "content": [found, asked]}]
    assert mended_chat(messages, "anthropic_blocks") == [
        USER,
        {
            "role": "assistant",
            "content": [said],
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a.txt"},
        {"role": "user", "content": [asked]},
    ]
