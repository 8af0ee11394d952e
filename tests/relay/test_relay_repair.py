"""Answers put right: streams of any backend as clients can take them, and the usage that is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.upstream_errors import error_event, event_error
from gateway.exceptions import BackendFailed, ContextOverflow
from gateway.relay.events import EventStream
from gateway.relay.repair import StreamRepair
from gateway.relay.sse import split_events
from gateway.relay.told import TRUE, UsageTold
from gateway.types import Ask, Dialect

DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return event(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **fields}
    )


def event(document: dict[str, Any]) -> bytes:
    named = f"event: {document['type']}\n".encode() if "type" in document else b""
    return named + b"data: " + json.dumps(document).encode() + b"\n\n"


def usage(prompt: int = 100, output: int = 5) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def relayed(*events: bytes, dialect: Dialect = Dialect.CHAT, one_by_one: bool = True, **repair: Any) -> tuple[Any, ...]:
    """What a client that asked for usage gets, the names of the repairs, and the stream."""
    mending = StreamRepair(dialect, **repair)
    ask = Ask(dialect, "/", "m", None, b"", {}, stream=True, include_usage=True)
    stream = EventStream(ask, mending)
    sent = b"".join(stream.feed(data) for data in (events if one_by_one else [b"".join(events)]))
    sent += stream.close()
    return sent, mending.names, stream


def documents(sent: bytes) -> list[dict[str, Any]]:
    return [json.loads(one.split(b"data: ", 1)[1]) for one in split_events(sent) if one != DONE]


def test_a_sound_stream_passes_untouched() -> None:
    events = [chunk({"content": "a"}), chunk({}, "stop"), chunk(usage=usage()), DONE]
    sent, names, stream = relayed(*events)
    assert sent == b"".join(events)
    assert names == set()
    assert stream.finished


# --- finish reasons


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize(
    ("deltas", "budget_tokens", "reason"),
    [
        ([{"content": "a"}], None, "stop"),
        ([{"content": "a"}], 6, "stop"),
        ([{"content": "a"}], 5, "length"),
        ([{"tool_calls": [{"index": 0, "id": "x"}]}], 50, "tool_calls"),
        ([{"tool_calls": [{"index": 0, "id": "x"}]}], 5, "length"),
    ],
)
def test_a_missing_finish_reason_is_told(
    deltas: list[dict[str, Any]], budget_tokens: int | None, reason: str, one_by_one: bool
) -> None:
    events = [*(chunk(delta) for delta in deltas), chunk(usage=usage(100, 5)), DONE]
    sent, names, _ = relayed(*events, budget_tokens=budget_tokens, one_by_one=one_by_one)
    told = [document for document in documents(sent) if document["choices"] and document["choices"][0]["finish_reason"]]
    assert [document["choices"][0]["finish_reason"] for document in told] == [reason]
    assert {key: told[0][key] for key in ("id", "object", "created", "model")} == {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
    }
    assert names == {"finish_reason"}
    assert sent.endswith(DONE)
    if not one_by_one:  # told before the usage where that is still possible
        assert documents(sent)[-1]["choices"] == []


def test_no_finish_reason_is_told_after_an_error_or_where_it_is_not_wanted() -> None:
    failed = event({"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}})
    assert relayed(chunk({"content": "a"}), failed, DONE)[1] == set()
    assert relayed(chunk({"content": "a"}), DONE, disabled=("finish_reason",))[0] == chunk({"content": "a"}) + DONE


# --- ends


def test_a_stream_that_lacks_only_its_mark_gets_it() -> None:
    sent, names, stream = relayed(chunk({"content": "a"}), chunk({}, "stop"))
    assert sent.endswith(DONE)
    assert names == {"stream_end"}
    assert stream.finished


def test_a_stream_that_breaks_off_has_not_finished() -> None:
    for events, repair in (([chunk({"content": "a"})], {}), ([chunk({}, "stop")], {"disabled": ("stream_end",)})):
        sent, _, stream = relayed(*events, **repair)
        assert not stream.finished
        assert not sent.endswith(DONE)


# --- null tool calls


def test_null_tool_calls_are_taken_out_of_deltas() -> None:
    events = [chunk({"content": "a", "tool_calls": None, "function_call": None}), chunk({}, "stop"), DONE]
    sent, names, _ = relayed(*events)
    assert documents(sent)[0]["choices"][0]["delta"] == {"content": "a"}
    assert names == {"null_tool_calls"}
    assert relayed(*events, disabled=("null_tool_calls",))[0] == b"".join(events)


def test_text_that_looks_like_them_is_left() -> None:
    events = [chunk({"content": '"tool_calls": null "error": {"a'}), chunk({}, "stop"), DONE]
    assert relayed(*events)[0] == b"".join(events)


# --- errors

NET = {
    "message": "Input length (40) exceeds model's maximum context length (32).",
    "type": "BadRequestError",
    "code": 400,
}
DIED = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}


def reading(dialect: Dialect = Dialect.CHAT) -> dict[str, Any]:
    return {
        "read_error": lambda data: event_error(data, dialect),
        "word_error": lambda error: error_event(error, dialect),
    }


def test_an_overflow_within_a_stream_is_told_in_our_words() -> None:
    sent, _, _ = relayed(chunk({"content": ""}), event({"error": NET}), DONE, **reading())
    error = documents(sent)[1]["error"]
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 32)
    assert sent.count(DONE) == 1


def test_an_error_that_begins_a_stream_can_be_told_by_its_status() -> None:
    mending = StreamRepair(Dialect.CHAT, **reading())
    assert isinstance(mending.early_error(event({"error": NET})), ContextOverflow)
    assert isinstance(mending.early_error(event({"error": DIED}) + DONE), BackendFailed)
    assert mending.early_error(chunk({"content": '"error": {'})) is None
    assert mending.early_error(event({"error": {"message": "The tool call cannot be parsed.", "code": 400}})) is None
    assert mending.early_error(event({"type": "response.created", "response": {"error": None}})) is None


def test_the_place_of_an_error_in_a_responses_stream() -> None:
    mending = StreamRepair(Dialect.RESPONSES)
    assert mending.place() == ("resp_failed", 0)
    mending.passed(event({"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1"}}), None)
    mending.passed(event({"type": "response.output_text.delta", "sequence_number": 4, "delta": "a"}), None)
    assert mending.place() == ("resp_1", 5)


# --- usage


def test_usage_is_true_unless_told_otherwise() -> None:
    assert TRUE.is_true
    body = b'{"usage": {"prompt_tokens":  1}}'
    assert TRUE.tell_in(body) is body


def test_usage_of_a_trimmed_prompt_can_be_that_of_the_whole() -> None:
    told = UsageTold(added_prompt_tokens=900).told(usage(100, 5))
    assert told == {"prompt_tokens": 1000, "completion_tokens": 5, "total_tokens": 1005}


@pytest.mark.parametrize("used_tokens", [1, 16_384, 32_000, 32_768])
def test_scaled_usage_reaches_the_clients_window_when_the_true_one_is_full(used_tokens: int) -> None:
    told = UsageTold(factor=200_000 / 32_768).told(usage(used_tokens, 0))["prompt_tokens"]
    assert told >= 200_000 * used_tokens / 32_768
    assert told <= 200_000 * used_tokens / 32_768 + 1


def test_scaled_usage_of_anthropic_and_responses() -> None:
    twice = UsageTold(factor=2.0)
    anthropic = {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 3, "service_tier": "x"}
    assert twice.told(anthropic) == {
        "input_tokens": 20,
        "cache_read_input_tokens": 10,
        "output_tokens": 6,
        "service_tier": "x",
    }
    responses = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 3,
        "total_tokens": 13,
    }
    assert twice.told(responses) == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 6,
        "total_tokens": 26,
    }
    assert UsageTold(factor=1.1).told({"input_tokens": True, "output_tokens": None}) == {
        "input_tokens": True,
        "output_tokens": None,
    }


def test_a_stream_tells_scaled_usage_and_the_gateway_keeps_the_true_one() -> None:
    sent, names, stream = relayed(chunk({}, "stop"), chunk(usage=usage(100, 5)), DONE, told=UsageTold(factor=2.0))
    assert documents(sent)[-1]["usage"] == {"prompt_tokens": 200, "completion_tokens": 10, "total_tokens": 210}
    assert (stream.prompt_tokens, stream.output_tokens) == (100, 5)
    assert names == set()


def test_anthropics_stream_tells_scaled_usage_where_it_stands() -> None:
    start = event({"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 0}}})
    delta = event({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 7}})
    sent, _, stream = relayed(start, delta, dialect=Dialect.MESSAGES, told=UsageTold(factor=3.0))
    assert documents(sent)[0]["message"]["usage"] == {"input_tokens": 30, "output_tokens": 0}
    assert documents(sent)[1]["usage"] == {"output_tokens": 21}
    assert (stream.prompt_tokens, stream.output_tokens) == (10, 7)


def test_a_whole_answer_tells_scaled_usage() -> None:
    body = json.dumps({"id": "c", "choices": [], "usage": usage(100, 5)}).encode()
    assert json.loads(UsageTold(factor=2.0).tell_in(body))["usage"]["prompt_tokens"] == 200
    bare = b'{"id":  "c"}'
    assert UsageTold(factor=2.0).tell_in(bare) is bare
