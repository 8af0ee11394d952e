"""The body that goes upstream differs from the client's in what was decided, and in nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import chat, completions, generic
from gateway.api.rewrite import upstream_body
from gateway.types import Ask, Offer

JSON = "application/json"
HELLO = [{"role": "user", "content": "hello"}]
AS_IS = Offer("a", 8192, None, clamped=False)
CLAMPED = Offer("a", 8192, 77, clamped=True)


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HELLO, **fields}).encode()


def upstream(body: bytes, offer: Offer = AS_IS) -> bytes:
    return upstream_body(chat.parse(body, JSON), offer)


def test_an_unchanged_request_keeps_its_very_bytes() -> None:
    body = b' { "model":"m", "messages": [ ],"max_tokens":5 , "x":1.50 } '
    assert upstream(body) is body


def test_a_stream_that_asks_for_usage_keeps_its_bytes() -> None:
    body = chat_body(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert upstream(body) is body


def test_usage_is_asked_for_by_a_key_at_the_end_of_the_same_bytes() -> None:
    body = b'{"model":"m", "messages": [],  "x":1.50, "stream": true }\n '
    expected = b'{"model":"m", "messages": [],  "x":1.50, "stream": true,"stream_options":{"include_usage":true}}'
    assert upstream(body) == expected


def test_a_key_is_added_to_an_empty_object_too() -> None:
    ask = completions.parse(b"{ }", JSON)
    assert upstream_body(ask, CLAMPED) == b'{"max_tokens":77}'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False, "other": 1}, {"include_usage": True, "other": 1}),
        ({"include_usage": False, "continuous_usage_stats": True}, {"include_usage": True}),
        ({"continuous_usage_stats": True}, {"include_usage": True}),
    ],
)
def test_usage_at_the_end_and_no_more_is_asked_for_instead(options: Any, expected: dict[str, Any]) -> None:
    body = chat_body(stream=True, stream_options=options, temperature=0.1)
    assert json.loads(upstream(body)) == {**json.loads(body), "stream_options": expected}


def test_options_that_are_no_object_are_vllms_to_refuse() -> None:
    body = chat_body(stream=True, stream_options="all")
    assert upstream(body) is body


def test_options_without_a_stream_are_vllms_to_refuse() -> None:
    body = chat_body(stream_options={"include_usage": False})
    assert upstream(body) is body


def test_a_clamped_budget_stands_in_the_field_that_was_used() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        body = chat_body(**{field: 32000})
        assert json.loads(upstream(body, CLAMPED)) == {**json.loads(body), field: 77}


def test_a_clamped_budget_is_the_only_one() -> None:
    body = chat_body(max_tokens=9000, max_completion_tokens=8000)
    sent = json.loads(upstream(body, CLAMPED))
    assert sent["max_completion_tokens"] == 77
    assert "max_tokens" not in sent


def test_budgets_of_nothing_do_not_go_upstream() -> None:
    body = chat_body(max_tokens=-1, max_completion_tokens=0, seed=1)
    assert json.loads(upstream(body)) == {"model": "m", "messages": HELLO, "seed": 1}


def test_a_budget_of_nothing_beside_a_real_one_goes_alone() -> None:
    body = chat_body(max_tokens=12, max_completion_tokens=-1)
    assert json.loads(upstream(body)) == {"model": "m", "messages": HELLO, "max_tokens": 12}


def test_an_echo_without_output_keeps_its_bytes() -> None:
    body = b'{"prompt":"a","echo":true,"max_tokens":0}'
    assert upstream_body(completions.parse(body, JSON), Offer("a", 8, 1, clamped=False)) is body


def test_other_dialects_pass_untouched() -> None:
    body = b'{"model":"m","stream":true,"max_tokens":-1}'
    assert upstream_body(generic.parse(body, JSON, "/v1/messages"), AS_IS) is body


@pytest.mark.parametrize(
    "odd",
    [
        b'"\\ud800 \\udfff"',
        b"NaN",
        b"[Infinity, -Infinity, 1e400]",
        b"36893488147419103233",
        b"-9223372036854775809",
        b"0.1234567890123456789012",
        b'"1234567890123456789012"',
    ],
)
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_odd_values_survive_both_ways_of_rewriting(odd: bytes, bom: bytes) -> None:
    spliced = bom + b'{"messages":[],"x":' + odd + b',"stream":true}'
    sent = upstream(spliced)
    assert sent.startswith(spliced[:-1])
    encoded = bom + b'{"messages":[],"max_tokens":900,"x":' + odd + b"}"
    sent = upstream(encoded, CLAMPED)
    expected = {**json.loads(encoded), "max_tokens": 77}
    assert repr(json.loads(sent)) == repr(expected)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
BUDGETS = st.sampled_from([None, -1, 0, 5, 5.0, "5", 9000, 10**25, "many"])
DOCUMENTS = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.just(HELLO)},
    optional={
        "stream": st.booleans(),
        "stream_options": st.none()
        | st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
        "max_tokens": BUDGETS,
        "max_completion_tokens": BUDGETS,
        "seed": st.integers(),
        "metadata": VALUES,
    },
)


def expected_changes(document: dict[str, Any], ask: Ask, clamp: bool) -> dict[str, Any]:
    wanted = dict(document)
    for field in ("max_tokens", "max_completion_tokens"):
        if isinstance(document.get(field), int) and document[field] <= 0:
            del wanted[field]
    if clamp:
        wanted[ask.output_field] = 77
        if ask.output_field == "max_completion_tokens":
            wanted.pop("max_tokens", None)
    if document.get("stream"):
        options = document.get("stream_options") or {}
        if not options.get("include_usage"):
            kept = {key: value for key, value in options.items() if key != "continuous_usage_stats"}
            wanted["stream_options"] = {**kept, "include_usage": True}
    return wanted


@given(DOCUMENTS, st.permutations(range(8)), st.booleans(), st.booleans(), st.sampled_from([None, 2]))
def test_the_document_upstream_is_the_clients_with_exactly_the_intended_changes(
    document: dict[str, Any], order: list[int], clamp: bool, ascii_only: bool, indent: int | None
) -> None:
    items = list(document.items())
    document = dict(items[i] for i in order if i < len(items))
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")
    document = json.loads(body)
    ask = chat.parse(body, JSON)
    clamp = clamp and ask.output_tokens is not None
    sent = upstream_body(ask, CLAMPED if clamp else AS_IS)
    assert json.loads(sent) == expected_changes(document, ask, clamp)


def test_a_long_conversation_is_rewritten_in_well_under_its_parsing_time() -> None:
    messages = [{"role": "user", "content": "lorem ipsum dolor sit amet " * 80} for _ in range(120)]
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 32000, "stream": True}).encode()
    assert len(body) > 250_000
    ask = chat.parse(body, JSON)

    def best_s(offer: Offer) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            upstream_body(ask, offer)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_s(AS_IS) < 0.001
    assert best_s(CLAMPED) < 0.010
    assert orjson.loads(upstream_body(ask, CLAMPED))["messages"] == messages
