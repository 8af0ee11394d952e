"""Conversations that outgrow the window go on through the gateway, and vLLM's prefix cache keeps serving them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from e2e_backends import Backends
from e2e_gateway import Gateway, serving
from e2e_processes import PLAIN

TURNS = 60
OUTPUT_TOKENS = 4
LIMIT_MARGIN_TOKENS = OUTPUT_TOKENS  # the output floor is at most what is asked for
INPUT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
TRIM = {"x-kvgate-overflow": "trim"}
WORDS = ("alpha", "beta", "gamma", "delta", "error", "file", "line", "test", "value", "return", "count", "window")
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def narrow(backends: Backends) -> Iterator[Gateway]:
    """A gateway that has the small window only."""
    with serving([backends.small.url], backends.model) as gateway:
        yield gateway


def words(source: random.Random, count: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(count))


def requests(system: str) -> list[list[dict[str, Any]]]:
    """The messages of each request of a conversation with a tool, as a client would send them."""
    source = random.Random(7)
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{system} {words(source, 120)}"}]
    sent = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Question {turn}: {words(source, 30)}"})
        sent.append(list(messages))
        if turn % 3 == 1:
            function = {"name": "read_file", "arguments": f'{{"path": "src/{turn}.py"}}'}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": words(source, 150)})
            sent.append(list(messages))
        messages.append({"role": "assistant", "content": words(source, 40)})
    return sent


def usage_of(answer: httpx2.Response) -> tuple[int, int]:
    """Prompt tokens, and how many of them the prefix cache had."""
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def hits_through_the_gateway(gateway: Gateway, block_size: int) -> tuple[int, int, int]:
    """Hit tokens; those of a conversation of equal prompts whose prefix never changes; and moves of the cut."""
    hits = possible = moves = untrimmed_before = 0
    dropped_before = "0"
    for messages in requests("You are a careful engineer."):
        body = {"messages": messages, "tools": [TOOL], "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        answer = gateway.http.post("/v1/chat/completions", json={"model": gateway.model, **body}, headers=TRIM)
        prompt, cached = usage_of(answer)
        if answer.headers["x-kvgate-count-kind"] == "exact":  # the first may come before the tokenizer is loaded
            assert int(answer.headers["x-kvgate-prompt-tokens"]) == prompt
        untrimmed = int(answer.headers.get("x-kvgate-untrimmed-prompt-tokens", prompt))
        if untrimmed_before:
            hits += cached
            possible += (prompt - (untrimmed - untrimmed_before)) // block_size * block_size
        dropped = answer.headers.get("x-kvgate-trimmed-messages", "0")
        moves += dropped != dropped_before
        untrimmed_before, dropped_before = untrimmed, dropped
    return hits, possible, moves


def hits_of_cutting_to_fit(backends: Backends) -> tuple[int, int]:
    """The same for a client that drops its oldest turns until it just fits, and sends to the server itself."""
    hits = possible = 0
    start, before = 1, 0
    limit = backends.small.window_tokens - LIMIT_MARGIN_TOKENS
    with httpx2.Client(base_url=backends.small.url, timeout=90, **PLAIN) as http:

        def tokens(messages: list[dict[str, Any]]) -> int:
            body = {"model": backends.model, "messages": messages, "tools": [TOOL]}
            return int(http.post("/tokenize", json=body).json()["count"])

        for messages in requests("You are a hasty engineer."):
            full = tokens(messages)
            kept = messages
            while start > 1 or tokens(kept) > limit:
                kept = [messages[0], *messages[start:]]
                if tokens(kept) <= limit:
                    break
                start = next(n for n in range(start + 1, len(messages)) if messages[n]["role"] == "user")
            body = {"messages": kept, "tools": [TOOL], "max_tokens": OUTPUT_TOKENS, "temperature": 0}
            prompt, cached = usage_of(http.post("/v1/chat/completions", json={"model": backends.model, **body}))
            if before:
                hits += cached
                possible += (prompt - (full - before)) // backends.small.block_size_tokens
            before = full
    return hits, possible * backends.small.block_size_tokens


def test_a_long_conversation_keeps_its_prefix_cache(backends: Backends, narrow: Gateway) -> None:
    hits, possible, moves = hits_through_the_gateway(narrow, backends.small.block_size_tokens)
    naive_hits, naive_possible = hits_of_cutting_to_fit(backends)
    trimmed, naive = hits / possible, naive_hits / naive_possible
    print(  # noqa: T201
        f"\n{TURNS} turns, window {backends.small.window_tokens}, {backends.engine}: of the tokens an untrimmed "
        f"conversation would find cached, trimming keeps {trimmed:.1%} ({hits} of {possible}; the cut moved {moves} "
        f"times), cutting to fit {naive:.1%} ({naive_hits} of {naive_possible})"
    )
    assert moves >= 3, "the conversation did not outgrow the window often enough"
    assert trimmed >= 0.8
    assert trimmed > naive + 0.1


def test_auto_refuses_a_conversation_once_and_then_trims_it(backends: Backends, narrow: Gateway) -> None:
    messages = requests("You are refused once.")[-1]
    first, again = (narrow.chat(messages=messages, tools=[TOOL], max_tokens=OUTPUT_TOKENS) for _ in range(2))
    assert first.status_code == 400
    assert first.json()["error"]["code"] == "context_length_exceeded"
    prompt, _ = usage_of(again)
    assert prompt <= backends.small.window_tokens - OUTPUT_TOKENS
    assert int(again.headers["x-kvgate-trimmed-tokens"]) > 0
    other = narrow.chat(messages=requests("You are another.")[-1], max_tokens=OUTPUT_TOKENS)
    assert other.status_code == 400


def test_what_cannot_be_removed_is_said(backends: Backends, narrow: Gateway) -> None:
    """A system prompt as long as the window: nothing that may go would help."""
    messages = [{"role": "system", "content": " a" * backends.small.window_tokens}, {"role": "user", "content": "hi"}]
    body = {"model": narrow.model, "messages": messages, "max_tokens": OUTPUT_TOKENS}
    answer = narrow.http.post("/v1/chat/completions", json=body, headers=TRIM)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "the system messages take" in error["message"]


def test_a_trimmed_stream_ends_as_any_other(backends: Backends, narrow: Gateway) -> None:
    body = {"model": narrow.model, "messages": requests("You stream.")[-1], "max_tokens": OUTPUT_TOKENS, "stream": True}
    with narrow.http.stream("POST", "/v1/chat/completions", json=body, headers=TRIM) as answer:
        assert answer.status_code == 200
        assert int(answer.headers["x-kvgate-trimmed-messages"]) > 0
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


def test_responses_and_messages_are_trimmed_as_chats_are(backends: Backends, narrow: Gateway) -> None:
    source = random.Random(3)
    turns = [f"{number}: {words(source, 60)}" for number in range(120)]
    plain = [
        {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate([*turns, "and?"])
    ]
    for path, body in (
        ("/v1/responses", {"input": plain, "instructions": "Be brief.", "max_output_tokens": OUTPUT_TOKENS}),
        ("/v1/messages", {"messages": plain, "system": "Be brief.", "max_tokens": OUTPUT_TOKENS}),
    ):
        answer = narrow.http.post(path, json={"model": narrow.model, **body}, headers=TRIM)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        # Messages count apart what the prefix cache had and what it took in (vllm entrypoints/anthropic/serving.py).
        prompt = sum(usage.get(name) or 0 for name in INPUT_COUNTS)
        assert prompt == int(answer.headers["x-kvgate-prompt-tokens"])
        assert prompt <= backends.small.window_tokens - OUTPUT_TOKENS
        assert int(answer.headers["x-kvgate-trimmed-messages"]) > 0
