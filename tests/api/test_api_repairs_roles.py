"""Roles of chat messages and their order, put right where the template demands it."""

from __future__ import annotations

from api_repairs import ASSISTANT, RESULT, SYSTEM, USER, call, mended_chat

from gateway.api.repairs.repair import repair
from gateway.types import Dialect, ModelFacts


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
