"""Priority classes, shares and sessions, as requests name them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.wish import wish_of
from gateway.config import PlacingSettings
from gateway.exceptions import BadRequest
from gateway.types import Ask, Count, CountKind, Dialect, TextPrompts, Wish


def wish(document: dict[str, Any] | None = None, key: str = "", best: Any = None, **said: str) -> Wish:
    headers = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in said.items()]
    ask = Ask(Dialect.CHAT, "/v1/chat/completions", "m", TextPrompts(("x",)), b"{}", document or {})
    return wish_of(ask, headers, key, Count(9, 9, CountKind.EXACT, "local"), False, PlacingSettings(), best)


@pytest.mark.parametrize(
    ("document", "said", "rank"),
    [
        ({}, {}, 1),
        ({}, {"x_kvgate_priority": "high"}, 0),
        ({}, {"x_kvgate_priority": " LOW "}, 2),
        ({}, {"x_kvgate_priority": " "}, 1),
        ({"priority": -5}, {}, 0),
        ({"priority": 7}, {}, 2),
        ({"priority": 0}, {}, 1),
        ({"priority": "high"}, {}, 1),
        ({"priority": True}, {}, 1),
        ({"priority": "7"}, {}, 2),
        ({"priority": -7.0}, {}, 0),
        ({"priority": 7.5}, {}, 1),
        ({"service_tier": "priority"}, {}, 1),
        ({"priority": 7}, {"x_vllm_priority": "0"}, 1),
        ({"priority": 7}, {"x_vllm_priority": "-1"}, 0),
        ({"priority": 7}, {"x_vllm_priority": "soon"}, 2),
        ({"priority": 7}, {"x_kvgate_priority": "normal"}, 1),
    ],
)
def test_the_class_comes_from_our_header_or_from_vllms_number(
    document: dict[str, Any], said: dict[str, str], rank: int
) -> None:
    assert wish(document, **said).rank == rank


@pytest.mark.parametrize("name", ["urgent", "highest", "0", "1", "high,low", "h\u00f6chste"])
def test_a_class_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(BadRequest, match=f"`x-kvgate-priority: {name}` names no priority class") as raised:
        wish(x_kvgate_priority=name)
    assert "there are: high, normal, low" in raised.value.message


def test_nobody_gets_a_better_class_than_allowed() -> None:
    assert wish(best="normal", x_kvgate_priority="high").rank == 1
    assert wish(best="low", x_kvgate_priority="high").rank == 2
    assert wish(best="normal", x_kvgate_priority="low").rank == 2


def test_a_share_belongs_to_a_key_and_shows_nothing_of_it() -> None:
    assert wish().flow == ""
    one, two = wish(key="sk-secret-one").flow, wish(key="sk-secret-two").flow
    assert one != two
    assert "secret" not in one


def test_sessions_are_known_by_header_or_field() -> None:
    named = [
        wish({"prompt_cache_key": "s"}).session,
        wish(x_session_id="s").session,
        wish({"prompt_cache_key": "other"}, x_session_affinity="s").session,
    ]
    assert len(set(named)) == 1
    assert wish({"prompt_cache_key": 7}).session == ""


def test_an_answer_that_ignores_its_end_takes_all_of_its_budget() -> None:
    assert wish({"ignore_eos": True}).whole_budget
    assert not wish({"ignore_eos": "yes"}).whole_budget
