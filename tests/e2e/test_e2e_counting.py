"""The gateway's count is the server's count: for every request, exactly."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from e2e_backends import Backends
from e2e_cases import CASES, says
from e2e_gateway import Gateway, chunks
from e2e_metrics import Page

WORDS = "The quick brown fox; el veloz murciélago — 快速的狐狸 🦊.\n"


def assert_exact(response: httpx2.Response, prompt_tokens: int) -> None:
    headers = response.headers
    assert headers["x-kvgate-count-kind"] == "exact"
    assert int(headers["x-kvgate-prompt-tokens"]) == prompt_tokens


@pytest.mark.parametrize("name", CASES)
def test_a_chat_request_is_counted_as_the_server_counts_it(gateway: Gateway, name: str) -> None:
    answer = gateway.chat(**CASES[name], max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvgate-count-source"] == "local"
    assert_exact(answer, answer.json()["usage"]["prompt_tokens"])


@pytest.mark.parametrize("name", ["parallel calls and results", "emoji", "effort none", "continued answer"])
def test_a_streamed_chat_request_is_counted_as_the_server_counts_it(gateway: Gateway, name: str) -> None:
    body: dict[str, Any] = {**CASES[name], "max_tokens": 2, "stream_options": {"include_usage": True}}
    with gateway.stream("/v1/chat/completions", **body) as answer:
        assert answer.status_code == 200
        usage = chunks(answer)[-1]["usage"]
    assert_exact(answer, usage["prompt_tokens"])


@pytest.mark.parametrize(
    "prompt",
    [
        "Once upon a time",
        WORDS * 40,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        ["one", WORDS, "three\n\n\n"],
        [100, 200, 300],
        [[100] * 10, [7] * 25],
        list(range(1000, 3000)),
    ],
    ids=["text", "long text", "special tokens", "texts", "ids", "lists of ids", "many ids"],
)
def test_a_completion_is_counted_as_the_server_counts_it(gateway: Gateway, prompt: Any) -> None:
    answer = gateway.complete(prompt, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert_exact(answer, answer.json()["usage"]["prompt_tokens"])


def test_the_same_conversation_grows_turn_by_turn_and_stays_exact(gateway: Gateway) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": WORDS}]
    counts = []
    for turn in range(12):
        messages.append({"role": "user", "content": f"{turn}. {WORDS * turn}"})
        answer = gateway.chat(messages=messages, max_tokens=12, ignore_eos=True)
        assert_exact(answer, answer.json()["usage"]["prompt_tokens"])
        counts.append(answer.json()["usage"]["prompt_tokens"])
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    assert counts == sorted(set(counts))


def test_the_gateway_checks_itself_against_usage(gateway: Gateway, backends: Backends) -> None:
    before = gateway.metrics()
    assert gateway.chat(**says("check yourself"), max_tokens=2).status_code == 200
    after = gateway.metrics()

    def checks(**labels: str) -> float:
        def total(page: Page) -> float:
            return sum(sample.value for sample in page.named("kvgate_count_checks_total", **labels))

        return total(after) - total(before)

    assert checks(model=backends.model, kind="exact", result="equal") == 1
    assert checks() == 1
    exact = after.named("kvgate_count_checks_total", kind="exact")  # estimates, of other tests, may err
    wrong = [sample for sample in exact if sample.labels["result"] != "equal"]
    assert sum(sample.value for sample in wrong) == 0, wrong
