"""Over random conversations in every dialect, trimming fits, keeps what it must, and stands still.

``KVGATE_TEST_HISTORIES=5000`` tries as many as that; the default is a share of it that runs in seconds.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from guard_conversations import Talk, ask, requests, talk
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.api.history import apply, history_of
from gateway.guard.cut import Trimmed, Untrimmable, trim
from gateway.guard.draft import FRAME_TOKENS, Rules, note
from gateway.guard.outline import Outline
from gateway.history import History, Role
from gateway.types import Dialect

HISTORIES = int(os.environ.get("KVGATE_TEST_HISTORIES", "450"))
DIALECTS = (Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES)
RULES = Rules(tool_result_tokens=48, pinned_turns=2)

each_dialect = pytest.mark.parametrize("dialect", DIALECTS)
# Shrinking takes minutes here, and a turn is one number anyway.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
_FREE = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": _PHASES}
many = settings(max_examples=max(1, HISTORIES // 3), **_FREE)
few = settings(max_examples=max(1, HISTORIES // 18), **_FREE)
turns = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=16)
shares = st.integers(2, 110)
ladders = st.permutations(RULES.ladder).flatmap(lambda steps: st.integers(1, 5).map(lambda count: tuple(steps[:count])))


def measure(text: str) -> int:
    return -(-len(text) // 4)


def history(body: Mapping[str, Any], dialect: Dialect) -> History:
    found = history_of(ask(body, dialect), measure, None)
    assert found is not None
    return found[0]


def list_of(body: Mapping[str, Any]) -> list[Any]:
    return body["input"] if "input" in body else body["messages"]


def pairs(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Calls and results in the order of the body."""
    found = []
    for message in list_of(body):
        kind = message.get("type")
        if kind == "function_call":
            found.append(("call", message["call_id"]))
        elif kind == "function_call_output":
            found.append(("result", message["call_id"]))
        found += [("call", call["id"]) for call in message.get("tool_calls", ())]
        if message.get("role") == "tool":
            found.append(("result", message["tool_call_id"]))
        content = message.get("content")
        for block in content if isinstance(content, list) else ():
            if block["type"] == "tool_use":
                found.append(("call", block["id"]))
            elif block["type"] == "tool_result":
                found.append(("result", block["tool_use_id"]))
    return found


def assert_paired(body: Mapping[str, Any]) -> None:
    """Each run of calls is followed by exactly its results."""
    waiting: list[str] = []
    for kind, call in pairs(body):
        if kind == "call":
            waiting.append(call)
        else:
            assert call in waiting, "a result without its call"
            waiting.remove(call)
    assert not waiting, "a call without its result"


def speakers(body: Mapping[str, Any]) -> list[str]:
    """Roles that a template with alternating turns looks at: runs of one answer's parts are one."""
    found: list[str] = []
    for message in list_of(body):
        role = message.get("role") or ("tool" if message["type"].endswith("output") else "assistant")
        if role in ("user", "assistant") and not (role == "assistant" and found[-1:] == ["assistant"]):
            content = message.get("content")
            if isinstance(content, list) and any(block.get("type") == "tool_result" for block in content):
                found.append("tool")
            else:
                found.append(role)
        elif role == "tool":
            found.append("tool")
    return [role for number, role in enumerate(found) if role != "tool" or found[number - 1 : number] != ["tool"]]


def texts_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts_of(each)]
    return [text for each in value for text in texts_of(each)] if isinstance(value, list) else []


def least_tokens(full: History, rules: Rules) -> int:
    """What no trimming may remove, results of tools at their shortest, and a note."""
    outline, end = Outline(full.items), len(full.items)
    units = outline.pinned_units(full.items, range(end), end, 0, rules.pin_first_user)
    kept = [index for index in range(end) if outline.unit_of[index] in units]
    total = full.overhead_tokens + measure(note(99_999)) + FRAME_TOKENS
    for index in kept:
        item = full.items[index]
        cut = sum(max(0, measure(text.text) - rules.tool_result_tokens) for text in item.texts)
        total += item.tokens - (cut if item.role is Role.TOOL else 0)
    return total


@each_dialect
@many
@given(turns, shares, st.integers(0, 40))
def test_result_fits_and_keeps_what_it_must(dialect: Dialect, seeds: list[int], share: int, back: int) -> None:
    conversation = talk(seeds)
    bodies = requests(conversation, dialect)
    body = bodies[max(0, len(bodies) - 1 - back % 3)]
    before = copy.deepcopy(body)
    full = history(body, dialect)
    limit = full.tokens * share // 100
    result = trim(full, limit, RULES, measure)
    if isinstance(result, Untrimmable):
        assert least_tokens(full, RULES) > limit
        assert result.least_tokens > limit
        return
    out = apply(body, dialect, full, result.edits)
    assert body == before, "the client's document was changed"
    assert_fits_and_is_valid(body, out, conversation, dialect, limit)
    again = trim(history(out, dialect), limit, RULES, measure)
    assert isinstance(again, Trimmed) and not again.edits, "trimming twice changes something"


@each_dialect
@few
@given(turns, shares, ladders)
def test_any_ladder_gives_a_valid_conversation(
    dialect: Dialect, seeds: list[int], share: int, ladder: tuple[str, ...]
) -> None:
    conversation = talk(seeds)
    body = requests(conversation, dialect)[-1]
    full = history(body, dialect)
    limit = full.tokens * share // 100
    result = trim(full, limit, Rules(ladder=ladder, tool_result_tokens=48, pinned_turns=2), measure)
    if isinstance(result, Trimmed):
        out = apply(body, dialect, full, result.edits)
        assert_fits_and_is_valid(body, out, conversation, dialect, limit)


def assert_fits_and_is_valid(
    body: Mapping[str, Any], out: Mapping[str, Any], conversation: Talk, dialect: Dialect, limit: int
) -> None:
    assert history(out, dialect).tokens <= limit
    assert {**out, "messages": 0, "input": 0} == {**body, "messages": 0, "input": 0}
    assert_paired(out)
    said = texts_of(out)
    assert not conversation.system or conversation.system in said
    questions = [each.question for each in conversation.turns]
    users = [text for message in list_of(body) if message.get("role") == "user" for text in texts_of(message)]
    asked = [text for text in users if text in questions]
    # The note may stand at the end of the first one's own text.
    assert any(text.startswith(asked[0]) for text in said)
    assert asked[-1] in said or (asked[-1] == asked[0])
    newest = list_of(body)[-1]
    if newest.get("role") == "user" and newest.get("content") not in (None, ""):
        assert set(texts_of(newest.get("content"))) & set(said) or "tool_result" in texts_of(newest)
    roles = speakers(out)
    assert all(one != other for one, other in pairwise(roles)), roles
    assert roles[0] == "user"


@each_dialect
@few
@given(turns, st.integers(5, 60))
def test_prefix_changes_only_when_the_cut_moves(dialect: Dialect, seeds: list[int], share: int) -> None:
    bodies = requests(talk(seeds), dialect)
    limit = history(bodies[-1], dialect).tokens * share // 100
    before: list[str] = []
    cuts: int | None = 0
    for body in bodies:
        full = history(body, dialect)
        result = trim(full, limit, RULES, measure)
        if isinstance(result, Untrimmable):
            before, cuts = [], None
            continue
        now = [json.dumps(message) for message in list_of(apply(body, dialect, full, result.edits))]
        if result.cuts == cuts:
            assert now[: len(before)] == before, "the prefix changed though the cut did not move"
        elif cuts is not None:
            assert result.cuts > cuts and result.cut_at == len(full.items), "a cut that was not needed now"
        before, cuts = now, result.cuts


@each_dialect
def test_cuts_are_as_rare_as_the_low_mark_allows(dialect: Dialect) -> None:
    bodies = requests(talk([7 * number + 1 for number in range(60)]), dialect)
    full = history(bodies[-1], dialect)
    limit = full.tokens // 6
    result = trim(full, limit, RULES, measure)
    assert isinstance(result, Trimmed)
    grown = full.tokens - limit
    assert result.cuts <= grown // (limit - int(0.85 * limit)) + 1
    assert result.cuts < len(bodies) / 3
