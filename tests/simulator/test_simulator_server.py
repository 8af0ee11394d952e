"""The simulated server over real HTTP on loopback: what a gateway or a client sees of vLLM."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.simulator.model import default_folder, ensure_model
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.server import Simulator, create_app, serve

HELLO = [{"role": "user", "content": "Hello there, how are you?"}]
Start = Callable[..., Any]


@pytest.fixture(scope="session")
def folder() -> Path:
    return ensure_model(default_folder())


@pytest.fixture
async def start(folder: Path) -> AsyncIterator[Start]:
    """Start a server with these options; yields its client, which knows its ``app``."""
    async with AsyncExitStack() as stack:

        async def starter(**options: Any) -> Client:
            app = create_app(SimulatorOptions(**{"tokenizer": folder, "models": ("m",), "time_scale": 50.0} | options))
            url = await stack.enter_async_context(serve(app=app))
            http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=20))
            return Client(app, url, http)

        yield starter


class Client:
    def __init__(self, app: Simulator, url: str, http: httpx2.AsyncClient) -> None:
        self.app, self.url, self.http = app, url, http

    async def chat(self, messages: Any = HELLO, **fields: Any) -> httpx2.Response:
        return await self.http.post("/v1/chat/completions", json={"model": "m", "messages": messages, **fields})

    async def completion(self, prompt: Any, **fields: Any) -> httpx2.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    async def metric(self, name: str, **labels: str) -> float:
        return next(
            sample.value
            for family in text_string_to_metric_families((await self.http.get("/metrics")).text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until(self, name: str, value: float, within_s: float = 2.0) -> None:
        deadline = time.monotonic() + within_s
        while (seen := await self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {seen}, not {value}"
            await asyncio.sleep(0.01)


def events(text: str) -> list[Any]:
    blocks = [block.removeprefix("data: ") for block in text.strip().split("\n\n")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


@asynccontextmanager
async def open_stream(client: Client, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"messages": HELLO, "stream": True, "max_tokens": 5000, "ignore_eos": True, **fields}
    async with aiohttp.ClientSession() as session, session.post(client.url + "/v1/chat/completions", json=body) as got:
        yield got


async def test_a_stream_and_a_plain_answer_say_the_same(start: Start) -> None:
    client = await start()
    plain = (await client.chat(max_tokens=30)).json()
    streamed = events((await client.chat(max_tokens=30, stream=True, stream_options={"include_usage": True})).text)
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(item["choices"][0]["delta"].get("content", "") for item in streamed if item["choices"])
    assert text == plain["choices"][0]["message"]["content"]
    assert len(text.split()) > 10
    assert streamed[-2]["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"] == "length"
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"].items() <= plain["usage"].items()
    assert plain["usage"]["completion_tokens"] == 30
    assert (await client.chat(max_tokens=30)).json()["choices"] == plain["choices"]


async def test_usage_rides_on_every_chunk_only_if_asked(start: Start) -> None:
    client = await start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = events((await client.chat(max_tokens=5, stream=True, stream_options=options)).text)
    assert [item["usage"]["completion_tokens"] for item in streamed] == [0, 1, 2, 3, 4, 5, 5]
    assert all("usage" not in item for item in events((await client.chat(max_tokens=5, stream=True)).text))
    refused = await client.chat(stream_options=options)
    assert refused.status_code == 400
    assert "stream=True" in refused.json()["error"]["message"]


async def test_usage_equals_what_tokenize_counts(start: Start) -> None:
    client = await start()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "ü"]}'}}
    conversation = [
        {"role": "system", "content": "Be brief. 简短。"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "result 🙂"},
        {"role": "user", "content": ""},
    ]
    body = {"messages": conversation, "tools": [tool]}
    counted = (await client.http.post("/tokenize", json=body)).json()
    answered = (await client.chat(conversation, tools=[tool], max_tokens=1, return_token_ids=True)).json()
    assert answered["usage"]["prompt_tokens"] == counted["count"]
    assert answered["prompt_token_ids"] == counted["tokens"]
    text = (await client.http.post("/detokenize", json={"tokens": counted["tokens"]})).json()["prompt"]
    assert "one\ntwo" in text
    assert '{"name": "f", "arguments": {"a": [1, "ü"]}}' in text
    off = (await client.chat(max_tokens=1, chat_template_kwargs={"enable_thinking": False})).json()["usage"]
    assert off["prompt_tokens"] == (await client.chat(max_tokens=1)).json()["usage"]["prompt_tokens"] + 4


async def test_stop_strings_minimum_and_natural_ends(start: Start) -> None:
    client = await start(mean_output_tokens=20)
    stopped = (await client.chat(max_tokens=50, stop=["."])).json()
    assert (stopped["choices"][0]["finish_reason"], stopped["choices"][0]["stop_reason"]) == ("stop", ".")
    assert "." not in stopped["choices"][0]["message"]["content"]
    natural = (await client.chat()).json()
    assert natural["choices"][0]["finish_reason"] == "stop"
    at_least = (await client.chat(min_tokens=400)).json()
    assert at_least["usage"]["completion_tokens"] >= 400
    refused = (await client.chat(min_tokens=9, max_tokens=8)).json()["error"]["message"]
    assert refused.startswith("min_tokens must be less than or equal to max_tokens=8, got 9.")


async def test_a_required_tool_is_called_with_arguments_that_fit_its_schema(start: Start) -> None:
    client = await start()
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {**schema, "required": ["city"]}}}]
    choice = (await client.chat(tools=tools, tool_choice="required")).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    named = {"type": "function", "function": {"name": "weather"}}
    streamed = events((await client.chat(tools=tools, tool_choice=named, stream=True)).text)
    calls = [item["choices"][0]["delta"].get("tool_calls") for item in streamed[1:]]
    assert calls[0][0]["function"]["name"] == "weather"
    assert json.loads("".join(call[0]["function"]["arguments"] for call in calls)) == {"city": "Rome"}
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


async def test_completions_take_strings_and_ids_and_answer_each_prompt_n_times(start: Start) -> None:
    client = await start()
    several = (await client.completion(["a b c", "d"], n=2)).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 64,
        "total_tokens": 68,
        "prompt_tokens_details": None,
    }
    echoed = (await client.completion([9707], echo=True, max_tokens=2)).json()["choices"][0]["text"]
    assert echoed.startswith("Hello")
    assert (await client.completion([])).status_code == 400


@pytest.mark.parametrize(
    ("version", "flat", "text"),
    [
        ("0.10.0", True, "However, you requested 212 tokens (202 in the messages, 10 in the completion)"),
        ("0.14.0", False, "However, your request has 202 input tokens"),
        ("0.17.1", False, "You passed 91 input tokens and requested 10 output tokens"),
        ("0.31.0", False, "your prompt contains at least 91 input tokens, for a total of at least 101 tokens"),
        ("0.32.0", False, "your prompt contains at least 101 input tokens"),
    ],
)
async def test_each_release_words_its_overflow(start: Start, version: str, flat: bool, text: str) -> None:
    client = await start(vllm_version=version, max_model_len=100)
    messages = [{"role": "user", "content": " hi" * 194}]
    assert (await client.http.post("/tokenize", json={"messages": messages})).json()["count"] == 202
    answer = await client.chat(messages, max_tokens=10, stream=True)
    assert answer.status_code == 400
    body = answer.json()
    assert text in (body if flat else body["error"])["message"]
    assert ("object" in body) == flat
    assert (await client.http.get("/version")).json() == {"version": version}


async def test_the_window_itself_fits_no_answer_and_one_less_does(start: Start) -> None:
    client = await start(max_model_len=100)
    assert (await client.completion([9707] * 99, max_tokens=50)).json()["usage"]["completion_tokens"] == 1
    full = (await client.completion([9707] * 100, max_tokens=50)).json()["error"]
    assert full["message"] == "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    assert (await client.completion([9707] * 300, truncate_prompt_tokens=-1, max_tokens=1)).status_code == 200


async def test_a_client_that_leaves_frees_its_blocks(start: Start) -> None:
    client = await start(time_scale=1.0)
    async with open_stream(client) as answer:
        await answer.content.readline()
        await client.until("vllm:num_requests_running", 1)
        assert await client.metric("vllm:kv_cache_usage_perc") > 0
    await client.until("vllm:num_requests_running", 0)
    assert await client.metric("vllm:kv_cache_usage_perc") == 0
    assert await client.metric("vllm:request_success_total", finished_reason="abort") == 1
    plain = asyncio.create_task(client.chat(max_tokens=5000, ignore_eos=True))
    await client.until("vllm:num_requests_running", 1)
    plain.cancel()
    await client.until("vllm:num_requests_running", 0)
    assert not client.app.service.frontend._queues


async def test_pressure_on_the_cache_preempts_and_still_answers_all(start: Start) -> None:
    client = await start(num_gpu_blocks=41, max_model_len=640, time_scale=200.0)
    answers = await asyncio.gather(
        *(client.completion([index + 1000] * 100, max_tokens=200, ignore_eos=True) for index in range(6))
    )
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [200] * 6
    assert await client.metric("vllm:num_preemptions_total") > 0
    assert await client.metric("vllm:kv_cache_usage_perc") == 0


async def test_the_prefix_cache_shows_in_usage_and_metrics(start: Start) -> None:
    client = await start(enable_prompt_tokens_details=True)
    for cached in (0, 96):
        usage = (await client.completion([9707] * 100, max_tokens=1)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
    salted = (await client.completion([9707] * 100, max_tokens=1, cache_salt="s")).json()["usage"]
    assert salted["prompt_tokens_details"] == {"cached_tokens": 0}
    assert await client.metric("vllm:prefix_cache_queries_total") == 300
    assert (await client.http.post("/reset_prefix_cache")).status_code == 200
    assert client.app.service.frontend.engines[0].pool.cached_blocks == 0
    assert await client.metric("vllm:prefix_cache_hits_total") == 96


async def test_gauges_stand_still_between_steps(start: Start) -> None:
    client = await start(prefill_tokens_per_s=400.0, time_scale=1.0)
    task = asyncio.create_task(client.completion([9707] * 200, max_tokens=2))
    await asyncio.sleep(0.2)
    assert client.app.service.frontend.engines[0].running == 1
    assert await client.metric("vllm:num_requests_running") == 0
    assert (await task).status_code == 200


@pytest.mark.parametrize(
    ("version", "present", "absent"),
    [
        ("0.8.5", "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("0.10.1", "vllm:gpu_prefix_cache_queries_total", "vllm:num_requests_waiting_by_reason"),
        ("0.32.0", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ],
)
async def test_metric_names_follow_the_release(start: Start, version: str, present: str, absent: str) -> None:
    client = await start(vllm_version=version, data_parallel_size=2, num_gpu_blocks=2049)
    page = (await client.http.get("/metrics")).text
    assert f'{present}{{engine="1",model_name="m"}}' in page
    assert absent not in page
    info = next(
        family.samples for family in text_string_to_metric_families(page) if family.name == "vllm:cache_config_info"
    )
    assert [sample.labels["engine"] for sample in info] == ["0", "1"]
    assert info[0].labels["num_gpu_blocks"] == ("None" if version == "0.8.5" else "4098")
    assert info[0].labels.get("kv_cache_size_tokens") == ("32784" if version == "0.32.0" else None)


async def test_a_rank_can_be_asked_for(start: Start) -> None:
    client = await start(data_parallel_size=2)
    body = {"prompt": "x", "max_tokens": 1}
    headers = {"x-data-parallel-rank": "1"}
    assert (await client.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert await client.metric("vllm:generation_tokens_total", engine="1") == 1
    wrong = await client.http.post("/v1/completions", json=body, headers={"x-data-parallel-rank": "2"})
    assert wrong.json()["error"]["message"] == "data_parallel_rank 2 is out of range [0, 2)."
    for ignored in ({"x-data-parallel-rank": "one"}, {}):
        assert (await client.http.post("/v1/completions", json=body, headers=ignored)).status_code == 200
    wrong_headers = {"x-data-parallel-rank": "2"}
    for path in ("/v1/responses", "/v1/embeddings"):  # these do not look at it
        asked = await client.http.post(path, json={"input": "x"}, headers=wrong_headers)
        assert asked.status_code == 200


async def test_the_key_guards_v1_and_nothing_else(start: Start) -> None:
    client = await start(api_keys=("secret",))
    denied = await client.http.get("/v1/models")
    assert (denied.status_code, denied.json()) == (401, {"error": "Unauthorized"})
    assert (await client.http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
    for path in ("/metrics", "/health", "/version", "/load"):
        assert (await client.http.get(path)).status_code == 200


async def test_models_are_listed_as_vllm_lists_them(start: Start, folder: Path) -> None:
    client = await start(models=("m", "alias"), lora_modules=(("adapter", "/lora"),), max_model_len=1234)
    cards = (await client.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in cards] == [
        ("m", str(folder), None, 1234),
        ("alias", str(folder), None, 1234),
        ("adapter", "/lora", "m", None),
    ]
    assert cards[0]["permission"][0]["object"] == "model_permission"
    assert (await client.chat(model="adapter", max_tokens=1)).json()["model"] == "adapter"
    unknown = await client.chat(model="nope")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "The model `nope` does not exist. Valid aliases: m, alias."


async def test_bad_bodies_are_refused_and_the_server_goes_on(start: Start) -> None:
    client = await start()
    path, kind = "/v1/chat/completions", {"content-type": "application/json"}
    for content in (b"{", b"[]", b'"x"', b"\xff\xfe", b""):
        answer = await client.http.post(path, content=content, headers=kind)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "Bad Request"
    assert "Unsupported Media Type" in (await client.http.post(path, content=b"{}")).json()["error"]["message"]
    bodies: list[dict[str, Any]] = [{}, {"messages": "x"}, {"messages": []}, {"messages": [1]}]
    bodies += [{"messages": HELLO, "max_tokens": "many"}, {"messages": HELLO, "tools": []}]
    bodies += [{"messages": HELLO, "n": -1}, {"messages": HELLO, "chat_template": "x"}]
    bodies += [{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}]
    bodies += [{"messages": HELLO, "max_tokens": -5}, {"messages": HELLO, "tool_choice": "required"}]
    for body in bodies:
        assert (await client.http.post(path, json=body)).status_code == 400, body
    lone = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    assert (await client.http.post(path, content=lone, headers=kind)).status_code == 400
    assert (await client.http.get("/v1/nothing")).json() == {"detail": "Not Found"}
    assert (await client.chat(max_tokens=1)).status_code == 200


async def test_other_dialects_reach_the_same_engine(start: Start) -> None:
    client = await start(max_model_len=200)
    post = client.http.post
    answer = (await post("/v1/responses", json={"input": "hello", "max_output_tokens": 4})).json()
    assert answer["usage"]["output_tokens"] == 4
    assert answer["status"] == "incomplete"
    stream = (await post("/v1/responses", json={"input": "hello", "max_output_tokens": 4, "stream": True})).text
    assert stream.startswith("event: response.created\n")
    assert "event: response.incomplete" in stream
    message = {"messages": HELLO, "max_tokens": 4}
    anthropic = (await post("/v1/messages", json=message)).json()
    counted = (await post("/v1/messages/count_tokens", json=message)).json()
    assert anthropic["usage"] == {"input_tokens": counted["input_tokens"], "output_tokens": 4}
    assert "event: message_stop" in (await post("/v1/messages", json={**message, "stream": True})).text
    huge = {"messages": [{"role": "user", "content": "hi " * 500}], "max_tokens": 4}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = await post(path, json=huge)
        assert refused.status_code == 400
        assert refused.json()["type"] == "error"
    vectors = (await post("/v1/embeddings", json={"input": ["a", "b"]})).json()
    assert [len(item["embedding"]) for item in vectors["data"]] == [64, 64]
    assert vectors["usage"]["prompt_tokens"] == 2
    assert (await post("/v1/embeddings", json={"input": "hi " * 500})).status_code == 400
    assert (await post("/v1/chat/completions/render", json={})).status_code == 403
    assert await client.metric("vllm:kv_cache_usage_perc") == 0


async def test_faults_strike_as_asked_and_go_away(start: Start) -> None:
    client = await start()

    async def fault(text: str | None) -> httpx2.Response:
        return await client.http.post("/simulator/fault", json={"fault": text})

    await fault("status=503:1")
    assert (await client.chat(max_tokens=1)).status_code == 503
    assert (await client.chat(max_tokens=1)).status_code == 200
    await fault("die-before-headers:1")
    with pytest.raises(httpx2.TransportError):
        await client.chat(max_tokens=1)
    await fault("die-after-chunks=3:1")
    with pytest.raises(aiohttp.ClientPayloadError):
        async with open_stream(client) as answer:
            got = [line async for line in answer.content]
    assert "got" not in locals()
    await fault("die-after-chunks=0:1")
    with pytest.raises(httpx2.TransportError):
        await client.chat(max_tokens=1)
    await fault("garbage")
    with pytest.raises(ValueError, match=r"utf|Expecting|decode"):
        (await client.chat(max_tokens=1)).json()
    await fault("no-metrics")
    assert (await client.http.get("/metrics")).status_code == 404
    await fault("unhealthy")
    assert (await client.http.get("/health")).status_code == 503
    await fault("slow-headers=0.2:1")
    began = time.monotonic()
    await client.chat(max_tokens=1)
    assert time.monotonic() - began > 0.2
    assert (await fault("explode")).status_code == 400
    assert (await fault(None)).json() == {"fault": "none"}
    assert (await client.http.get("/health")).status_code == 200


async def test_a_stalled_stream_sends_some_chunks_and_hangs(start: Start) -> None:
    client = await start(fault="stall-after-chunks=2")
    async with open_stream(client, max_tokens=50) as answer:
        assert answer.status == 200
        first = [await answer.content.readline() for _ in range(4)]
        assert [line.startswith(b"data: ") for line in first] == [True, False, True, False]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await answer.content.readline()
    await client.until("vllm:num_requests_running", 0)


async def test_the_openai_client_works_against_it(start: Start) -> None:
    import openai

    client = await start()
    async with openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="any") as sdk:
        plain = await sdk.chat.completions.create(model="m", messages=HELLO, max_tokens=5)  # type: ignore[arg-type]
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 5
        stream = await sdk.chat.completions.create(
            model="m",
            messages=HELLO,  # type: ignore[arg-type]
            max_tokens=5,
            stream=True,
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == plain.choices[0].message.content
        assert [model.id async for model in sdk.models.list()] == ["m"]
