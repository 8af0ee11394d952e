"""The count is the server's in the other dialects, too, and the counting endpoints tell it beforehand."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from e2e_backends import Backends
from e2e_cases import CASES, says
from e2e_dialect_cases import MESSAGES, RESPONSES
from e2e_gateway import Gateway, events

JSON = {"content-type": "application/json"}


def post(gateway: Gateway, path: str, body: dict[str, Any], **more: Any) -> httpx2.Response:
    return gateway.http.post(path, json={"model": gateway.model, **body, **more})


def told(response: httpx2.Response) -> int:
    """The count in the headers, said to be exact."""
    assert response.headers["x-kvgate-count-kind"] == "exact"
    assert response.headers["x-kvgate-count-source"] == "local"
    return int(response.headers["x-kvgate-prompt-tokens"])


def anthropic_prompt(usage: dict[str, Any]) -> int:
    """All prompt tokens: Anthropic's ``input_tokens`` leave out those that the cache had."""
    return sum(
        usage.get(key) or 0 for key in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )


@pytest.mark.parametrize("name", RESPONSES)
def test_a_responses_request_is_counted_as_the_server_counts_it(gateway: Gateway, name: str) -> None:
    answer = post(gateway, "/v1/responses", RESPONSES[name], max_output_tokens=2, store=False)
    assert answer.status_code == 200, answer.text
    assert told(answer) == answer.json()["usage"]["input_tokens"]
    beforehand = post(gateway, "/v1/responses/input_tokens", RESPONSES[name])
    assert beforehand.json() == {"object": "response.input_tokens", "input_tokens": told(answer)}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_messages_request_is_counted_as_the_server_counts_it(gateway: Gateway, backends: Backends, name: str) -> None:
    answer = post(gateway, "/v1/messages", MESSAGES[name], max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert told(answer) == anthropic_prompt(answer.json()["usage"])
    beforehand = post(gateway, "/v1/messages/count_tokens", MESSAGES[name])
    assert beforehand.json()["input_tokens"] == told(answer)
    body = {"model": backends.model, **MESSAGES[name]}
    server = httpx2.post(f"{backends.large.url}/v1/messages/count_tokens", json=body, timeout=60, trust_env=False)
    assert beforehand.json() == server.json()


def test_usage_in_streams_of_every_dialect_is_held_against_the_count(gateway: Gateway, backends: Backends) -> None:
    before = gateway.metrics()
    with gateway.stream("/v1/responses", input="Count me", max_output_tokens=3) as answer:
        names = [json.loads(event)["type"] for event in events(answer) if event != "[DONE]"]
    assert names[-1] in ("response.completed", "response.incomplete")
    with gateway.stream("/v1/messages", **MESSAGES["tools"], max_tokens=3) as answer:
        assert [json.loads(event)["type"] for event in events(answer) if event != "[DONE]"][-1] == "message_stop"
    after = gateway.metrics()
    for result, checks in (("equal", 2), ("over", 0), ("under", 0)):
        labels = {"model": backends.model, "kind": "exact", "source": "local", "result": result}
        samples = [page.named("kvgate_count_checks_total", **labels) for page in (after, before)]
        totals = [sum(sample.value for sample in found) for found in samples]
        assert totals[0] - totals[1] == checks, result


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_budget_beyond_the_window_is_lowered_in_its_own_field(
    gateway: Gateway, backends: Backends, path: str
) -> None:
    window = backends.large.window_tokens
    field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body: dict[str, Any] = {"input": "Hi"} if path == "/v1/responses" else {"messages": says("Hi")["messages"]}
    if path == "/v1/messages":
        body["thinking"] = {"type": "enabled", "budget_tokens": 4 * window}
    with gateway.stream(path, **body, **{field: 10 * window}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["x-kvgate-clamped-from"] == str(10 * window)
        given = int(answer.headers["x-kvgate-output-tokens"])
        assert given + told(answer) == int(answer.headers["x-kvgate-window"])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_prompt_beyond_every_window_is_refused_in_the_dialect(gateway: Gateway, path: str) -> None:
    text = " a" * 20_000
    body: dict[str, Any] = {"input": text} if path == "/v1/responses" else {"messages": says(text)["messages"]}
    answer = post(gateway, path, body, **({"max_tokens": 5} if path == "/v1/messages" else {}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "prompt is too long" in error["message"]
    assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)


@pytest.mark.parametrize("name", ["tool offered", "parallel calls and results", "thinking off", "emoji", "effort none"])
def test_tokenize_is_answered_here_as_the_server_answers_it(gateway: Gateway, backends: Backends, name: str) -> None:
    body = {"model": backends.model, **CASES[name]}
    if "reasoning_effort" in body:  # the server's /tokenize does not know it
        body["chat_template_kwargs"] = {"enable_thinking": body.pop("reasoning_effort") != "none"}
    ours = gateway.http.post("/tokenize", json=body)
    theirs = httpx2.post(f"{backends.large.url}/tokenize", json=body, timeout=60, trust_env=False)
    assert ours.headers["x-kvgate-count-source"] == "local"
    assert ours.json() == theirs.json()


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_a_text_is_tokenised_here(gateway: Gateway, backends: Backends, strings: bool, special: bool) -> None:
    body = {
        "model": backends.model,
        "prompt": "Hello <|im_start|> 日本é 👩\u200d👧",
        "add_special_tokens": special,
        "return_token_strs": strings,
    }
    ours = gateway.http.post("/tokenize", json=body)
    theirs = httpx2.post(f"{backends.large.url}/tokenize", json=body, timeout=60, trust_env=False)
    assert "x-kvgate-backend" not in ours.headers
    assert ours.json() == theirs.json()


def test_reasoning_effort_counts_in_tokenize_as_it_does_in_a_chat(gateway: Gateway) -> None:
    answer = gateway.chat(**CASES["effort none"], max_tokens=1)
    counted = post(gateway, "/tokenize", CASES["effort none"]).json()["count"]
    assert counted == answer.json()["usage"]["prompt_tokens"]


def test_a_wrong_count_request_gets_the_servers_own_answer(gateway: Gateway, backends: Backends) -> None:
    bodies = {
        "/tokenize": {"model": backends.model, "prompt": 7},
        "/v1/messages/count_tokens": {"model": backends.model, "messages": [{"role": "wizard", "content": "x"}]},
    }
    for path, body in bodies.items():
        ours = gateway.http.post(path, json=body)
        assert 400 <= ours.status_code < 500, path
        theirs = httpx2.post(f"{backends.large.url}{path}", json=body, timeout=60, trust_env=False)
        assert ours.status_code == theirs.status_code, path
