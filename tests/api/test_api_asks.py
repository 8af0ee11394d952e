"""What the parsers understand of chat, completions and other requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import chat, completions, generic
from gateway.api.paths import dialect_of, normalise
from gateway.exceptions import BadRequest
from gateway.types import Ask, ChatPrompt, Dialect, TextPrompts, TokenPrompts

JSON = "application/json"
HELLO = [{"role": "user", "content": "hello"}]


def chat_ask(**fields: Any) -> Ask:
    return chat.parse(json.dumps({"model": "m", "messages": HELLO, **fields}).encode(), JSON)


def completion_ask(**fields: Any) -> Ask:
    return completions.parse(json.dumps({"model": "m", **fields}).encode(), JSON)


# --- chat


def test_a_chat_is_read_with_all_that_its_template_renders() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    ask = chat_ask(
        tools=tools,
        tool_choice="auto",
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template="{{ x }}",
        chat_template_kwargs={"enable_thinking": False},
        documents=[{"text": "d"}],
        reasoning_effort="low",
    )
    assert ask.dialect is Dialect.CHAT
    assert ask.path == "/v1/chat/completions"
    assert ask.model == "m"
    assert ask.prompt == ChatPrompt(
        messages=HELLO,
        tools=tools,
        tool_choice="auto",
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template="{{ x }}",
        chat_template_kwargs={"enable_thinking": False},
        documents=[{"text": "d"}],
        reasoning_effort="low",
    )


def test_a_plain_chat_has_vllms_defaults() -> None:
    ask = chat_ask()
    assert ask.prompt == ChatPrompt(messages=HELLO)
    assert (ask.output_tokens, ask.n, ask.stream, ask.include_usage) == (None, 1, False, False)
    assert (ask.truncate_prompt_tokens, ask.has_media, ask.min_output_tokens, ask.drop_fields) == (None, False, 0, ())


@pytest.mark.parametrize(
    ("fields", "tokens", "field", "dropped"),
    [
        ({}, None, "max_tokens", ()),
        ({"max_tokens": 5}, 5, "max_tokens", ()),
        ({"max_completion_tokens": 5}, 5, "max_completion_tokens", ()),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5, "max_completion_tokens", ()),
        ({"max_tokens": 9, "max_completion_tokens": None}, 9, "max_tokens", ()),
        ({"max_completion_tokens": -1}, None, "max_tokens", ("max_completion_tokens",)),
        ({"max_tokens": 0}, None, "max_tokens", ("max_tokens",)),
        ({"max_tokens": 9, "max_completion_tokens": 0}, 9, "max_tokens", ("max_completion_tokens",)),
        ({"max_tokens": -7, "max_completion_tokens": 5}, 5, "max_completion_tokens", ("max_tokens",)),
        ({"max_tokens": 5.0}, 5, "max_tokens", ()),
        ({"max_tokens": "5"}, 5, "max_tokens", ()),
        ({"max_tokens": -1e30}, None, "max_tokens", ("max_tokens",)),
        ({"max_tokens": 10**30}, (1 << 53) - 1, "max_tokens", ()),
        ({"max_tokens": "many"}, None, "max_tokens", ()),
        ({"max_tokens": True}, None, "max_tokens", ()),
    ],
)
def test_the_output_budget(fields: dict[str, Any], tokens: int | None, field: str, dropped: tuple[str, ...]) -> None:
    ask = chat_ask(**fields)
    assert (ask.output_tokens, ask.output_field, ask.drop_fields) == (tokens, field, dropped)


@pytest.mark.parametrize(
    ("fields", "at_end", "in_every_chunk"),
    [
        ({"stream": True}, False, False),
        ({"stream": True, "stream_options": None}, False, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True, True),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, False, False),
        ({"stream": True, "stream_options": "yes"}, False, False),
        ({"stream": False, "stream_options": {"include_usage": True}}, False, False),
    ],
)
def test_where_usage_is_wanted(fields: dict[str, Any], at_end: bool, in_every_chunk: bool) -> None:
    ask = chat_ask(**fields)
    assert ask.stream is bool(fields["stream"])
    assert (ask.include_usage, ask.continuous_usage) == (at_end, in_every_chunk)


@pytest.mark.parametrize(("given", "read"), [(-1, -1), (0, 0), (500, 500), (-2, None), ("x", None), (None, None)])
def test_truncation_that_vllm_would_do(given: Any, read: int | None) -> None:
    assert chat_ask(truncate_prompt_tokens=given).truncate_prompt_tokens == read


@pytest.mark.parametrize(
    ("part", "media"),
    [
        ({"type": "text", "text": "image_url"}, False),
        ({"type": "image_url", "image_url": {"url": "data:"}}, True),
        ({"image_url": "data:"}, True),
        ({"type": "input_audio", "input_audio": {}}, True),
        ({"type": ["odd"]}, False),
        ("a string", False),
    ],
)
def test_media_are_noticed(part: Any, media: bool) -> None:
    assert chat_ask(messages=[{"role": "user", "content": [part]}]).has_media is media


@pytest.mark.parametrize(
    ("messages", "param"),
    [(None, "messages"), ("hi", "messages"), ({}, "messages"), ([{"role": "user"}, "hi"], "messages[1]")],
)
def test_messages_must_be_objects_in_a_list(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_ask(messages=messages)
    assert caught.value.param == param
    assert "`messages" in caught.value.message


def test_messages_replaced_by_token_ids_say_nothing_of_the_length() -> None:
    assert chat_ask(kv_transfer_params={"prompt_token_ids": [1, 2]}).prompt is None
    assert chat_ask(kv_transfer_params={"do_remote_decode": True}).prompt is not None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "model messages tools tool_choice n stream stream_options max_tokens max_completion_tokens min_tokens prompt echo "
    "suffix truncate_prompt_tokens chat_template_kwargs documents reasoning_effort kv_transfer_params prompt_embeds"
)


@given(st.dictionaries(st.sampled_from(FIELDS.split()), ANYTHING))
def test_no_value_of_any_field_is_worse_than_a_bad_request(document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    for parse in (chat.parse, completions.parse, generic.parse):
        try:
            ask = parse(body, JSON, "/v1/x")
        except BadRequest as error:
            assert error.message
        else:
            assert ask.body is body
            assert ask.n >= 1
            assert ask.output_tokens is None or ask.output_tokens >= 1
            hash(ask.drop_fields)


# --- completions


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("hello", TextPrompts(("hello",))),
        ("", TextPrompts(("",))),
        (["a", "b"], TextPrompts(("a", "b"))),
        ([1, 2, 3], TokenPrompts((3,))),
        ([[1, 2], [3], []], TokenPrompts((2, 1, 0))),
        ([], None),
        (None, None),
        ([1, "a"], None),
        ([True, False], None),
        ([1.5], None),
        ({"a": 1}, None),
    ],
)
def test_the_prompt_in_all_its_forms(given: Any, prompt: TextPrompts | TokenPrompts | None) -> None:
    assert completion_ask(prompt=given).prompt == prompt


def test_a_completion_asks_for_special_tokens_unless_told_otherwise() -> None:
    assert completion_ask(prompt="a", add_special_tokens=False).prompt == TextPrompts(("a",), add_special_tokens=False)


@pytest.mark.parametrize("fields", [{"suffix": "end"}, {"prompt_embeds": "AAAA"}])
def test_a_completion_that_is_more_than_its_prompt_is_not_counted(fields: dict[str, Any]) -> None:
    assert completion_ask(prompt="a", **fields).prompt is None


@pytest.mark.parametrize(
    ("fields", "tokens", "dropped"),
    [
        ({}, None, ()),
        ({"max_tokens": None}, None, ()),
        ({"max_tokens": 16}, 16, ()),
        ({"max_tokens": 0}, None, ("max_tokens",)),
        ({"max_tokens": 0, "echo": True}, 1, ()),
        ({"max_tokens": -1, "echo": True}, None, ("max_tokens",)),
        ({"max_completion_tokens": 7}, None, ()),
    ],
)
def test_the_output_budget_of_a_completion(
    fields: dict[str, Any], tokens: int | None, dropped: tuple[str, ...]
) -> None:
    ask = completion_ask(prompt="a", **fields)
    assert (ask.output_tokens, ask.drop_fields) == (tokens, dropped)


# --- the rest


def test_other_requests_tell_their_model_and_whether_they_stream() -> None:
    ask = generic.parse(b'{"model": "e", "input": "x", "stream": 1}', JSON, "/v2/embed")
    assert (ask.dialect, ask.path, ask.model, ask.stream) == (Dialect.OTHER, "/v2/embed", "e", True)
    assert (ask.prompt, ask.counted) == (None, False)
    assert ask.include_usage


def test_other_requests_need_no_model_and_no_body() -> None:
    assert generic.parse(b"", None, "/v1/responses/resp_1").model == ""
    assert generic.parse(b"{}", JSON, "/v1/embeddings").model == ""
    assert generic.parse(b"\xff\xfe", "application/octet-stream", "/v1/x").model == ""


def test_what_says_it_is_json_must_be() -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        generic.parse(b"{", JSON, "/v1/embeddings")


def test_a_form_is_searched_for_its_model() -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n'
        b"Content-Type: audio/wav\r\n\r\nRIFF\r\n"
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--x--\r\n'
    )
    content_type = "multipart/form-data; boundary=x"
    assert generic.parse(form, content_type, "/v1/audio/transcriptions").model == "whisper-1"
    assert generic.parse(form.replace(b'name="model"', b'name="other"'), content_type, "/v1/audio/x").model == ""
    assert generic.parse(form, "application/octet-stream", "/v1/audio/x").model == ""


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("//models", "/v1/models"),
        ("/models/", "/v1/models"),
        ("/models/Qwen/Qwen3-8B", "/v1/models/Qwen/Qwen3-8B"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1", "/v1"),
        ("/v1", "/v1"),
        ("/tokenize", "/tokenize"),
        ("/health/", "/health"),
        ("/model/info", "/model/info"),
        ("/chatter", "/chatter"),
        ("/", "/"),
        ("", "/"),
        ("///", "/"),
    ],
)
def test_paths_are_taken_as_meant(written: str, meant: str) -> None:
    assert normalise(written) == meant
    assert normalise(meant) == meant


@given(st.text(alphabet="/v1chatmodels", max_size=30))
def test_a_path_once_normalised_stays(path: str) -> None:
    once = normalise(path)
    assert normalise(once) == once
    assert once.startswith("/")
    assert "//" not in once


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", Dialect.CHAT),
        ("/v1/completions", Dialect.COMPLETIONS),
        ("/v1/responses", Dialect.RESPONSES),
        ("/v1/responses/resp_1/cancel", Dialect.RESPONSES),
        ("/v1/messages", Dialect.MESSAGES),
        ("/v1/messages/count_tokens", Dialect.MESSAGES),
        ("/v1/messagesx", Dialect.OTHER),
        ("/v1/embeddings", Dialect.POOLING),
        ("/v1/chat/completions/render", Dialect.OTHER),
    ],
)
def test_the_dialect_of_a_path(path: str, dialect: Dialect) -> None:
    assert dialect_of(path) is dialect
