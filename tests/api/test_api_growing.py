"""A body that grew from an earlier one is parsed to what parsing it whole gives, or left to others where that fails."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.body import parse_object
from gateway.api.growing import LEAST_BYTES, GrowingBodies
from gateway.exceptions import BadRequest

FILL = "x" * LEAST_BYTES


def message(number: int) -> dict[str, Any]:
    texts = ["plain", 'with "quotes", "model": 1}],"model":"x"', "]}", "],\\", "é 👍", "{[{[" * 20, '"messages":[']
    return {"role": "user", "content": texts[number % len(texts)], "n": [number, {"deep": [[number]]}]}


def body(messages: list[Any], *, spaced: bool = False, field: str = "messages", **after: Any) -> bytes:
    document = {"metadata": {"x": [1]}, field: messages, **after}
    return json.dumps(document, ensure_ascii=False, separators=None if spaced else (",", ":")).encode()


def conversation(length: int) -> list[Any]:
    return [{"role": "system", "content": FILL}, *(message(number) for number in range(length))]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("field", ["messages", "input"])
def test_each_turn_is_parsed_as_a_whole_and_shares_what_it_had(spaced: bool, field: str) -> None:
    bodies = GrowingBodies(1 << 20)
    before: list[Any] = []
    for length in range(12):
        raw = body(conversation(length), spaced=spaced, field=field, model="m", tools=[{"a": [{"model": 1}]}])
        parsed = bodies.parse(raw)
        assert parsed is not None
        assert orjson.dumps(parsed) == orjson.dumps(orjson.loads(raw))
        assert all(ours is theirs for ours, theirs in zip(parsed[field], before, strict=False))
        before = parsed[field]


def test_a_changed_tail_an_edited_message_and_a_shorter_conversation_are_seen() -> None:
    bodies = GrowingBodies(1 << 20)
    long = conversation(6)
    edited = [*long[:3], {"role": "user", "content": "edited"}, *long[4:]]
    for messages, after in (
        (long, {"model": "m"}),
        (long, {"model": "other", "stream": True}),
        (long[:3], {"model": "m"}),
        (edited, {"model": "m"}),
        ([*edited, message(1)], {"model": "m", "max_tokens": 3}),
        (long, {"max_tokens": 3, "model": "m"}),
    ):
        raw = body(messages, **after)
        assert bodies.parse(raw) == orjson.loads(raw)


# What may stand between the messages seen before and the end of the body, valid or not.
PIECES = [
    ",",
    "]",
    "}",
    "[",
    "{",
    '"',
    '"model":"m"',
    '{"role":"user","content":"hi"}',
    "1",
    "null",
    " ",
    "\\",
    ":",
    "é",
]
PIECES += ['"messages":[1]', '],"model":"m"}', ',{"a":1}', '],"messages":[2],"model":"m"}', "]}", '],"stream":true}']


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=7), st.booleans())
def test_whatever_follows_is_taken_as_the_parser_takes_it(pieces: list[str], ends_as_before: bool) -> None:
    bodies = GrowingBodies(1 << 20)
    first = body(conversation(2), model="m")
    assert bodies.parse(first) is not None
    start = first[: first.index(b'],"model"')]
    raw = start + "".join(pieces).encode() + (b'],"model":"m"}' if ends_as_before else b"")
    try:
        expected = orjson.loads(raw)
    except orjson.JSONDecodeError:
        assert bodies.parse(raw) is None
    else:
        parsed = bodies.parse(raw)
        assert parsed is None or orjson.dumps(parsed) == orjson.dumps(expected)


def test_random_edits_of_growing_bodies_parse_as_a_whole() -> None:
    dice, bodies = random.Random(7), GrowingBodies(1 << 22)
    messages = conversation(3)
    shared = 0
    for step in range(600):
        kind = dice.random()
        if kind < 0.6:
            messages = [*messages, message(step)]
        elif kind < 0.8:
            messages = messages[: dice.randint(1, len(messages))]
        else:
            place = dice.randint(1, len(messages) - 1) if len(messages) > 1 else 1
            messages = [*messages[:place], message(step + 1000), *messages[place + 1 :]]
        after = {"model": "m"} if dice.random() < 0.8 else {"model": "m", "max_tokens": step, "tools": [message(step)]}
        raw = body(messages, **after)
        parsed = bodies.parse(raw)
        if len(raw) >= LEAST_BYTES:
            assert parsed is not None
            assert orjson.dumps(parsed) == orjson.dumps(orjson.loads(raw))
            shared += 1
    assert shared > 300


def test_messages_that_stand_elsewhere_or_twice_are_left_to_the_parser() -> None:
    bodies = GrowingBodies(1 << 20)
    messages = json.dumps(conversation(2), separators=(",", ":"))
    for raw in (
        f'{{"metadata":{{"messages":[1]}},"messages":{messages},"model":"m"}}',
        f'{{"messages":[1],"messages":{messages},"model":"m"}}',
        f'{{"messages":{messages},"model":[2],"model":"m"}}',
        f'{{"messages":{messages},"model":"m","messages":[1]}}',
        f'{{"messages":[],"model":"{FILL}"}}',
        f'[{{"messages":{messages},"model":"m"}}]',
    ):
        for _ in range(2):
            parsed = bodies.parse(raw.encode())
            assert parsed is None or orjson.dumps(parsed) == orjson.dumps(orjson.loads(raw))


def test_what_is_remembered_is_bounded() -> None:
    bodies = GrowingBodies(100_000)
    for number in range(50):
        bodies.parse(body([{"content": FILL + str(number)}], model="m"))
        assert 0 < bodies.kept_bytes <= 100_000


def test_deep_nesting_is_refused_in_what_is_new_too() -> None:
    deep = b"[" * 300 + b"]" * 300
    start = body(conversation(3), model="m")
    assert parse_object(start, "application/json")["model"] == "m"
    for raw in (
        start.replace(b'],"model"', b"," + deep + b'],"model"'),
        start.replace(b'"model":"m"', b'"model":' + deep),
        start.replace(b'"metadata":', b'"metadata":' + deep + b',"m":'),
    ):
        assert raw != start
        with pytest.raises(BadRequest, match="nested deeper"):
            parse_object(raw, "application/json")


def test_long_fields_after_the_messages_count_as_kept() -> None:
    bodies = GrowingBodies(100_000)
    for number in range(20):
        assert bodies.parse(body([message(0), {"n": number}], tools=[FILL, number])) is not None
        assert LEAST_BYTES < bodies.kept_bytes <= 100_000
