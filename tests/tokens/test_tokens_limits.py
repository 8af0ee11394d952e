"""Conversations of absurdly many messages are not rendered: that would take the gateway minutes and gigabytes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.tokens.errors import CannotCount
from gateway.tokens.limits import MAX_MESSAGES, MAX_PARTS, refuse_absurd
from gateway.types import ChatPrompt, TextPrompts


def says(content: Any = "a") -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_long_conversations_are_counted() -> None:
    refuse_absurd(ChatPrompt([says()] * MAX_MESSAGES))
    refuse_absurd(ChatPrompt([says([{"type": "text", "text": "a"}] * (MAX_PARTS // 2))] * 2))
    refuse_absurd(TextPrompts(("a" * 1_000_000,)))


@pytest.mark.parametrize(
    "messages",
    [[says()] * (MAX_MESSAGES + 1), [says([{"type": "text", "text": "a"}] * (MAX_PARTS + 1))]],
    ids=["messages", "parts"],
)
def test_absurd_ones_are_left_to_the_estimate(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(CannotCount, match="too many to count") as raised:
        refuse_absurd(ChatPrompt(messages))
    assert raised.value.refused  # no backend is asked, either
