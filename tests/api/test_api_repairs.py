"""Each repair: what vLLM 0.32 was seen to refuse is put right, and what it takes is left as it is."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.body import LenientObject
from gateway.api.repairs.repair import RULES, repair, repaired_body
from gateway.config import RepairName, RepairSettings
from gateway.types import Dialect, ModelFacts

KNOWN = ModelFacts((0, 32))
USER = {"role": "user", "content": "Hello."}
ASSISTANT = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": SCHEMA}}


def call(arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    one = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": arguments}, **fields}
    return {"role": "assistant", "content": None, "tool_calls": [one]}


def mended(
    document: dict[str, Any], *names: str, dialect: Dialect = Dialect.CHAT, facts: ModelFacts = KNOWN
) -> dict[str, Any]:
    """``document`` repaired by exactly the rules ``names``; it is not changed itself, and needs nothing more."""
    before = copy.deepcopy(document)
    repaired = repair(document, dialect, facts)
    assert document == before
    assert repaired is not None
    assert repaired.names == names
    assert repair(repaired.document, dialect, facts) is None
    assert repair(document, dialect, facts, names) is None or len(names) == 1
    return repaired.document


def mended_chat(messages: list[Any], *names: str, **facts: Any) -> list[Any]:
    document = mended({"model": "m", "messages": messages}, *names, facts=ModelFacts((0, 32), **facts))
    assert document["model"] == "m"
    result: list[Any] = document["messages"]
    return result


def test_rules_have_the_names_that_settings_know() -> None:
    names = {rule.name for rule in RULES} | {"finish_reason", "null_tool_calls", "stream_end"}
    assert set(get_args(RepairName)) == names
    with pytest.raises(ValueError, match="disable"):
        RepairSettings(disable=("nothing",))  # type: ignore[arg-type]


# What vLLM 0.32.0 answered 200 to when it was sent as it is here, with Qwen3's template.
TAKEN: list[tuple[Dialect, dict[str, Any]]] = [
    *(
        (Dialect.CHAT, {"messages": messages})
        for messages in (
            [USER],
            [{"role": "developer", "content": "x"}, USER],
            [USER, ASSISTANT, SYSTEM, USER],
            [SYSTEM, SYSTEM, USER],
            [USER, USER],
            [ASSISTANT, USER],
            [SYSTEM],
            [USER, {"role": "function", "name": "ls", "content": "x"}, USER],
            [USER, {**ASSISTANT, "tool_calls": None}, USER],
            [USER, {**ASSISTANT, "tool_calls": []}, USER],
            [USER, {"role": "assistant", "content": None}, USER],
            [{"role": "user"}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}],
            [{"role": "user", "content": []}],
            [USER, call('{"a": "b'), RESULT, USER],
            [USER, call(""), RESULT, USER],
            [USER, call("[1]"), RESULT, USER],
            [USER, call(index=0), RESULT, USER],
            [USER, call(), USER],
            [USER, RESULT, USER],
            [USER, call(), {**RESULT, "name": None}],
            [USER, {**ASSISTANT, "function_call": {"name": "ls", "arguments": "{}"}}, USER],
            [USER, {**ASSISTANT, "reasoning_content": "y"}, USER],
            [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "y"}]}, USER],
        )
    ),
    *(
        (Dialect.CHAT, {"messages": [USER], **fields})
        for fields in (
            {"tools": None},
            {"tools": [TOOL], "tool_choice": "required"},
            {"tools": [{"function": {"name": "ls"}}]},
            {"tool_choice": "none"},
            {"tool_choice": None},
            {"functions": [{"name": "ls"}], "function_call": "auto"},
            {"stream": True, "stream_options": {"include_usage": True}},
            {"stream_options": None},
            {"input": "x"},
            {"truncation": "auto", "system": "x", "store": True, "verbosity": "low"},
        )
    ),
    (Dialect.COMPLETIONS, {"prompt": "x", "suffix": None}),
    *(
        (Dialect.MESSAGES, {"max_tokens": 50, **fields})
        for fields in (
            {"messages": [USER, ASSISTANT, SYSTEM, USER]},
            {"messages": [USER], "thinking": {"type": "adaptive"}},
            {"messages": [USER], "tools": []},
            {"messages": [USER], "tools": [{"type": "custom", "name": "ls", "input_schema": SCHEMA}]},
            {"messages": [USER], "tool_choice": {"type": "auto"}},
            {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            {"messages": [USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
        )
    ),
    *(
        (Dialect.RESPONSES, fields)
        for fields in (
            {"input": "x"},
            {"input": "x", "tools": [{"type": "web_search"}, {"type": "local_shell"}, {"type": "tool_search"}]},
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": []}]},
            {"input": "x", "tools": [{"type": "custom", "name": "n", "format": {"type": "text"}}]},
            {"input": "x", "tools": [], "tool_choice": "auto", "store": None, "metadata": None},
            {"input": [USER, {"role": "developer", "content": "x"}]},
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": None}, USER]},
            {"input": [{"type": "function_call", "name": "ls", "arguments": "{", "call_id": "c"}]},
            {
                "input": [
                    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}
                ]
            },
        )
    ),
]


@pytest.mark.parametrize(("dialect", "document"), TAKEN)
def test_what_vllm_takes_is_left_as_it_is(dialect: Dialect, document: dict[str, Any]) -> None:
    assert repair(document, dialect, KNOWN) is None
    assert repaired_body(json.dumps(document).encode(), document, dialect, KNOWN) is None


@pytest.mark.parametrize("dialect", [Dialect.POOLING, Dialect.OTHER])
def test_other_dialects_have_no_rules(dialect: Dialect) -> None:
    assert repair({"input": None, "tools": [], "stream_options": {}}, dialect, KNOWN) is None


KEYS = (
    "messages",
    "input",
    "tools",
    "tool_choice",
    "role",
    "content",
    "type",
    "text",
    "name",
    "id",
    "function",
    "arguments",
    "tool_calls",
    "tool_call_id",
    "tool_use",
    "image_url",
    "source",
    "thinking",
    "max_tokens",
    "stream_options",
    "suffix",
    "system",
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "x", "user", "tool", "function", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)
STRICT = ModelFacts((0, 10), *[False] * 9, True)


THINGS = st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=5)
PARTS = THINGS | st.builds(
    lambda kind, fields: {"type": kind, **fields},
    st.sampled_from(["text", "tool_use", "tool_result", "image", "input_image", "document", "web_search_tool_result"]),
    THINGS,
)
TURNS = st.builds(
    lambda role, content, fields: {"role": role, "content": content, **fields},
    st.sampled_from(["user", "assistant", "tool", "system", "developer"]) | ANYTHING,
    st.lists(PARTS, max_size=2) | ANYTHING,
    st.fixed_dictionaries({}, optional={"tool_calls": st.lists(THINGS, max_size=2) | ANYTHING, "name": ANYTHING}),
)
FIELDS = {
    "messages": st.lists(TURNS, max_size=4) | ANYTHING,
    "input": st.lists(TURNS | PARTS, max_size=3) | ANYTHING,
    "tools": st.lists(THINGS, max_size=2) | ANYTHING,
    "tool_choice": THINGS | ANYTHING,
    "thinking": THINGS,
    "suffix": ANYTHING,
    "stream_options": ANYTHING,
    "text": THINGS,
}


@given(
    st.fixed_dictionaries({}, optional=FIELDS),
    st.sampled_from([Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES, Dialect.COMPLETIONS]),
    st.sampled_from([KNOWN, STRICT, ModelFacts()]),
)
@settings(max_examples=400)
def test_no_document_is_too_strange_and_none_is_changed(
    document: dict[str, Any], dialect: Dialect, facts: ModelFacts
) -> None:
    before = copy.deepcopy(document)
    repair(document, dialect, facts)
    assert document == before


MESSAGES = st.lists(
    st.sampled_from([USER, ASSISTANT, SYSTEM, {"role": "developer", "content": "x"}, call(), RESULT]), max_size=8
)


@given(MESSAGES, st.sampled_from([KNOWN, STRICT]))
def test_repairing_twice_changes_nothing_more(messages: list[Any], facts: ModelFacts) -> None:
    repaired = repair({"messages": messages}, Dialect.CHAT, facts)
    assert repaired is None or repair(repaired.document, Dialect.CHAT, facts) is None


# --- bodies


def test_the_bytes_are_those_of_the_repaired_document() -> None:
    document = {"model": "m", "messages": [USER], "tools": []}
    body, names = repaired_body(json.dumps(document).encode(), document, Dialect.CHAT, KNOWN) or (b"", ())
    assert json.loads(body) == {"model": "m", "messages": [USER]}
    assert names == ("empty_tools",)


@pytest.mark.parametrize("seed", ["36893488147419103233", "NaN", '"\\ud800"'])
def test_what_orjson_cannot_write_stays_as_the_client_wrote_it(seed: str) -> None:
    body = b'{"seed":%s,"messages":[{"role":"user","content":"x"}],"tools":[]}' % seed.encode()
    document = LenientObject(json.loads(body))
    mended_body, _ = repaired_body(body, document, Dialect.CHAT, KNOWN) or (b"", ())
    assert b'"seed": %s' % seed.encode() in mended_body


# --- chat: around the messages


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


# --- chat: what messages hold


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


# --- chat: calls and results


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


# --- chat: roles


def test_developer_becomes_system_where_the_template_does_not_take_it() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert mended_chat([developer, USER], "developer_role", takes_developer=False) == [SYSTEM, USER]


def test_system_messages_become_one_in_front() -> None:
    parts = {"role": "system", "content": [{"type": "text", "text": "Late."}]}
    messages = mended_chat([SYSTEM, USER, ASSISTANT, parts, USER], "system_first", takes_late_system=False)
    assert messages == [{"role": "system", "content": "Be brief.\n\nLate."}, USER, ASSISTANT, USER]


def test_system_messages_begin_the_users_where_there_is_no_such_role() -> None:
    assert mended_chat([SYSTEM, USER], "no_system", takes_system=False) == [
        {"role": "user", "content": "Be brief.\n\nHello."}
    ]
    parts = [{"type": "text", "text": "x"}]
    assert mended_chat([SYSTEM, {"role": "user", "content": parts}], "no_system", takes_system=False) == [
        {"role": "user", "content": [{"type": "text", "text": "Be brief."}, *parts]}
    ]


def test_neighbours_of_one_role_become_one() -> None:
    messages = [USER, USER, ASSISTANT, ASSISTANT, call(), RESULT]
    assert mended_chat(messages, "alternating_roles", takes_repeated_roles=False) == [
        {"role": "user", "content": "Hello.\n\nHello."},
        {"role": "assistant", "content": "Hello.\n\nHello."},
        call(),
        RESULT,
    ]


def test_the_assistant_answers_a_result_before_the_user_speaks() -> None:
    messages = mended_chat(
        [USER, call(), RESULT, USER], "alternating_roles", takes_repeated_roles=False, takes_user_after_tool=False
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user"]


def test_a_user_speaks_where_the_template_demands_one() -> None:
    asking = {"role": "user", "content": "Continue."}
    assert mended_chat([SYSTEM, call(), RESULT], "user_message", takes_no_user=False) == [
        SYSTEM,
        asking,
        call(),
        RESULT,
    ]
    assert mended_chat([SYSTEM], "user_message", takes_no_user=False) == [SYSTEM, asking]
    assert mended_chat([ASSISTANT, USER], "user_message", takes_assistant_first=False) == [asking, ASSISTANT, USER]
    assert repair({"messages": [SYSTEM]}, Dialect.CHAT, ModelFacts(takes_assistant_first=False)) is None


# --- Anthropic


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


# --- Responses


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
