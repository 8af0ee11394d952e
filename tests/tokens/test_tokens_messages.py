"""Messages reach a template as vLLM's pydantic models and its flattening leave them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens.errors import CannotCount
from gateway.tokens.messages import conversation, has_media, tools_for_template

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "arguments", "name", "reasoning"])


def one(message: dict[str, Any], content_format: Any = "string") -> dict[str, Any]:
    (rendered,) = conversation([message], content_format)
    return rendered


def test_unknown_keys_do_not_reach_the_template() -> None:
    assert one({"role": "user", "content": "hi", "cache_control": {}, "id": 3}) == {"role": "user", "content": "hi"}


def test_null_and_absent_content_are_empty() -> None:
    assert one({"role": "assistant", "content": None})["content"] == ""
    assert one({"role": "user"})["content"] == ""
    assert one({"role": "user"}, "openai")["content"] == []


def test_text_parts_are_joined_by_newlines_and_empty_ones_leave_none() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "b", {"type": "text", "text": None}]
    assert one({"role": "user", "content": parts})["content"] == "a\nb"


def test_templates_that_take_parts_get_them_with_their_unknown_keys_only() -> None:
    parts = [{"cache_control": {"type": "x"}, "text": "a", "type": "text"}, {"type": "thinking", "thinking": "t"}, ""]
    assert one({"role": "user", "content": parts}, "openai")["content"] == [
        {"type": "text", "text": "a", "cache_control": {"type": "x"}},
        {"type": "text", "text": "t"},
        {"type": "text", "text": ""},
    ]


def test_tool_results_of_text_become_one_string_even_where_parts_are_taken() -> None:
    result = {
        "role": "tool",
        "tool_call_id": "1",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert one(result, "openai") == {"role": "tool", "content": "a\nb", "tool_call_id": "1"}
    result["content"] = [{"type": "tool_reference", "name": "f"}]
    assert one(result, "openai")["content"] == [{"type": "tool_reference", "name": "f"}]


def test_reasoning_has_both_names_whichever_was_sent() -> None:
    both = {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"}
    assert one({"role": "assistant", "reasoning_content": "r"}) == both
    assert one({"role": "assistant", "reasoning": "r", "reasoning_content": "other"}) == both
    assert "reasoning" not in one({"role": "user", "content": "", "reasoning": "r"})


def test_tool_calls_have_pydantics_key_order_and_their_arguments_are_objects() -> None:
    call = {
        "index": 0,
        "type": "function",
        "function": {"name": "f", "x": 1, "arguments": '{"b": 1, "a": 2}'},
        "id": "1",
    }
    (rendered,) = one({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert json.dumps(rendered) == (
        '{"id": "1", "function": {"arguments": {"b": 1, "a": 2}, "name": "f", "x": 1}, "type": "function", "index": 0}'
    )
    assert call["function"]["arguments"] == '{"b": 1, "a": 2}', "the request itself stays as it is"


@pytest.mark.parametrize("arguments", ["", "not json", "[]", "42", None, '"s"'])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (rendered,) = one({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert rendered["function"]["arguments"] == {}


def test_an_empty_list_of_tool_calls_is_no_list() -> None:
    assert "tool_calls" not in one({"role": "assistant", "content": "a", "tool_calls": []})


def test_claude_codes_changing_header_is_dropped_from_system_messages_only() -> None:
    header = "x-anthropic-billing-header: cch=123;\nYou are helpful."
    assert one({"role": "system", "content": header})["content"] == "You are helpful."
    assert one({"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header"}]})["content"] == ""
    assert one({"role": "user", "content": header})["content"] == header


def test_tools_are_printed_with_fixed_keys() -> None:
    tool = {
        "x": 1,
        "function": {"strict": None, "y": 2, "parameters": {"b": 1, "a": 2}, "name": "f"},
        "type": "function",
    }
    assert json.dumps(tools_for_template([tool])) == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": 2}}}]'
    )


def test_strict_and_defer_loading_appear_when_set_and_the_latter_spreads() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": "true"}, "defer_loading": False}
    assert tools_for_template([tool]) == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": None,
                "parameters": None,
                "strict": True,
                "defer_loading": False,
            },
            "defer_loading": False,
        }
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": 5, "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": ["text"], "text": "x"}]},
        {"role": "user", "content": [{"type": "video_game"}]},
        {"role": "assistant", "tool_calls": {"a": 1}},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": ""}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1" * 5000}}]},
        "not an object",
    ],
)
def test_what_vllm_refuses_is_not_counted_and_no_backend_need_be_asked(message: Any) -> None:
    with pytest.raises(CannotCount) as caught:
        conversation([message], "string")
    assert caught.value.refused
    assert not caught.value.media


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"image_url": "http://host/x.png"},
        {"type": "text", "uuid": "1", "video_url": "u"},
    ],
)
def test_media_are_left_to_those_who_have_the_processor(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]
    assert has_media(messages)
    with pytest.raises(CannotCount) as caught:
        conversation(messages, "openai")
    assert caught.value.media
    assert not caught.value.refused


@given(st.lists(JSON | st.dictionaries(KEYS, JSON | KEYS, max_size=5), min_size=1, max_size=3), st.booleans())
def test_nothing_a_client_sends_raises_anything_else(messages: list[Any], parts: bool) -> None:
    before = repr(messages)
    for read in (lambda: conversation(messages, "openai" if parts else "string"), lambda: tools_for_template(messages)):
        try:
            read()
        except CannotCount as error:
            assert error.reason
    assert repr(messages) == before
    has_media(messages)
