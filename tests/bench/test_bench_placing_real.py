"""Placing on real servers: the conversations that are played, and what the servers' counters come to."""

from __future__ import annotations

import json
import lzma
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.placing_real.conversations import ANSWER_TOKENS, Ask, NoConversations, answer_tokens, body, made, read
from bench.placing_real.figures import COUNTERS, Reading, Run, Seen, failures, quantile, rows, table
from bench.placing_real.playing import kind_of, says_something

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Help."},
    {"role": "user", "content": "Book a flight."},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": "x" * 400}}]},
    {"role": "tool", "content": "None found."},
    {"role": "assistant", "content": "There is none."},
]


def page(preemptions: int, hits: int, queries: int, buckets: dict[str, int]) -> str:
    lines = [
        "# TYPE vllm:num_preemptions_total counter",
        f'vllm:num_preemptions_total{{engine="0"}} {preemptions}',
        "# TYPE vllm:prefix_cache_hits_total counter",
        f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}',
        "# TYPE vllm:prefix_cache_queries_total counter",
        f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}',
        "# TYPE vllm:time_to_first_token_seconds histogram",
    ]
    lines += [f'vllm:time_to_first_token_seconds_bucket{{le="{le}"}} {count}' for le, count in buckets.items()]
    return "\n".join([*lines, f"vllm:time_to_first_token_seconds_count {buckets['+Inf']}", ""])


def test_made_conversations_grow_from_one_beginning_and_are_the_same_again() -> None:
    once, again = made(seed=3, count=4), made(seed=3, count=4)
    assert once == again and once != made(seed=4, count=4)
    assert len({conversation.messages[0]["content"] for conversation in once}) == 1
    assert len({json.dumps(conversation.tools) for conversation in once}) == 1
    for conversation in once:
        ends = [ask.messages for ask in conversation.asks]
        assert ends == sorted(set(ends)) and 4 <= len(ends) <= 10
        assert all(conversation.messages[end - 1]["role"] in ("user", "tool") for end in ends)
        assert all(ANSWER_TOKENS[0] <= ask.answer_tokens <= ANSWER_TOKENS[1] for ask in conversation.asks)


@pytest.mark.parametrize("name", ["some.json", "some.jsonl", "some.json.xz"])
def test_recorded_ones_are_read_from_whatever_form_they_have(tmp_path: Path, name: str) -> None:
    documents = [MESSAGES, {"messages": MESSAGES, "tools": [{"type": "function"}]}, {"traj": MESSAGES}, {"else": 1}]
    text = "\n".join(map(json.dumps, documents)) if "jsonl" in name else json.dumps(documents)
    path = tmp_path / name
    path.write_bytes(lzma.compress(text.encode()) if name.endswith("xz") else text.encode())
    found = read(path)
    assert [len(conversation.tools) for conversation in found] == [0, 1, 0]
    assert found[0].asks == (Ask(2, answer_tokens(MESSAGES[2])), Ask(4, answer_tokens(MESSAGES[4])))


@pytest.mark.parametrize("text", ["", "{", "[]", '[{"messages": "no"}]', '[[{"role": "user", "content": "x"}]]'])
def test_a_file_without_conversations_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(NoConversations, match=r"bad\.json"):
        read(path)
    with pytest.raises(NoConversations, match=r"none\.json"):
        read(tmp_path / "none.json")


def test_an_answer_ends_where_the_recorded_one_did_and_the_budget_does_not_tell() -> None:
    assert answer_tokens(MESSAGES[2]) > 100
    assert answer_tokens(MESSAGES[4]) == ANSWER_TOKENS[0]
    conversation = made(seed=1, count=1)[0]
    document = body(conversation, conversation.asks[1], "m", 1024, 7)
    assert document["messages"] == list(conversation.messages[: conversation.asks[1].messages])
    assert document["max_tokens"] == 1024 and "ignore_eos" not in document
    assert (document["min_tokens"], document["stop_token_ids"]) == (conversation.asks[1].answer_tokens, [7])
    assert document["logit_bias"] == {"7": 100}


def test_counters_are_differences_of_all_servers() -> None:
    before = Reading.of(page(3, 10, 100, {"0.1": 5, "1.0": 5, "+Inf": 5}))
    after = Reading.of(page(5, 70, 200, {"0.1": 5, "1.0": 13, "+Inf": 15}))
    both = after.since(before) + after.since(before)
    assert both.counters["num_preemptions"] == 4
    assert both.counters["prefix_cache_hits"] / both.counters["prefix_cache_queries"] == 0.6
    assert both.first_token == {0.1: 0, 1.0: 16, math.inf: 20}
    assert Reading.of("").counters == dict.fromkeys(COUNTERS, 0.0)


def test_quantiles_are_prometheus_own() -> None:
    buckets = {0.1: 0.0, 1.0: 16.0, math.inf: 20.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.1 + 0.9 * 10 / 16)
    assert quantile(buckets, 0.8) == 1.0
    assert quantile(buckets, 0.99) == 1.0  # unbounded: all that is known is the lower bound
    assert math.isnan(quantile({}, 0.5)) and math.isnan(quantile({1.0: 0.0, math.inf: 0.0}, 0.5))


def test_the_table_has_a_column_for_each_target_and_every_round_in_a_cell() -> None:
    reading = Reading.of(page(1, 30, 60, {"0.1": 1, "1.0": 4, "+Inf": 4}))
    seen = Seen([0.2, 0.4], Counter({"400 BadRequestError: too long": 1}), 3, 90, 1, 2, 30.0)
    runs = [Run("none", seen, (reading, reading)), Run("kvgate", seen, (reading,)), Run("none", seen, (reading,))]
    figures = rows(runs[0])
    assert figures["requests answered"] == 2 and figures["requests failed"] == 1
    assert figures["conversations to their end, %"] == 50
    assert figures["output tokens/s"] == 3
    assert figures["prompt tokens from the prefix cache, %"] == 50
    assert figures["preemptions"] == 2
    assert "| | none | kvgate |" in table(runs)
    assert "| preemptions | 2 / 1 | 1 |" in table(runs)
    assert failures(runs).splitlines()[0] == "none: 1 x 400 BadRequestError: too long"
    nothing = rows(Run("none", Seen(), (Reading.of(""),)))
    assert math.isnan(nothing["first token as the client sees it, p50, s"])


def test_what_failed_and_what_was_said_are_told_from_the_rest() -> None:
    assert kind_of('{"error": {"type": "BadRequestError", "message": "Too long"}}') == "BadRequestError: Too long"
    assert kind_of('{"object": "error", "code": 400, "message": "Too long"}') == "400: Too long"
    assert kind_of("upstream timed out") == "upstream timed out"
    assert kind_of("[]").startswith("None")
    assert not says_something({"delta": {"role": "assistant", "content": ""}})
    assert says_something({"delta": {"content": "a"}})
    assert says_something({"delta": {}, "finish_reason": "stop"})
