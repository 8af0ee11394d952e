"""Streams as bytes: whole events, their number, and the usage in them."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.sse import (
    EventSplitter,
    count_events,
    find_usage,
    has_done,
    has_usage,
    json_usage,
    output_tokens_of,
    prompt_tokens_of,
    split_events,
    strip_usage,
)

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
DONE = b"data: [DONE]\n\n"


def event(document: dict[str, Any], newline: str = "\n") -> bytes:
    return f"data: {json.dumps(document, separators=(',', ':'))}{newline}{newline}".encode()


def chunk(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}


LAST = {"id": "c", "choices": [], "usage": USAGE}


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


# --- whole events

EVENTS = st.lists(
    st.sampled_from(
        [
            event(chunk()),
            event(chunk("é \n\n \r\n data: x")),
            event(chunk(), "\r\n"),
            event(LAST),
            b": keep-alive\n\n",
            b"event: ping\r\ndata: {}\r\n\r\n",
            b"data: 1\ndata: 2\n\n",
            DONE,
        ]
    ),
    max_size=12,
)


@given(
    EVENTS, st.binary(max_size=5).filter(lambda tail: b"\n" not in tail), st.lists(st.integers(0, 5000), max_size=12)
)
def test_nothing_is_lost_and_no_event_is_torn_wherever_the_chunks_break(
    events: list[bytes], tail: bytes, cuts: list[int]
) -> None:
    splitter = EventSplitter()
    outs = [splitter.feed(piece) for piece in pieces(b"".join(events) + tail, cuts)]
    assert all(out == b"" or out.endswith((b"\n\n", b"\r\n\r\n")) for out in outs)
    assert b"".join(outs) == b"".join(events)
    assert splitter.flush() == tail
    assert splitter.flush() == b""


def test_every_event_leaves_as_soon_as_it_is_whole() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") == b""
    assert splitter.feed(b"\ndata: 2\n\ndat") == b"data: 1\n\ndata: 2\n\n"
    assert splitter.feed(b"a: 3\r\n\r") == b""
    assert splitter.feed(b"\n") == b"data: 3\r\n\r\n"


def test_a_chunk_of_whole_events_is_returned_itself() -> None:
    data = event(chunk())
    assert EventSplitter().feed(data) is data


def test_an_event_beyond_the_limit_is_not_held() -> None:
    splitter = EventSplitter(limit_bytes=100)
    assert splitter.feed(b"data: " + b"x" * 90) == b""
    assert splitter.feed(b"y" * 10) == b"data: " + b"x" * 90 + b"y" * 10
    assert splitter.feed(b"z\n") == b"z\n"
    assert splitter.feed(b"\ndata: 2") == b"\n"
    assert splitter.feed(b"\n\n") == b"data: 2\n\n"


def test_a_long_event_in_many_pieces_costs_no_more_than_its_length() -> None:
    def seconds(count: int) -> float:
        splitter = EventSplitter()
        start = time.perf_counter()
        for _ in range(count):
            splitter.feed(b"x" * 64)
        return time.perf_counter() - start

    seconds(1000)
    assert seconds(40_000) < 40 * max(seconds(4_000), 0.0005)


# --- counting


def test_events_with_data_are_counted_and_nothing_else() -> None:
    assert count_events(b"") == 0
    assert count_events(b": keep-alive\n\n") == 0
    assert count_events(DONE) == 0
    assert count_events(event(chunk("data: x\ndata: y"))) == 1
    assert count_events(b"event: a\ndata: {}\n\n: c\n\n" + event(chunk()) * 3 + DONE) == 4
    assert count_events(event(chunk(), "\r\n") * 2 + b"data: [DONE]\r\n\r\n") == 2
    assert count_events(event(chunk("data: [DONE]"))) == 1


@pytest.mark.parametrize(
    ("data", "done"),
    [
        (DONE, True),
        (event(chunk()) + b"data:[DONE]\n\n", True),
        (event(chunk()) + b"data: [DONE]", True),
        (event(chunk("data: [DONE]")), False),
        (event(chunk()), False),
    ],
)
def test_the_end_is_seen(data: bytes, done: bool) -> None:
    assert has_done(data) is done


# --- usage


@pytest.mark.parametrize(
    ("data", "usage"),
    [
        (event(LAST), USAGE),
        (event(LAST, "\r\n"), USAGE),
        (event(LAST).rstrip(), USAGE),
        (event(chunk(usage=USAGE)), USAGE),
        (b'data: {"usage" : {"prompt_tokens":1}}\n\n', {"prompt_tokens": 1}),
        (b'event: message_start\ndata: {"message":{"usage":{"input_tokens":4}}}\n\n', {"input_tokens": 4}),
        (
            b'event: x\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":4}}}\n\n',
            {"input_tokens": 4},
        ),
        (b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":1}}\n\n', {"prompt_tokens": 1}),
        (event(chunk()), None),
        (event(chunk(usage=None)), None),
        (event(chunk('"usage":{"prompt_tokens":1}')), None),
        (b'data: {"a":{"usage":{"prompt_tokens":1}}}\n\n', None),
        (b'data: {"usage":{broken\n\n', None),
        (b'data: [{"usage":{}}]\n\n', None),
        (DONE, None),
    ],
)
def test_usage_is_found_where_each_dialect_puts_it(data: bytes, usage: dict[str, Any] | None) -> None:
    assert find_usage(data) == usage


def test_usage_in_the_text_of_an_answer_is_text() -> None:
    assert not has_usage(event(chunk('{"usage":{"prompt_tokens":1}}')))


STREAM = [
    event(chunk("a", usage=USAGE)),
    b": keep-alive\n\n",
    event(chunk("b", usage=USAGE), "\r\n"),
    event(LAST),
    DONE,
]
PLAIN = [event(chunk("a")), b": keep-alive\n\n", event(chunk("b"), "\r\n")]


@pytest.mark.parametrize(
    ("at_end", "in_every_chunk", "expected"),
    [
        (False, False, [*PLAIN, DONE]),
        (True, False, [*PLAIN, event(LAST), DONE]),
        (True, True, STREAM),
    ],
)
def test_the_client_gets_the_usage_it_asked_for_and_we_get_all(
    at_end: bool, in_every_chunk: bool, expected: list[bytes]
) -> None:
    data, usage = strip_usage(b"".join(STREAM), at_end=at_end, in_every_chunk=in_every_chunk)
    assert data == b"".join(expected)
    assert usage == USAGE


def test_a_stream_without_usage_passes_as_the_same_bytes() -> None:
    data = b"".join(PLAIN)
    stripped, usage = strip_usage(data, at_end=False, in_every_chunk=False)
    assert stripped is data
    assert usage is None


@pytest.mark.parametrize(
    "odd", [b'data: {"usage":{broken\n\n', b'data: {"x":{"usage":{}}}\n\n', event(chunk(usage=None))]
)
def test_what_is_not_understood_is_not_touched(odd: bytes) -> None:
    assert strip_usage(odd, at_end=False, in_every_chunk=False) == (odd, None)


def test_fields_beside_the_data_survive_the_stripping() -> None:
    data = b'id: 5\ndata: {"choices":[1],"usage":{"prompt_tokens":1}}\nretry: 9\n\n'
    stripped, _ = strip_usage(data, at_end=False, in_every_chunk=False)
    assert stripped == b'id: 5\ndata: {"choices":[1]}\nretry: 9\n\n'


def test_data_over_several_lines_is_joined_when_stripped() -> None:
    data = b'id: 5\ndata: {"choices":[1],\ndata: "usage":{"prompt_tokens":1}}\n\n'
    stripped, usage = strip_usage(data, at_end=False, in_every_chunk=False)
    assert stripped == b'id: 5\ndata: {"choices":[1]}\n\n'
    assert usage == {"prompt_tokens": 1}


@given(EVENTS, st.booleans(), st.booleans())
def test_events_are_cut_and_joined_without_loss(events: list[bytes], at_end: bool, in_every_chunk: bool) -> None:
    data = b"".join(events)
    assert split_events(data) == events
    stripped, _ = strip_usage(data, at_end=at_end, in_every_chunk=in_every_chunk)
    assert stripped == (data if at_end else data.replace(event(LAST), b""))


def test_the_usage_of_a_whole_answer() -> None:
    assert json_usage(json.dumps({"choices": [], "usage": USAGE}).encode()) == (7, 3)
    assert json_usage(b'{"usage":{"input_tokens":9}}') == (9, None)
    assert json_usage(b'{"usage":{"prompt_tokens":null}}') == (None, None)
    assert json_usage(b'{"usage":null}') == (None, None)
    assert json_usage(b"{}") == (None, None)


@pytest.mark.parametrize("body", [b"", b'{"usage":{', b'["usage"]', b"\xff"])
def test_an_answer_that_is_no_object_is_garbage(body: bytes) -> None:
    with pytest.raises(ValueError):
        json_usage(body)


def test_usage_inside_an_event_of_another_dialect_is_read_and_left() -> None:
    data = b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":4}}}\n\n'
    assert strip_usage(data, at_end=True, in_every_chunk=True) == (data, {"input_tokens": 4})


def test_the_numbers_of_both_dialects() -> None:
    assert prompt_tokens_of(USAGE) == prompt_tokens_of({"input_tokens": 7}) == 7
    assert output_tokens_of(USAGE) == output_tokens_of({"output_tokens": 3}) == 3
    assert prompt_tokens_of({"prompt_tokens": True}) is None


def test_a_chunk_with_nothing_to_do_costs_next_to_nothing() -> None:
    splitter = EventSplitter()
    data = event(chunk("hello", model="Qwen/Qwen3-0.6B", created=1764480000, object="chat.completion.chunk"))

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(2000):
            out, _ = strip_usage(splitter.feed(data), at_end=False, in_every_chunk=False)
            count_events(out)
        return (time.perf_counter() - start) / 2000

    # About 1 µs on an idle core; the bound leaves room for a busy machine and still catches a JSON parse (3 µs).
    assert min(seconds() for _ in range(20)) < 2e-6
