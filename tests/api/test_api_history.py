"""A body of any dialect becomes a conversation, and a body again."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import chat, messages, responses
from gateway.api.history import (
    MOST_PARTS,
    apply,
    by_bytes,
    dropped_text,
    history_of,
    opening_of,
    too_many_parts,
    trimmed_body,
)
from gateway.exceptions import BadRequest
from gateway.guard.cut import Trimmed, trim
from gateway.guard.draft import Rules
from gateway.history import IMAGE_NOTE, Drop, DropMedia, DropReasoning, History, Notice, Role, Shorten
from gateway.types import Ask, Dialect

PARSERS = {Dialect.CHAT: chat.parse, Dialect.RESPONSES: responses.parse, Dialect.MESSAGES: messages.parse}
FIELD = {Dialect.CHAT: "messages", Dialect.RESPONSES: "input", Dialect.MESSAGES: "messages"}


def ask_of(dialect: Dialect, conversation: Any, **more: Any) -> Ask:
    body = {"model": "m", FIELD[dialect]: conversation, **more}
    if dialect is Dialect.MESSAGES:
        body.setdefault("max_tokens", 10)
    return PARSERS[dialect](json.dumps(body).encode(), "application/json")


def read(ask: Ask) -> History:
    found = history_of(ask, by_bytes, None)
    assert found is not None
    return found[0]


def edited(ask: Ask, *edits: Any) -> list[Any]:
    before = copy.deepcopy(ask.document)
    out = apply(ask.document, ask.dialect, read(ask), edits)
    assert ask.document == before
    result: list[Any] = out[FIELD[ask.dialect]]
    return result


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def test_a_chat_becomes_items_of_its_roles() -> None:
    ask = ask_of(
        Dialect.CHAT,
        [
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "assistant", "function_call": {"name": "old", "arguments": "{}"}, "content": ""},
            {"role": "function", "name": "old", "content": "done"},
        ],
    )
    items = read(ask).items
    assert [item.role for item in items] == [
        Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.TOOL,
    ]  # fmt: skip
    assert [item.typed for item in items] == [False, True, False, False, False, False]
    assert items[2].calls == items[3].answers == {"c1"}
    assert items[4].calls == items[5].answers == {"old"}
    assert [text.text for text in items[2].reasoning] == ["hm"]
    assert len(items[1].media) == 1


def test_chats_take_the_local_counters_shares() -> None:
    ask = ask_of(Dialect.CHAT, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    found = history_of(ask, by_bytes, 100, ((11, 22), 33))
    assert found is not None
    history, measure = found
    assert [item.tokens for item in history.items] == [11, 22]
    assert history.tokens == 66 and measure is by_bytes


def test_measured_parts_are_scaled_to_the_count_in_coarse_steps() -> None:
    text = "word " * 300
    ask = ask_of(Dialect.MESSAGES, [{"role": "user", "content": text}, {"role": "assistant", "content": text}])
    plain = read(ask).tokens
    factors = set()
    for more in range(20):
        found = history_of(ask, by_bytes, 2 * plain + more)
        assert found is not None
        factors.add(found[1]("x" * 3000) / 1000)
    assert factors == {2.0}


def test_thoughts_sent_under_both_names_are_one() -> None:
    message = {"role": "assistant", "content": "a", "reasoning": "hm " * 9, "reasoning_content": "hm " * 9}
    ask = ask_of(Dialect.CHAT, [{"role": "user", "content": "q"}, message])
    assert [len(text.text) for text in read(ask).items[1].reasoning] == [27, 0]
    assert edited(ask, DropReasoning(1))[1] == {"role": "assistant", "content": "a"}


def test_texts_media_and_messages_are_edited_where_they_stand() -> None:
    parts = [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}, IMAGE]
    ask = ask_of(
        Dialect.CHAT,
        [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "long"},
            {"role": "user", "content": "q"},
        ],
    )
    out = edited(
        ask, Shorten(0, ("content", 0, "text"), "l"), DropMedia(0), Drop(1), Notice("gone", Role.USER, 0, True)
    )
    assert out == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "l", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": IMAGE_NOTE},
                {"type": "text", "text": "gone"},
            ],
        },
        {"role": "user", "content": "q"},
    ]


def test_a_note_is_a_message_of_its_own_or_the_end_of_one() -> None:
    ask = ask_of(Dialect.CHAT, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert edited(ask, Notice("gone", Role.ASSISTANT, 0))[1] == {"role": "assistant", "content": "gone"}
    assert edited(ask, Notice("gone", Role.USER, 0, joined=True))[0]["content"] == "a\n\ngone"
    assert edited(ask, Notice("gone", Role.USER, None, before=0))[0] == {"role": "user", "content": "gone"}


def test_responses_items_are_thoughts_calls_and_results() -> None:
    ask = ask_of(
        Dialect.RESPONSES,
        [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "found"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        ],
    )
    items = read(ask).items
    assert [item.role.value for item in items] == ["user", "assistant", "assistant", "tool", "assistant", "tool"]
    assert items[1].reasoning[0].path == () and items[1].reasoning[0].text == "hm"
    assert items[2].calls == items[3].answers == {"c1"}
    assert len(edited(ask, DropReasoning(1))) == 5
    out = edited(ask, Shorten(5, ("output", 0, "text"), "o"), Notice("gone", Role.USER, 0, joined=True))
    assert out[5]["output"] == [{"type": "input_text", "text": "o"}]
    assert out[0]["content"] == "hi\n\ngone"


def anthropic() -> Ask:
    return ask_of(
        Dialect.MESSAGES,
        [
            {"role": "user", "content": "task"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]},
                    {"type": "text", "text": "<system-reminder>be brief</system-reminder>"},
                ],
            },
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
        ],
        system=[{"type": "text", "text": "rules"}],
    )


def test_anthropic_results_stand_apart_from_what_was_typed() -> None:
    items = read(anthropic()).items
    assert [(item.place, item.role.value) for item in items] == [
        (0, "user"), (1, "assistant"), (2, "tool"), (2, "user"), (3, "assistant"), (4, "user"),
    ]  # fmt: skip
    assert [item.typed for item in items] == [True, False, False, False, False, True]
    assert items[1].calls == items[2].answers == {"t1"}


def test_anthropic_blocks_go_one_by_one() -> None:
    out = edited(anthropic(), DropReasoning(1), Shorten(2, ("content", 0, "content", 0, "text"), "f"))
    assert [block["type"] for block in out[1]["content"]] == ["tool_use"]
    assert out[2]["content"][0]["content"] == [{"type": "text", "text": "f"}]
    out = edited(anthropic(), Drop(1), Drop(2))
    assert [block["type"] for block in out[1]["content"]] == ["text"]
    assert len(edited(anthropic(), Drop(1), Drop(2), Drop(3))) == 3


def test_an_answer_of_thoughts_alone_is_not_left_empty() -> None:
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    ask = ask_of(Dialect.MESSAGES, [{"role": "user", "content": "a"}, {"role": "assistant", "content": thoughts}])
    (block,) = edited(ask, DropReasoning(1))[1]["content"]
    assert block["type"] == "text" and block["text"]


def test_what_was_dropped_can_be_read() -> None:
    text = dropped_text(anthropic().document, Dialect.MESSAGES, read(anthropic()), (1, 2))
    assert text.startswith("assistant:\ncalls ") and '"a": 1' in text and text.endswith("tool:\nfound")


@pytest.mark.parametrize(
    ("ask", "opening"),
    [
        (anthropic(), ('[{"type": "text", "text": "rules"}]', "task")),
        (ask_of(Dialect.CHAT, [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]), ("s", "u")),
        (ask_of(Dialect.RESPONSES, [{"role": "user", "content": "u"}], instructions="s"), ("s", "u")),
        (ask_of(Dialect.RESPONSES, "just text"), None),
        (ask_of(Dialect.CHAT, [{"role": "assistant", "content": "a"}]), ("", "")),
    ],
)
def test_an_opening_is_what_stays_fixed(ask: Ask, opening: tuple[str, str] | None) -> None:
    assert opening_of(ask) == opening


def test_numbers_and_strings_that_only_json_can_hold_survive_trimming() -> None:
    body = (
        b'{"model": "m", "seed": 123456789012345678901234567890, "logit_bias": NaN, "messages": '
        b'[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]}'
    )
    ask = chat.parse(body, "application/json")
    out = json.loads(trimmed_body(ask, read(ask), (Drop(1),)))
    assert out["seed"] == 123456789012345678901234567890
    assert out["messages"] == [{"role": "user", "content": "\ud800"}]


def test_requests_without_a_conversation_have_no_history() -> None:
    assert history_of(ask_of(Dialect.RESPONSES, "just text"), by_bytes, 3) is None


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(
        [
            "user",
            "assistant",
            "tool",
            "text",
            "tool_use",
            "tool_result",
            "thinking",
            "reasoning",
            "function_call",
            "c1",
            "image",
        ]
    )
)
keys = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "tool_call_id", "id", "reasoning", "output", "call_id", "summary",
     "function", "name", "arguments", "input", "tool_use_id", "thinking", "image_url", "function_call"]
)  # fmt: skip
junk = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4))
message = st.fixed_dictionaries(
    {},
    optional={"role": scalars, "content": junk, "type": scalars, "tool_calls": junk, "output": junk, "reasoning": junk},
)


@pytest.mark.parametrize("dialect", list(FIELD))
@given(conversation=st.lists(message, max_size=6), limit=st.integers(0, 120))
def test_whatever_is_sent_can_be_trimmed_or_not_but_never_fails(
    dialect: Dialect, conversation: list[Any], limit: int
) -> None:
    try:
        ask = ask_of(dialect, conversation)
    except BadRequest:
        return
    found = history_of(ask, by_bytes, 50)
    assert found is not None
    history, measure = found
    opening_of(ask)
    done = trim(history, limit, Rules(pinned_turns=1, tool_result_tokens=32), measure)
    if isinstance(done, Trimmed):
        trimmed_body(ask, history, done.edits)
        dropped_text(ask.document, dialect, history, done.dropped)


def test_a_message_of_many_blocks_is_edited_in_one_go() -> None:
    """Copying the list for each of its 60,000 blocks would take minutes."""
    said = [{"type": "text", "text": f"words {number}"} for number in range(30_000)]
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "s"} for _ in range(30_000)]
    mixed = [block for pair in zip(said, thoughts, strict=True) for block in pair]
    results = [{"type": "tool_result", "tool_use_id": str(number), "content": "r"} for number in range(30_000)]
    pictures = [{"type": "image", "source": {}} for _ in range(30_000)]
    ask = ask_of(
        Dialect.MESSAGES,
        [
            {"role": "user", "content": pictures},
            {"role": "assistant", "content": mixed},
            {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
        ],
    )
    shorter = [Shorten(1, ("content", 2 * number, "text"), "w") for number in range(30_000)]
    began_s = time.process_time()
    first, second, third = edited(ask, DropMedia(0), DropReasoning(1), *shorter, Drop(2))
    assert time.process_time() - began_s < 20
    assert first["content"] == [{"type": "text", "text": IMAGE_NOTE}] * 30_000
    assert second["content"] == [{"type": "text", "text": "w"}] * 30_000
    assert third["content"] == [{"type": "text", "text": "go on"}]


@pytest.mark.parametrize(
    "conversation",
    [
        [{"role": "user", "content": "a"}] * (MOST_PARTS + 1),
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * (MOST_PARTS // 2)}] * 2,
        [
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}] * MOST_PARTS}
                ],
            }
        ],
    ],
    ids=["messages", "parts", "parts of results"],
)
def test_more_parts_than_can_be_looked_at_in_time_are_told(conversation: Any) -> None:
    assert too_many_parts(ask_of(Dialect.MESSAGES, conversation))
    assert not too_many_parts(ask_of(Dialect.MESSAGES, conversation[:1] if len(conversation) > 2 else []))


def test_of_an_endless_opening_only_its_start_is_looked_at() -> None:
    rules = [{"role": "system", "content": [{"type": "text", "text": f"rule {number}"}]} for number in range(50_000)]
    opening = opening_of(ask_of(Dialect.CHAT, [*rules, {"role": "user", "content": "go"}]))
    assert opening is not None and len(opening[0]) < 100_000
