"""Requests that vLLM refuses for their form are answered, counted as they were sent on, and said to be repaired."""

from __future__ import annotations

from typing import Any

import pytest
from e2e_backends import Backends
from e2e_gateway import Gateway, chunks, serving

USER = {"role": "user", "content": "Hello."}
CALL = {"id": "c", "function": {"name": "ls", "arguments": {"path": "."}}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "empty_tools": ("/v1/chat/completions", {"messages": [USER], "tools": [], "tool_choice": "auto"}),
    "content_type": ("/v1/chat/completions", {"messages": [USER, {"role": "user", "content": None}]}),
    "content_parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"text": "Hello."}]}]}),
    "stream_options": ("/v1/chat/completions", {"messages": [USER], "stream_options": {"include_usage": True}}),
    "responses_body": ("/v1/chat/completions", {"input": "Hello.", "instructions": "Be brief."}),
    "tool_calls": (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "a"}]},
    ),
    "empty_suffix": ("/v1/completions", {"prompt": "Hello.", "suffix": ""}),
}


@pytest.mark.parametrize("rule", list(BODIES))
def test_a_repaired_request_is_answered_and_counted_as_it_was_sent_on(
    gateway: Gateway, backends: Backends, rule: str
) -> None:
    path, body = BODIES[rule]
    before = repairs(gateway, rule)
    answer = gateway.http.post(path, json={"model": gateway.model, "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvgate-repairs"] == rule
    assert answer.headers["x-kvgate-prompt-tokens"] == str(answer.json()["usage"]["prompt_tokens"])
    assert repairs(gateway, rule) == before + 1


def test_a_request_that_needs_no_repair_says_so_by_silence(gateway: Gateway, backends: Backends) -> None:
    assert "x-kvgate-repairs" not in gateway.chat(messages=[USER], max_tokens=2).headers


def test_a_repaired_request_can_be_streamed(gateway: Gateway, backends: Backends) -> None:
    with gateway.stream("/v1/chat/completions", messages=[USER], tools=[], max_tokens=2) as answer:
        assert answer.headers["x-kvgate-repairs"] == "empty_tools"
        assert chunks(answer)[-1]["choices"][0]["finish_reason"]


def test_a_refusal_names_the_repairs_too(gateway: Gateway, backends: Backends) -> None:
    messages = [{"role": "user", "content": "word " * 3 * backends.large.window_tokens}]
    answer = gateway.chat(messages=messages, tools=[])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.headers["x-kvgate-repairs"] == "empty_tools"


def test_a_repair_that_is_switched_off_is_left_undone(backends: Backends) -> None:
    urls = [backend.url for backend in backends.both()]
    with serving(urls, backends.model, {"REPAIRS__DISABLE": '["content_type"]'}) as gateway:
        answer = gateway.chat(messages=[{"role": "user", "content": None}], max_tokens=2)
        assert "x-kvgate-repairs" not in answer.headers


def test_usage_is_told_by_the_window_that_clients_take_for_granted(backends: Backends) -> None:
    window = backends.small.window_tokens
    models = f'{{"{backends.model}": {{"client_window_tokens": {10 * window}}}}}'
    with serving([backends.small.url], backends.model, {"MODELS": models}) as gateway:
        answer = gateway.chat(messages=[USER], max_tokens=2)
        true_tokens = int(answer.headers["x-kvgate-prompt-tokens"])
        assert answer.json()["usage"]["prompt_tokens"] == 10 * true_tokens
        with gateway.stream(
            "/v1/chat/completions", messages=[USER], max_tokens=2, stream_options={"include_usage": True}
        ) as stream:
            assert chunks(stream)[-1]["usage"]["prompt_tokens"] == 10 * true_tokens
        assert gateway.metrics().sum("kvgate_prompt_tokens_total") == 2 * true_tokens


def repairs(gateway: Gateway, rule: str) -> float:
    """How often the rule put something right."""
    return sum(sample.value for sample in gateway.metrics().named("kvgate_repairs_total", rule=rule))
