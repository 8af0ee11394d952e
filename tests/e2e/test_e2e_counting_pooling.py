"""Embeddings, pooling and scores: their prompts are counted too, none is refused by a count, and answers pass whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from e2e_backends import BLOCK_SIZE_TOKENS, MODEL, simulated
from e2e_gateway import Gateway, eventually, serving
from e2e_processes import free_port
from vllm_server import VllmServer

from gateway.simulator.model import default_folder, ensure_model

WINDOW = 2048
INPUTS: dict[str, Any] = {
    "text": "Once upon a time",
    "texts": ["one", "The quick brown fox; 快速的狐狸 🦊."],
    "ids": [100, 200, 300],
    "lists of ids": [[100] * 10, [7] * 25],
    "many texts": [f"text number {number}" for number in range(60)],
}


@contextlib.contextmanager
def real_pooling() -> Iterator[str]:
    flags = ["--runner", "pooling", "--convert", "embed", "--load-format", "dummy", "--enforce-eager"]
    flags += ["--max-model-len", str(WINDOW), "--num-gpu-blocks-override", "100", "--max-num-seqs", "16"]
    flags += ["--block-size", str(BLOCK_SIZE_TOKENS), "--max-num-batched-tokens", "2048"]
    folder = ensure_model(default_folder())
    server = VllmServer(name="pooling", model=folder, port=free_port(), served_model_name=MODEL, flags=flags)
    server.start()
    try:
        server.wait_ready()
        yield server.url
    finally:
        server.stop()


@contextlib.contextmanager
def simulated_pooling() -> Iterator[str]:
    ensure_model(default_folder())
    with simulated((WINDOW, 100)) as server:
        yield server.url


@pytest.fixture(scope="module", params=["simulator", pytest.param("vllm", marks=pytest.mark.vllm)])
def pooling(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway in front of one server that embeds."""
    start = simulated_pooling if request.param == "simulator" else real_pooling
    with start() as url, serving([url], MODEL, seen=0) as gateway:
        eventually(gateway.counts_locally, timeout_s=120)
        yield gateway


def embed(gateway: Gateway, given: Any, **more: Any) -> httpx2.Response:
    return gateway.http.post("/v1/embeddings", json={"model": MODEL, "input": given, **more})


def assert_exact(answer: httpx2.Response) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvgate-count-kind"] == "exact"
    assert int(answer.headers["x-kvgate-prompt-tokens"]) == answer.json()["usage"]["prompt_tokens"]
    assert "x-kvgate-output-tokens" not in answer.headers


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_counted_as_the_server_counts_them(pooling: Gateway, name: str) -> None:
    answer = embed(pooling, INPUTS[name])
    assert_exact(answer)


def test_a_conversation_is_embedded_without_a_generation_prompt(pooling: Gateway) -> None:
    messages = [{"role": "system", "content": "Embed."}, {"role": "user", "content": "Hello"}]
    answer = pooling.http.post("/v1/embeddings", json={"model": MODEL, "messages": messages})
    assert_exact(answer)
    with_prompt = {"model": MODEL, "messages": messages, "add_generation_prompt": True}
    longer = pooling.http.post("/v1/embeddings", json=with_prompt)
    assert_exact(longer)
    assert longer.json()["usage"]["prompt_tokens"] > answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("limit", [5, -1])
def test_truncation_is_the_servers_and_its_count_ours(pooling: Gateway, limit: int) -> None:
    answer = embed(pooling, "one two three four five six seven eight nine ten", truncate_prompt_tokens=limit)
    assert_exact(answer)


def test_an_input_to_the_brim_needs_no_output(pooling: Gateway) -> None:
    assert_exact(embed(pooling, [[100] * WINDOW]))


def test_an_input_beyond_the_window_is_the_servers_to_refuse(pooling: Gateway) -> None:
    answer = embed(pooling, [[100] * (WINDOW + 1)])
    assert answer.status_code == 400
    assert str(WINDOW) in answer.json()["error"]["message"]


def test_base64_answers_pass_untouched(pooling: Gateway) -> None:
    answer = embed(pooling, "x", encoding_format="base64")
    assert isinstance(answer.json()["data"][0]["embedding"], str)
    assert_exact(answer)


def test_what_the_server_refuses_is_refused_in_its_words(pooling: Gateway) -> None:
    answer = embed(pooling, {"no": "input"})
    assert answer.status_code == 400
    assert answer.headers["x-kvgate-count-kind"] == "estimate"
