"""What becomes of a conversation that exceeds every window: refused once, then trimmed, or as the caller wishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from e2e_backends import Backends
from e2e_gateway import Gateway, serving

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": {}}}]


def conversation(name: str, turns: int, words: int = 400) -> list[Message]:
    """An agent at work: each turn reads a file of about ``words`` tokens. ``name`` sets conversations apart."""
    messages: list[Message] = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": f"Tidy the project {name}."},
    ]
    for turn in range(turns):
        call = {
            "id": f"call{turn}",
            "type": "function",
            "function": {"name": "read", "arguments": json.dumps({"n": turn})},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call{turn}", "content": f"file {turn}:" + " word" * words})
    return messages


def as_anthropic(name: str, turns: int, words: int = 400) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": f"Tidy the project {name}."}]
    for turn in range(turns):
        use = {"type": "tool_use", "id": f"call{turn}", "name": "read", "input": {"n": turn}}
        result = {"type": "tool_result", "tool_use_id": f"call{turn}", "content": f"file {turn}:" + " word" * words}
        messages.append({"role": "assistant", "content": [use]})
        messages.append({"role": "user", "content": [result]})
    return messages


def refused(answer: httpx2.Response) -> bool:
    return answer.status_code == 400 and answer.json()["error"].get("code") == "context_length_exceeded"


def assert_trimmed(answer: httpx2.Response, backends: Backends) -> None:
    """It was answered, it fits, its count is right, and the client was told what it had sent."""
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    # Anthropic's input tokens are those that neither came from the cache nor went into it.
    cached = sum(usage.get(f"cache_{way}_input_tokens") or 0 for way in ("read", "creation"))
    sent = usage.get("prompt_tokens") or usage["input_tokens"] + cached
    assert int(answer.headers["x-kvgate-prompt-tokens"]) == sent
    assert answer.headers["x-kvgate-count-kind"] == "exact"
    untrimmed = int(answer.headers["x-kvgate-untrimmed-prompt-tokens"])
    assert untrimmed > backends.large.window_tokens > sent
    assert int(answer.headers["x-kvgate-trimmed-tokens"]) == untrimmed - sent


def test_auto_refuses_a_conversation_once_and_trims_it_from_then_on(gateway: Gateway, backends: Backends) -> None:
    messages = conversation("auto", 45)
    assert refused(gateway.chat(messages=messages, tools=TOOLS, max_tokens=8))
    before = gateway.metrics().sum("kvgate_overflows_total", action="trim")
    assert_trimmed(gateway.chat(messages=messages, tools=TOOLS, max_tokens=8), backends)
    longer = conversation("auto", 48)
    assert_trimmed(gateway.chat(messages=longer, tools=TOOLS, max_tokens=8), backends)
    assert gateway.metrics().sum("kvgate_overflows_total", action="trim") == before + 2
    assert gateway.metrics().sum("kvgate_trimmed_tokens_total") > 0


def test_another_conversation_is_refused_on_its_own(gateway: Gateway) -> None:
    assert refused(gateway.chat(messages=conversation("one", 45), tools=TOOLS, max_tokens=8))
    assert refused(gateway.chat(messages=conversation("two", 45), tools=TOOLS, max_tokens=8))


def test_a_conversation_that_was_compacted_is_known_again(gateway: Gateway, backends: Backends) -> None:
    assert refused(gateway.chat(messages=conversation("compacted", 45), tools=TOOLS, max_tokens=8))
    system = {"role": "system", "content": "You are a coding agent."}
    summary = {"role": "user", "content": "Summary of the project compacted so far."}
    assert gateway.chat(messages=[system, summary], tools=TOOLS, max_tokens=8).status_code == 200
    grown = [system, summary, *conversation("compacted", 45)[2:]]
    assert_trimmed(gateway.chat(messages=grown, tools=TOOLS, max_tokens=8), backends)


def test_a_header_asks_for_a_policy(gateway: Gateway, backends: Backends) -> None:
    body = {"model": gateway.model, "messages": conversation("header", 45), "tools": TOOLS, "max_tokens": 8}

    def ask(policy: str) -> httpx2.Response:
        return gateway.http.post("/v1/chat/completions", json=body, headers={"x-kvgate-overflow": policy})

    assert_trimmed(ask("trim"), backends)
    assert refused(ask("reject")) and refused(ask("reject"))
    passed = ask("pass")  # the backend's own refusal, in words that clients know
    assert refused(passed)
    counted = int(passed.headers["x-kvgate-prompt-tokens"])
    assert f"({counted} in the messages, 8 in the completion)" in passed.json()["error"]["message"]
    wrong = ask("shorten")
    assert wrong.status_code == 400 and "there are: auto, reject, trim" in wrong.json()["error"]["message"]


def test_truncation_in_the_body_is_consent(gateway: Gateway, backends: Backends) -> None:
    messages = conversation("consent", 45)
    answer = gateway.http.post(
        "/v1/responses",
        json={"model": gateway.model, "input": _items(messages), "truncation": "auto", "max_output_tokens": 1},
    )
    assert_trimmed(answer, backends)


def test_who_consents_to_any_cut_is_cut_by_the_backend_if_nothing_else_helps(gateway: Gateway) -> None:
    """No message can go here; vLLM then drops tokens from the prompt's start, as it does without a gateway."""
    body = {"model": gateway.model, "input": "word " * 40_000, "truncation": "auto", "max_output_tokens": 1}
    answer = gateway.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-kvgate-trimmed-tokens" not in answer.headers


def test_a_trimmed_stream_streams(gateway: Gateway, backends: Backends) -> None:
    body = {"model": gateway.model, "messages": conversation("stream", 45), "max_tokens": 8, "stream": True}
    with gateway.http.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-kvgate-overflow": "trim"}
    ) as answer:
        assert answer.status_code == 200
        assert int(answer.headers["x-kvgate-untrimmed-prompt-tokens"]) > backends.large.window_tokens
        assert b"[DONE]" in answer.read()


def test_the_messages_api_is_trimmed_alike(gateway: Gateway, backends: Backends) -> None:
    body = {"model": gateway.model, "messages": as_anthropic("anthropic", 45), "max_tokens": 8}
    first = gateway.http.post("/v1/messages", json=body)
    assert first.status_code == 400
    assert first.json()["error"]["message"].startswith("prompt is too long: ")
    assert_trimmed(gateway.http.post("/v1/messages", json=body), backends)


def test_what_cannot_be_removed_is_named(gateway: Gateway) -> None:
    huge = [{"role": "user", "content": "word " * 40_000}]
    body = {"model": gateway.model, "messages": huge, "max_tokens": 8}
    answer = gateway.http.post("/v1/chat/completions", json=body, headers={"x-kvgate-overflow": "trim"})
    assert refused(answer)
    assert "Trimming cannot bring it below" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def choosy(backends: Backends) -> Iterator[Gateway]:
    settings = {"OVERFLOW__POLICY": "trim", "OVERFLOW__ROUTES": '{"/v1/messages": "reject"}'}
    with serving([backends.small.url, backends.large.url], backends.model, settings) as running:
        yield running


def test_the_operator_chooses_by_path(choosy: Gateway, backends: Backends) -> None:
    assert_trimmed(choosy.chat(messages=conversation("route", 45), max_tokens=8), backends)
    body = {"model": choosy.model, "messages": as_anthropic("route", 45), "max_tokens": 8}
    for _ in range(2):
        assert choosy.http.post("/v1/messages", json=body).status_code == 400


def _items(messages: list[Message]) -> list[Message]:
    """A chat as items of the Responses API."""
    items: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
        elif message.get("tool_calls"):
            call = message["tool_calls"][0]
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        else:
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
    return items
