"""What the servers themselves say: the same for the simulator and for real vLLM, so that the two are held together."""

from __future__ import annotations

import uuid
from typing import Any

import httpx2
import pytest
from e2e_backends import Backend, Backends
from e2e_cases import CASES, WEATHER, says
from e2e_gateway import eventually
from e2e_processes import PLAIN

TOO_LONG = (
    "This model's maximum context length is {window} tokens. However, your prompt contains {prompt} input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value={value})"
)


def post(backend: Backend, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{backend.url}{path}", json={"model": "qwen3-tiny", **body}, timeout=90, **PLAIN)


def refusal(answer: httpx2.Response) -> tuple[int, str, str | None, str]:
    """Status, type, parameter and text of an error in vLLM's envelope."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return answer.status_code, error["type"], error["param"], error["message"]


def test_the_window_ends_one_token_early(backends: Backends) -> None:
    window = backends.small.window_tokens
    full = post(backends.small, "/v1/completions", prompt=[100] * (window - 1), max_tokens=50, ignore_eos=True)
    assert full.json()["usage"]["completion_tokens"] == 1
    assert full.json()["choices"][0]["finish_reason"] == "length"
    exact = post(backends.small, "/v1/completions", prompt=[100] * window, max_tokens=50)
    text = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    assert refusal(exact) == (400, "BadRequestError", "max_tokens", text)


@pytest.mark.parametrize(("beyond", "says_prompt"), [(1, "at least {}"), (50, "{}")])
def test_ids_beyond_the_window_are_refused_with_their_number(backends: Backends, beyond: int, says_prompt: str) -> None:
    window = backends.small.window_tokens
    prompt = says_prompt.format(window + beyond)
    text = TOO_LONG.format(window=window, prompt=prompt, value=window + beyond)
    answer = post(backends.small, "/v1/completions", prompt=[100] * (window + beyond), max_tokens=1)
    assert refusal(answer) == (400, "BadRequestError", "input_tokens", text)


@pytest.mark.parametrize("stream", [False, True])
def test_text_beyond_the_window_is_refused_with_the_least_number(backends: Backends, stream: bool) -> None:
    """vLLM stops tokenising at the limit, so its own number tells nothing: a gateway must count by itself."""
    window = backends.small.window_tokens
    text = TOO_LONG.format(window=window, prompt=f"at least {window + 1}", value=window + 1)
    answer = post(backends.small, "/v1/chat/completions", messages=backends.chat_of(window + 700), stream=stream)
    assert refusal(answer) == (400, "BadRequestError", "input_tokens", text)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_budget_beyond_the_window_is_refused(backends: Backends, field: str) -> None:
    window = backends.small.window_tokens
    answer = post(backends.small, "/v1/chat/completions", **says("hi"), **{field: window + 1})
    text = (
        f"{field}={window + 1} cannot be greater than max_model_len={window}. Please request fewer output tokens. "
        f"(parameter={field}, value={window + 1})"
    )
    assert refusal(answer) == (400, "BadRequestError", field, text)


def test_other_refusals(backends: Backends) -> None:
    small = backends.small
    chat = "/v1/chat/completions"
    assert refusal(post(small, chat, **says("hi"), model="nope")) == (
        404, "NotFoundError", "model", "The model `nope` does not exist. Valid aliases: qwen3-tiny.",
    )  # fmt: skip
    assert refusal(post(small, chat, **says("hi"), max_tokens=-1)) == (
        400, "BadRequestError", "max_tokens", "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)",
    )  # fmt: skip
    assert refusal(post(small, chat, **says("hi"), tools=[])) == (
        400, "BadRequestError", "tools",
        "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely. "
        "(parameter=tools)",
    )  # fmt: skip
    untyped = httpx2.post(f"{small.url}{chat}", content=b"{}", headers={"content-type": "text/plain"}, **PLAIN)
    status, kind, _, text = refusal(untyped)
    assert (status, kind) == (400, "Bad Request")
    assert "Unsupported Media Type: Only 'application/json' is allowed" in text


@pytest.mark.parametrize("name", ["one word", "many tools", "parallel calls and results", "emoji", "effort none"])
def test_tokenize_agrees_with_usage_where_it_knows_the_fields(backends: Backends, name: str) -> None:
    body = dict(CASES[name])
    usage = post(backends.large, "/v1/chat/completions", **body, max_tokens=1).json()["usage"]["prompt_tokens"]
    if body.pop("reasoning_effort", None) == "none":  # /tokenize does not know it: its switch must be set by hand
        assert post(backends.large, "/tokenize", **body).json()["count"] != usage
        body["chat_template_kwargs"] = {"enable_thinking": False}
    assert post(backends.large, "/tokenize", **body).json()["count"] == usage


def test_the_cache_describes_itself_in_the_metrics(backends: Backends) -> None:
    for backend in backends.both():
        page = backend.metrics()
        (info,) = page.named("vllm:cache_config_info")
        blocks, block_size = backend.capacity_blocks + 1, backend.block_size_tokens
        assert info.labels["engine"] == "0"
        assert int(info.labels["kv_cache_size_tokens"]) == blocks * block_size
        assert page.sum("vllm:num_preemptions_total", engine="0", model_name="qwen3-tiny") >= 0


def test_kv_use_grows_with_a_request_and_ends_with_it(backends: Backends) -> None:
    small = backends.small
    body = {"model": backends.model, "prompt": [321] * 1500, "max_tokens": 300, "ignore_eos": True, "stream": True}
    eventually(small.at_rest)
    with httpx2.stream("POST", f"{small.url}/v1/completions", json=body, timeout=60, **PLAIN) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        eventually(lambda: small.used_blocks() >= 1500 // small.block_size_tokens)
        assert small.used_blocks() <= (1500 + 300) // small.block_size_tokens + 1
        assert len(list(lines)) > 290
    eventually(small.at_rest)


def test_a_cached_prefix_is_told_in_usage(backends: Backends) -> None:
    body = {**says(f"A sentence that nobody said before: {uuid.uuid4()}. " * 20), "tools": [WEATHER], "max_tokens": 1}
    # The tools' text may be cached already.
    first = post(backends.large, "/v1/chat/completions", **body).json()["usage"]
    second = post(backends.large, "/v1/chat/completions", **body).json()["usage"]
    block = backends.large.block_size_tokens
    assert first["prompt_tokens_details"]["cached_tokens"] < block * 6
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // block * block
