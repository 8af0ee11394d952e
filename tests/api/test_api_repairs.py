"""What vLLM takes is left as it is; nothing is too strange; a repaired request is repaired for good."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import pytest
from api_repairs import ASSISTANT, KNOWN, RESULT, SCHEMA, SYSTEM, TOOL, USER, call
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.body import LenientObject
from gateway.api.repairs.repair import RULES, repair, repaired_body
from gateway.config import RepairName, RepairSettings
from gateway.types import Dialect, ModelFacts


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
