"""What comes back: streams, usage, errors, hang-ups, and the official SDK as a client."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from e2e_backends import Backends
from e2e_cases import WEATHER, says
from e2e_gateway import Gateway, assert_at_once, chunks, events, eventually
from e2e_processes import PLAIN

PATHS = {"/v1/chat/completions": says("hi"), "/v1/completions": {"prompt": "hi"}}


@pytest.fixture
def sdk(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """The SDK without retries, so that an error is seen once."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_usage_comes_once_and_last_when_asked_for(gateway: Gateway, path: str) -> None:
    options = {"include_usage": True}
    with gateway.stream(path, **PATHS[path], max_tokens=5, ignore_eos=True, stream_options=options) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        sent = chunks(answer)
    told = [chunk for chunk in sent if chunk.get("usage")]
    assert told == [sent[-1]]
    assert told[0]["choices"] == []
    assert told[0]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}])
@pytest.mark.parametrize("path", PATHS)
def test_usage_does_not_come_when_not_asked_for(gateway: Gateway, path: str, options: dict[str, Any]) -> None:
    with gateway.stream(path, **PATHS[path], **options, max_tokens=5, ignore_eos=True) as answer:
        sent = chunks(answer)
    assert not [chunk for chunk in sent if chunk.get("usage")]
    assert all(chunk["choices"] for chunk in sent)
    assert sent[-1]["choices"][0]["finish_reason"] == "length"


def test_the_stream_says_what_the_server_says(gateway: Gateway, backends: Backends) -> None:
    """Byte for byte, but for ids and times: the same greedy request straight and through the gateway."""
    body = {**says("Say it twice."), "max_tokens": 24, "ignore_eos": True, "temperature": 0, "model": backends.model}
    with httpx2.stream(
        "POST", f"{backends.small.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60, **PLAIN
    ) as direct:
        straight = events(direct)
    with gateway.stream("/v1/chat/completions", **body) as answer:
        through = events(answer)
    assert answer.headers["x-kvgate-backend"] == backends.small.label

    def said(data: list[str]) -> str:
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in map(json.loads, data[:-1]))

    assert len(through) == len(straight)
    assert said(through) == said(straight)
    assert through[-1] == straight[-1] == "[DONE]"


def test_a_stream_arrives_piece_by_piece(gateway: Gateway) -> None:
    """A gateway that held events back would never show many pieces; a stalled machine shows few now and then."""
    pieces = max(_pieces(gateway) for _ in range(3))
    assert pieces > 11, f"the stream came in {pieces} pieces at best"


def _pieces(gateway: Gateway) -> int:
    """In how many pieces, more than a millisecond apart, the 60 tokens of an answer came."""
    with gateway.stream("/v1/chat/completions", **says("Count."), max_tokens=60, ignore_eos=True) as answer:
        arrivals = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: ")]
    assert len(arrivals) > 50
    return 1 + sum(later - earlier > 0.001 for earlier, later in itertools.pairwise(arrivals))


def test_every_answer_carries_a_request_id_and_says_how_it_was_placed(gateway: Gateway, backends: Backends) -> None:
    answer = gateway.http.post(
        "/v1/chat/completions",
        json={"model": backends.model, **says("hi"), "max_tokens": 2},
        headers={"x-request-id": "asked-for-1"},
    )
    assert answer.headers["x-request-id"] == "asked-for-1"
    assert answer.headers["x-kvgate-backend"] in {backend.label for backend in backends.both()}
    assert int(answer.headers["x-kvgate-window"]) in {backend.window_tokens for backend in backends.both()}
    assert float(answer.headers["x-kvgate-queue-wait-ms"]) >= 0
    assert gateway.chat(**says("hi"), max_tokens=2).headers["x-request-id"] != "asked-for-1"


def test_an_unknown_model_is_refused_with_the_names_there_are(gateway: Gateway, backends: Backends) -> None:
    answer = gateway.http.post("/v1/chat/completions", json={"model": "gpt-4o", **says("hi")})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert "gpt-4o" in error["message"] and backends.model in error["message"]


def test_models_tell_the_largest_window_under_every_name_clients_read(gateway: Gateway, backends: Backends) -> None:
    listed = gateway.http.get("/v1/models").json()
    assert listed["object"] == "list" and listed["models"] == []
    (card,) = listed["data"]
    window = backends.large.window_tokens
    assert card["id"] == backends.model
    names = ("max_model_len", "context_length", "context_window")
    assert {name: card[name] for name in names} == dict.fromkeys(names, window)
    assert card["max_input_tokens"] == window - 1024  # the output floor is kept for the answer
    assert card["meta"]["n_ctx"] == window
    assert isinstance(card["max_output_tokens"], int)


def test_other_paths_reach_a_server_that_serves_the_model(gateway: Gateway, backends: Backends) -> None:
    body = {"model": backends.model, **says("hi")}
    direct = httpx2.post(f"{backends.small.url}/v1/chat/completions/render", json=body, timeout=30, **PLAIN)
    answer = gateway.http.post("/v1/chat/completions/render", json=body)
    assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())
    assert answer.status_code == 403  # "Scale-out endpoints are disabled …": the server's own words


def hello(more: str) -> bytes:
    return f'{{"model": "qwen3-tiny", "messages": [{{"role": "user", "content": "hi"}}], {more}}}'.encode()


BAD_BODIES = {
    "cut JSON": b'{"model": "qwen3-tiny", ',
    "a list": b"[1, 2]",
    "nothing": b"",
    "bad UTF-8": b'{"model": "qwen3-tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "lone surrogate": b'{"model": "qwen3-tiny", "messages": [{"role": "user", "content": "\\ud83d"}]}',
    "messages a string": b'{"model": "qwen3-tiny", "messages": "hi"}',
    "no messages": b'{"model": "qwen3-tiny"}',
    "model a list": b'{"model": ["qwen3-tiny"], "messages": [{"role": "user", "content": "hi"}]}',
    "negative n": hello('"n": -3'),
    "too many sequences": hello('"n": 1000000000'),
    "absurd n": hello('"n": 1e99'),
    "fractional budget": hello('"max_tokens": 1.5'),
    "negative temperature": hello('"temperature": -9'),
    "deep nesting": hello('"x": ' + "[" * 100_000 + "]" * 100_000),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_request_gets_a_clear_answer_and_the_gateway_serves_on(gateway: Gateway, name: str) -> None:
    headers = {"content-type": "application/json"}
    answer = gateway.http.post("/v1/chat/completions", content=BAD_BODIES[name], headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert error["code"] != "context_length_exceeded"
    assert gateway.chat(**says("still there?"), max_tokens=1).status_code == 200


def test_a_body_of_another_content_type_is_refused(gateway: Gateway) -> None:
    headers = {"content-type": "text/plain"}
    answer = gateway.http.post("/v1/chat/completions", content=hello('"max_tokens": 1'), headers=headers)
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


def test_a_client_that_hangs_up_frees_the_server_at_once(gateway: Gateway, backends: Backends) -> None:
    """Mid-stream: the request leaves the server's batch and its KV blocks are free again."""
    took_s = []
    for _ in range(5):
        with gateway.stream(
            "/v1/chat/completions", messages=backends.chat_of(2000), max_tokens=2000, ignore_eos=True
        ) as answer:
            lines = answer.iter_lines()
            for _ in range(8):
                next(lines)
            server = next(b for b in backends.both() if b.label == answer.headers["x-kvgate-backend"])
            eventually(lambda server=server: server.holds(requests=1, blocks=2000 // 32))
        took_s.append(eventually(server.at_rest))
    assert_at_once(took_s, 0.25 if backends.engine == "simulator" else 1.0)


def test_a_client_that_hangs_up_before_the_first_byte_frees_the_server_too(
    gateway: Gateway, backends: Backends
) -> None:
    """An answer that is not streamed has no byte before its end."""
    body = {"model": backends.model, **says("Write a book."), "max_tokens": 3000, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    took_s = []
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as client:
            client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            eventually(lambda: sum(backend.running() for backend in backends.both()) == 1)
        took_s.append(eventually(lambda: all(backend.at_rest() for backend in backends.both())))
    assert_at_once(took_s, 0.25 if backends.engine == "simulator" else 1.0)


def test_the_sdk_chats(sdk: openai.OpenAI, backends: Backends) -> None:
    answer = sdk.chat.completions.create(
        model=backends.model,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content


def test_the_sdk_streams(sdk: openai.OpenAI, backends: Backends) -> None:
    stream = sdk.chat.completions.create(
        model=backends.model,
        messages=[{"role": "user", "content": "hi"}],
        tools=[WEATHER],
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    pieces = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 6


def test_the_sdk_completes_and_lists(sdk: openai.OpenAI, backends: Backends) -> None:
    answer = sdk.completions.create(model=backends.model, prompt=["a", "b"], max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [model.id for model in sdk.models.list()] == [backends.model]


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_raises_its_own_error_on_overflow(sdk: openai.OpenAI, backends: Backends, stream: bool) -> None:
    messages: Any = backends.chat_of(backends.large.window_tokens + 1)
    with pytest.raises(openai.BadRequestError) as raised:
        sdk.chat.completions.create(model=backends.model, messages=messages, stream=stream)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "messages"


def test_the_sdk_raises_its_own_error_on_an_unknown_model(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        sdk.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    assert raised.value.code == "model_not_found"


async def test_the_async_sdk_streams_many_at_once(gateway: Gateway, backends: Backends) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> int:
            stream = await client.chat.completions.create(
                model=backends.model,
                messages=[{"role": "user", "content": f"Number {number}"}],
                max_tokens=10 + number,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            usage = [piece.usage async for piece in stream if piece.usage]
            assert len(usage) == 1
            return usage[0].completion_tokens

        assert await asyncio.gather(*(one(number) for number in range(10))) == [10 + number for number in range(10)]
