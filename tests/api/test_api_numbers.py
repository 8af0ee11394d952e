"""Integers keep every digit that vLLM sees, however large they are and however the body grew."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.api import chat
from gateway.api.body import LenientObject, parse_object
from gateway.api.growing import LEAST_BYTES
from gateway.api.numbers import has_large_integer
from gateway.api.rewrite import upstream_body, with_model
from gateway.types import Offer

JSON = "application/json"
UINT256 = (1 << 256) - 1
PIECES = ["1" * 19, "1" * 25, "-" + "1" * 25, str(1 << 64), str((1 << 64) - 1), '"', "\\", '\\"', ", ", ": ", " ", "["]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
NUMBERS = st.one_of(st.integers(), st.sampled_from([1 << 64, (1 << 64) - 1, -(1 << 63), -(1 << 63) - 1, 1e30, 1.5]))
VALUES = st.recursive(
    TEXTS | NUMBERS | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def holds_large(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(holds_large, value))
    if isinstance(value, dict):
        return any(map(holds_large, value.values()))
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64


@settings(max_examples=500)
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
@example("\\" * 3 + '"' + ", " + "1" * 30 + ", ", None, False)
def test_large_integers_are_told_from_texts_that_look_like_them(value: Any, indent: int | None, tight: bool) -> None:
    raw = json.dumps(value, indent=indent, separators=(",", ":") if tight else None).encode()
    assert has_large_integer(raw) == holds_large(value)


@pytest.mark.parametrize("number", [UINT256, -UINT256, 1 << 64, -(1 << 63) - 1])
@pytest.mark.parametrize("length", [1, LEAST_BYTES])
def test_every_digit_is_read_wherever_it_stands_in_a_body_that_grows(number: int, length: int) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * length}]
    for place in ("nowhere", "messages", "tools"):
        if place == "messages":
            messages = [*messages, {"role": "assistant", "content": "", "n": number}]
        tools = [{"maximum": number}] if place == "tools" else []
        document = {"messages": messages, "tools": tools}
        read = parse_object(json.dumps(document).encode(), JSON)
        assert json.dumps(read) == json.dumps(document)


def test_every_digit_reaches_another_model_and_its_backend() -> None:
    body = json.dumps({"model": "a", "messages": [], "max_tokens": 9, "metadata": {"n": UINT256}, "x": float("nan")})
    ask = with_model(chat.parse(body.encode(), JSON), "b")
    assert isinstance(ask.document, LenientObject)
    sent = upstream_body(replace(ask, stream=False), Offer("b", 100, 5, clamped=True))
    expected = {"model": "b", "messages": [], "max_tokens": 5, "metadata": {"n": UINT256}, "x": float("nan")}
    assert sent == json.dumps(expected).encode()
