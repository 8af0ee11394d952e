"""Whose word counts when a request overflows, and which conversations were refused before."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.exceptions import BadRequest
from gateway.guard.conversation import ADOPT_S, MOST_ADOPTED, Conversations, Identity, identity
from gateway.guard.policy import Action, Choice, Policy, action, choice, larger_model

SAID: dict[str, Any] = {
    "header": "trim",
    "document": {"truncation": "disabled"},
    "key": "pass",
    "route": "larger",
    "model": "trim",
    "default": "reject",
}


def test_the_closest_word_counts() -> None:
    expected = [
        Choice(Policy.TRIM, "header"),
        Choice(Policy.REJECT, "body"),
        Choice(Policy.PASS, "key"),
        Choice(Policy.LARGER, "route"),
        Choice(Policy.TRIM, "model"),
        Choice(Policy.REJECT, "default"),
    ]
    said, silent = dict(SAID), {"header": None, "document": {}, "key": None, "route": None, "model": None}
    for name, wanted in zip([*silent, "default"], expected, strict=True):
        assert choice(**said) == wanted
        if name in silent:
            said[name] = silent[name]


@pytest.mark.parametrize(
    ("document", "policy"),
    [
        ({"truncation": "auto"}, Policy.TRIM),
        ({"truncation": "disabled"}, Policy.REJECT),
        ({"truncation": None}, Policy.AUTO),
        ({"truncation": {"type": "auto"}}, Policy.AUTO),
        ({}, Policy.AUTO),
    ],
)
def test_a_body_can_consent(document: dict[str, Any], policy: Policy) -> None:
    assert choice(**{**SAID, "header": " ", "document": document, "key": "auto"}).policy is policy


def test_a_header_may_be_written_in_any_case_but_must_name_a_policy() -> None:
    assert choice(**{**SAID, "header": " Reject "}).policy is Policy.REJECT
    with pytest.raises(BadRequest, match=r"names no policy; there are: auto, reject, trim, larger, pass"):
        choice(**{**SAID, "header": "truncate"})


@pytest.mark.parametrize(
    ("policy", "before", "agent", "wanted"),
    [
        (Policy.AUTO, False, "Cline/4", Action.REFUSE),
        (Policy.AUTO, True, "Cline/4", Action.TRIM),
        (Policy.LARGER, False, "", Action.REFUSE),
        (Policy.AUTO, False, "GitHubCopilotChat/0.36", Action.TRIM),
        (Policy.AUTO, False, "githubcopilotchat/0.36", Action.TRIM),
        (Policy.REJECT, True, "GitHubCopilotChat/0.36", Action.REFUSE),
        (Policy.TRIM, False, "", Action.TRIM),
        (Policy.PASS, True, "", Action.PASS),
    ],
)
def test_what_a_policy_means(policy: Policy, before: bool, agent: str, wanted: Action) -> None:
    assert action(policy, refused_before=before, user_agent=agent, trim_clients=("GitHubCopilotChat/", "")) is wanted


def test_a_larger_model_is_larger() -> None:
    windows = {"small": 4096, "same": 4096, "large": 16384}
    assert larger_model("small", "large", windows) == "large"
    for name in ("same", "gone", None):
        assert larger_model("small", name, windows) is None
    assert larger_model("large", "small", windows) is None


def who(first_user: str = "fix it", **more: str) -> Identity:
    return identity(**{"key": "k", "model": "m", "session": "", "system": "s", "first_user": first_user, **more})


def test_a_conversation_is_refused_once() -> None:
    known = Conversations(10, 3600)
    assert not known.overflowed(who(), 0)
    assert known.overflowed(who(), 1)
    assert known.overflowed(who(), 3000)
    assert known.overflowed(who(), 6000), "each overflow renews the memory"
    assert not known.overflowed(who(), 9601)


@pytest.mark.parametrize(
    "other", [{"key": "x"}, {"model": "x"}, {"system": "x"}, {"first_user": "x"}, {"session": "x"}]
)
def test_what_differs_at_the_start_is_another_conversation(other: dict[str, str]) -> None:
    known = Conversations(10, 3600)
    assert not known.overflowed(who(), 0)
    assert not known.overflowed(who(**other), 1)


def test_a_named_session_is_one_conversation_whatever_it_says_first() -> None:
    known = Conversations(10, 3600)
    assert not known.overflowed(who("a", session="x"), 0)
    assert known.overflowed(who("b", session="x"), 1)


def test_a_line_that_changes_with_every_request_does_not_count() -> None:
    systems = [f'[{{"text": "x-anthropic-billing-header: cch={number}"}}]' for number in range(2)]
    assert who(system=systems[0]) == who(system=systems[1])


def test_a_compacted_conversation_is_known_by_its_new_start() -> None:
    known = Conversations(10, 3600)
    assert not known.awaits(0)
    known.overflowed(who("fix it"), 0)
    assert known.awaits(1)
    known.fitted(who("another system", system="title"), 1)
    assert known.awaits(1), "a side call is no answer to the refusal"
    known.fitted(who("summary: fix it"), 2)
    assert known.overflowed(who("summary: fix it"), 500)


def test_neither_its_own_call_for_a_summary_nor_another_conversation_takes_the_place_of_what_was_compacted() -> None:
    """A team that shares one key: who compacts once a run must not be refused twice because others spoke meanwhile."""
    known = Conversations(100, 3600)
    known.overflowed(who("fix it"), 0)
    known.fitted(who("fix it"), 1)
    known.fitted(who("another user's"), 2)
    known.fitted(who("summary: fix it"), 3)
    assert known.overflowed(who("summary: fix it"), 500)
    for number in range(MOST_ADOPTED):
        known.fitted(who(f"more of others {number}"), 4)
    assert not known.awaits(5), "but not all that begin are taken for it"
    assert not known.overflowed(who("one too many"), 6)


def test_what_comes_too_late_is_another_conversation() -> None:
    known = Conversations(10, 3600)
    known.overflowed(who("fix it"), 0)
    known.fitted(who("something else"), ADOPT_S + 1)
    assert not known.overflowed(who("something else"), ADOPT_S + 2)
    assert not known.awaits(3 * ADOPT_S)


def test_the_memory_is_bounded() -> None:
    known = Conversations(3, 3600)
    for number in range(100):
        known.overflowed(who(str(number), system=str(number)), number)
    assert len(known) == 3
    assert known.overflowed(who("99", system="99"), 100)
    assert not known.overflowed(who("0", system="0"), 100)


def test_what_has_expired_is_forgotten() -> None:
    known = Conversations(1000, 10)
    for number in range(50):
        known.overflowed(who(str(number)), number)
    assert len(known) <= 11
