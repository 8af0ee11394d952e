"""What the parsers of the Responses, Messages, pooling and tokenize dialects understand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api import messages, pooling, responses, tokenize
from gateway.api.parsers import COUNTED, guessed_path, parser_of
from gateway.api.rewrite import upstream_body
from gateway.exceptions import BadRequest
from gateway.types import Ask, ChatPrompt, Dialect, Offer, TextPrompts, TokenPrompts

JSON = "application/json"
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def parsed(path: str, body: Any) -> Ask:
    return parser_of("POST", path)(json.dumps(body).encode(), JSON, path)


def chat_of(path: str, **body: Any) -> ChatPrompt:
    prompt = parsed(path, body).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


# --- responses


def test_a_text_is_a_users_message_after_the_instructions() -> None:
    prompt = chat_of("/v1/responses", input="hi", instructions="Be terse.")
    assert prompt.messages == [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "hi"}]
    assert (prompt.tools, prompt.tool_choice, prompt.add_generation_prompt) == (None, "none", True)


def test_thoughts_words_and_calls_join_one_assistants_message() -> None:
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}, {"text": "no"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"text": "b"}]},
        CALL,
        {**CALL, "call_id": "d", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ]
    _, turn, result = chat_of("/v1/responses", input=items).messages
    assert (turn["reasoning"], turn["content"]) == ("hm", "a"), "of each only the first part"
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["f", "n__f"]
    assert result == {"role": "tool", "content": "r", "tool_call_id": "c"}


def test_an_unfinished_answer_is_continued() -> None:
    last = {"type": "message", "role": "assistant", "status": "incomplete", "content": [{"text": "One,"}]}
    prompt = chat_of("/v1/responses", input=[{"role": "user", "content": "count"}, last])
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_hosted_tools_are_not_shown_and_others_as_functions() -> None:
    tools = [
        {"type": "web_search"},
        {"type": "function", "name": "f", "parameters": {}, "strict": True, "unknown": 1},
        {"type": "custom", "name": "c"},
        {
            "type": "namespace",
            "name": "n",
            "tools": [{"type": "function", "name": "g"}, {"type": "custom", "name": "h"}],
        },
    ]
    shown = chat_of("/v1/responses", input="x", tools=tools).tools
    assert shown is not None
    assert [tool["function"]["name"] for tool in shown] == ["f", "c", "n__g"]
    assert shown[0]["function"] == {"parameters": {}, "strict": True, "name": "f"}
    assert chat_of("/v1/responses", input="x", tools=tools[:1]).tools == []


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"previous_input_messages": [{}]},
        {"prompt": {"id": "p"}},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"input": [{"type": "item_reference", "id": "i"}]},
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        {"input": [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        {"input": ["x"]},
        {"input": 5},
        {"instructions": ["x"]},
        {"tools": [{"name": "no type"}]},
    ],
)
def test_a_response_that_cannot_be_known_here_has_no_prompt_and_is_counted_all_the_same(fields: Any) -> None:
    ask = parsed("/v1/responses", {"model": "m", "input": "x", **fields})
    assert (ask.prompt, ask.counted) == (None, True)


@pytest.mark.parametrize(
    ("body", "cut"),
    [({}, None), ({"truncation": "disabled"}, None), ({"truncation": "auto"}, -1), ({"truncation": None}, -1)],
)
def test_truncation_is_on_unless_disabled_or_absent(body: dict[str, Any], cut: int | None) -> None:
    assert parsed("/v1/responses", {"input": "x", **body}).truncate_prompt_tokens == cut


def test_a_response_needs_an_input() -> None:
    with pytest.raises(BadRequest, match="`input` is missing"):
        parsed("/v1/responses", {"model": "m"})


# --- messages


def test_system_blocks_are_joined_without_the_billing_line() -> None:
    system = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: 1", "You", " are")]
    (first, _) = chat_of("/v1/messages", messages=[{"role": "user", "content": "x"}], system=system).messages
    assert first == {"role": "system", "content": "You are"}


def test_results_stand_before_the_rest_of_their_turn() -> None:
    blocks = [
        {"type": "text", "text": "and"},
        {
            "type": "tool_result",
            "tool_use_id": "t",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
        },
    ]
    prompt = chat_of("/v1/messages", messages=[{"role": "user", "content": blocks}])
    assert prompt.messages == [
        {"role": "tool", "tool_call_id": "t", "content": "1\n2"},
        {"role": "user", "content": "and"},
    ]
    assert prompt.from_messages


def test_thinking_and_use_are_one_message_and_an_empty_turn_is_none() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"é": 1}},
    ]
    turns = [{"role": "user", "content": []}, {"role": "assistant", "content": blocks}]
    (message,) = chat_of("/v1/messages", messages=turns).messages
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"\\u00e9": 1}'}}
    assert message == {"role": "assistant", "reasoning": "hm", "tool_calls": [call]}


def test_anthropic_tools_become_functions() -> None:
    prompt = chat_of(
        "/v1/messages", messages=[{"role": "user", "content": "x"}], tools=[{**TOOL, "input_schema": {"a": 1}}]
    )
    assert prompt.tools is not None
    assert prompt.tools[0]["function"]["parameters"] == {"a": 1, "type": "object"}
    assert prompt.tool_choice == "auto"


def test_images_are_told_by_their_source() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA"}
    ask = parsed("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]})
    assert ask.has_media
    assert isinstance(ask.prompt, ChatPrompt)
    assert ask.prompt.messages[0]["content"][0]["image_url"]["url"] == "data:image/png;base64,AA"


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"output_config": {"effort": "max"}}, "max"),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}}, "none"),
    ],
)
def test_effort_comes_from_the_configuration_and_thinking_off(fields: dict[str, Any], effort: str | None) -> None:
    prompt = chat_of("/v1/messages", messages=[{"role": "user", "content": "x"}], **fields)
    assert prompt.reasoning_effort == effort


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "x"}]}]},
        {"messages": ["x"]},
        {"messages": [], "system": 5},
        {"messages": [], "tools": [{"name": "f"}]},
    ],
)
def test_what_vllm_refuses_has_no_prompt_and_goes_on(body: dict[str, Any]) -> None:
    ask = parsed("/v1/messages", body)
    assert (ask.prompt, ask.counted, ask.dialect) == (None, True, Dialect.MESSAGES)


# --- budgets


@pytest.mark.parametrize(
    ("thinking", "given", "sent"),
    [
        ({"type": "enabled", "budget_tokens": 4000}, 3000, {"type": "enabled", "budget_tokens": 2999}),
        ({"type": "enabled", "budget_tokens": 4000}, 1000, {"type": "adaptive"}),
        ({"type": "enabled", "budget_tokens": 2000}, 3000, {"type": "enabled", "budget_tokens": 2000}),
        ({"type": "adaptive"}, 1000, {"type": "adaptive"}),
    ],
)
def test_a_lowered_budget_leaves_no_thinking_that_vllm_refuses(thinking: Any, given: int, sent: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9000, "thinking": thinking}
    rewritten = json.loads(upstream_body(parsed("/v1/messages", body), Offer("a", 4096, given, clamped=True)))
    assert rewritten == {**body, "max_tokens": given, "thinking": sent}


def test_a_responses_budget_is_lowered_and_nonsense_dropped() -> None:
    ask = parsed("/v1/responses", {"input": "x", "max_output_tokens": 9000, "stream": True})
    assert json.loads(upstream_body(ask, Offer("a", 4096, 7, clamped=True))) == {
        "input": "x",
        "max_output_tokens": 7,
        "stream": True,
    }
    ask = parsed("/v1/responses", {"input": "x", "max_output_tokens": -1})
    assert json.loads(upstream_body(ask, Offer("a", 4096, None, clamped=False))) == {"input": "x"}


# --- pooling and tokenize


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"input": "a"}, TextPrompts(("a",))),
        ({"input": ["a", "b"], "add_special_tokens": False}, TextPrompts(("a", "b"), False)),
        ({"input": [1, 2]}, TokenPrompts((2,))),
        ({"input": [[1], [2, 3]]}, TokenPrompts((1, 2))),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            ChatPrompt([{"role": "user", "content": "a"}], add_generation_prompt=False),
        ),
        (
            {"input": [{"role": "user", "content": "a"}]},
            ChatPrompt([{"role": "user", "content": "a"}], add_generation_prompt=False),
        ),
        ({"input": [[{"role": "user", "content": "a"}]]}, None),
        ({"input": "a", "padding": "max_length"}, None),
        ({"input": 7}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("path", pooling.INPUT_PATHS)
def test_inputs_of_pooling_requests(path: str, body: dict[str, Any], prompt: Any) -> None:
    ask = parsed(path, {"model": "m", **body})
    assert ask.prompt == prompt
    assert (ask.dialect, ask.output_tokens, ask.counted) == (Dialect.POOLING, None, True)


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"query": "q", "documents": ["a", "b"]}, ("q\na", "q\nb")),
        ({"text_1": ["q", "r"], "text_2": ["a", "b"]}, ("q\na", "r\nb")),
        ({"queries": "q", "items": "a"}, ("q\na",)),
        ({"queries": ["q", "r"], "documents": ["a"]}, None),
        ({"query": {"content": []}, "documents": ["a"]}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("path", pooling.PAIR_PATHS)
def test_pairs_are_counted_near_enough(path: str, body: dict[str, Any], texts: tuple[str, ...] | None) -> None:
    prompt = parsed(path, body).prompt
    assert prompt == (None if texts is None else TextPrompts(texts, approximate=True))


def test_both_shapes_of_tokenize() -> None:
    wish = tokenize.parse(b'{"prompt": "a", "return_token_strs": true}', JSON)
    assert (wish.ask.prompt, wish.token_strs) == (TextPrompts(("a",)), True)
    wish = tokenize.parse(b'{"messages": [{"role": "user"}], "reasoning_effort": "low"}', JSON)
    assert wish.ask.prompt == ChatPrompt([{"role": "user"}], reasoning_effort="low")
    assert tokenize.parse(b'{"prompt": 7}', JSON).ask.prompt is None


# --- all of them

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "name", "input", "tool", "tools", "summary", "id", "source"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(
    [
        "message",
        "function_call",
        "reasoning",
        "tool_use",
        "tool_result",
        "text",
        "image",
        "custom",
        "namespace",
        "function",
    ]
)
PIECES = st.lists(
    st.dictionaries(st.sampled_from(["type", "role", "content", "name", "tools", "arguments"]), ANY | KINDS, max_size=5)
    | st.fixed_dictionaries({"type": KINDS, "role": st.sampled_from(["user", "assistant", "system"]), "content": ANY}),
    max_size=4,
)
FIELDS = [
    "messages",
    "input",
    "system",
    "instructions",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "reasoning",
    "chat_template_kwargs",
    "max_tokens",
    "max_output_tokens",
    "truncation",
    "kv_transfer_params",
    "query",
    "documents",
    "prompt",
    "model",
    "stream",
    "queries",
    "text_1",
    "text_2",
]


@settings(max_examples=400, deadline=None)
@given(path=st.sampled_from(sorted(COUNTED)), body=st.dictionaries(st.sampled_from(FIELDS), ANY | PIECES, max_size=6))
def test_no_json_makes_a_parser_fail(path: str, body: dict[str, Any]) -> None:
    try:
        ask = COUNTED[path](json.dumps(body).encode(), JSON, path)
    except BadRequest:
        return
    assert ask.counted
    assert guessed_path(body) is None or guessed_path(body) in COUNTED
    upstream_body(ask, Offer("a", 4096, 5, clamped=True))


def test_only_posts_to_the_paths_themselves_are_read() -> None:
    for method, path in (
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses"),
    ):
        ask = parser_of(method, path)(b"", None, path)
        assert (ask.counted, ask.prompt) == (False, None)
    assert (responses.PATH, messages.PATH) == ("/v1/responses", "/v1/messages")
