"""Every request gets a count from the best source there is, and sources that err lose trust."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokens_helpers import FakeBackend, chat_ask, llama_like, text_ask
from tokens_known import KNOWN

from gateway.api import pooling
from gateway.config import CountingSettings, ModelSettings
from gateway.tokens import loading, service
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.tokens.service import Counter, ServedModel
from gateway.types import ChatPrompt, Count, CountKind, TextPrompts

HELLO = [{"role": "user", "content": "Hello!"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
BACKENDS = ("http://a:1",)


@pytest.fixture(scope="module")
def folder(model_folder: Path) -> str:
    """Loaded beforehand: on a busy machine that takes longer than a request would wait for it."""
    source, options = str(model_folder), TemplateOptions()
    LOADED[source, options] = load(source, options, hub=False, cache_bytes=1 << 20)
    return source


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes seconds: counters of all tests share what one of them has loaded."""

    def cached(source: str, options: TemplateOptions, *, hub: bool, cache_bytes: int) -> LocalCounter:
        key = (source, options)
        if key not in LOADED:
            LOADED[key] = load(source, options, hub=False, cache_bytes=cache_bytes)
        return LOADED[key]

    monkeypatch.setattr(service, "load", cached)


LOADED: dict[tuple[str, TemplateOptions], LocalCounter] = {}


def counter_with(backend: FakeBackend, models: dict[str, ModelSettings] | None = None, **counting: Any) -> Counter:
    return Counter(CountingSettings(**counting), models or {}, backend.post)


def counts(tokens: int) -> FakeBackend:
    return FakeBackend((200, {"count": tokens}))


def down() -> FakeBackend:
    return FakeBackend(OSError("connection refused"))


async def test_the_local_tokenizer_counts_and_no_backend_is_asked(folder: str) -> None:
    backend = counts(99)
    count = await counter_with(backend).count(chat_ask(HELLO), ServedModel("m", folder, BACKENDS))
    assert count == Count(10, 10, CountKind.EXACT, "local")
    assert backend.asked == []


@pytest.mark.parametrize("name", KNOWN)
async def test_known_requests_have_their_known_counts(folder: str, name: str) -> None:
    body, prompt_tokens = KNOWN[name]
    count = await counter_with(down()).count(chat_ask(**body), ServedModel("m", folder))
    assert (count.total_tokens, count.kind, count.source) == (prompt_tokens, CountKind.EXACT, "local")


async def test_a_long_conversation_counts_the_same_in_threads(folder: str) -> None:
    counter, model = counter_with(down()), ServedModel("m", folder)
    messages = [{"role": "user", "content": "word " * 10_000}, {"role": "assistant", "content": "ok"}]
    ask = chat_ask(messages)
    assert len(ask.body) > service.INLINE_BYTES
    count = await counter.count(ask, model)
    local = counter.local(model)
    assert local is not None
    assert ask.prompt is not None
    assert (count.tokens,) == local.count(ask.prompt, {})
    assert count.tokens > 10_000
    texts = text_ask(["word " * 10_000, "a"])
    count = await counter.count(texts, model)
    assert (count.tokens, count.total_tokens) == (10_001, 10_002)


async def test_token_ids_are_counted_without_any_tokenizer() -> None:
    counter = counter_with(down())
    count = await counter.count(text_ask([[1, 2, 3], [4]]), ServedModel("m", "/nowhere"))
    assert count == Count(3, 4, CountKind.EXACT, "given")


async def test_without_a_local_tokenizer_a_backend_counts() -> None:
    backend = counts(7)
    counter = counter_with(backend)
    count = await counter.count(chat_ask(HELLO), ServedModel("m", "/nowhere", BACKENDS))
    assert (count.tokens, count.kind, count.source) == (7, CountKind.EXACT, "tokenize")
    view = counter.describe("m")
    assert view is not None
    assert (view.source, view.reason) == ("tokenize", "there is no folder /nowhere on this machine")


async def test_without_either_the_count_is_an_estimate() -> None:
    count = await counter_with(down()).count(chat_ask(HELLO), ServedModel("m", "/nowhere", BACKENDS))
    assert (count.kind, count.source) == (CountKind.ESTIMATE, "estimate")
    assert 1 <= count.tokens <= 40


async def test_local_counting_can_be_switched_off(folder: str) -> None:
    count = await counter_with(counts(7), local=False).count(chat_ask(HELLO), ServedModel("m", folder, BACKENDS))
    assert count.source == "tokenize"


async def test_images_are_left_to_the_backend(folder: str) -> None:
    model = ServedModel("m", folder, BACKENDS)
    counter = counter_with(counts(777))
    count = await counter.count(chat_ask(IMAGE), model)
    assert (count.tokens, count.kind, count.source) == (777, CountKind.EXACT, "tokenize")
    assert counter.observe("m", count, 770) == 7
    assert counter.observe("m", count, 770) == 7
    again = await counter.count(chat_ask(IMAGE), model)
    assert again.kind is CountKind.EXACT, "differences of media are nobody's mistake"
    assert (await counter_with(down()).count(chat_ask(IMAGE), model)).tokens > 1000


async def test_what_vllm_refuses_is_estimated_and_left_to_vllm(folder: str) -> None:
    backend = counts(7)
    count = await counter_with(backend).count(chat_ask([]), ServedModel("m", folder, BACKENDS))
    assert count.kind is CountKind.ESTIMATE
    assert backend.asked == []


async def test_text_that_is_not_unicode_is_estimated(folder: str) -> None:
    ask = chat_ask(HELLO)
    prompt = ChatPrompt([{"role": "user", "content": "half a pair \ud83d"}])
    count = await counter_with(down()).count(replace(ask, prompt=prompt), ServedModel("m", folder, BACKENDS))
    assert (count.kind, count.source) == (CountKind.ESTIMATE, "estimate")


async def test_truncation_by_the_server_bounds_each_prompt(folder: str) -> None:
    counter, model = counter_with(down()), ServedModel("m", folder)
    ask = text_ask(["one two three four", "one"], truncate_prompt_tokens=2)
    assert await counter.count(ask, model) == Count(2, 3, CountKind.EXACT, "local")
    open_ended = await counter.count(text_ask("one two three four", truncate_prompt_tokens=-1), model)
    assert open_ended.tokens == 4
    assert counter.observe("m", open_ended, 3) is None, "the server cut it to a window that is not known here"


async def test_two_wrong_local_counts_send_the_next_to_the_backend(folder: str) -> None:
    counter, model = counter_with(counts(12)), ServedModel("m", folder, BACKENDS, vllm_version="0.32.0")
    for _ in range(2):
        count = await counter.count(chat_ask(HELLO), model)
        assert count.source == "local"
        assert counter.observe("m", count, 12) == -2
    assert (await counter.count(chat_ask(HELLO), model)).source == "tokenize"
    view = counter.describe("m")
    assert view is not None
    assert view.wrong == {"local": 2}
    assert view.reason == "local counts were wrong, last by -2 of 12 tokens"
    other_vllm = ServedModel("m", folder, BACKENDS, vllm_version="0.33.0")
    assert (await counter.count(chat_ask(HELLO), other_vllm)).source == "local", "told otherwise"


async def test_right_counts_and_reports_of_others_take_no_trust(folder: str) -> None:
    counter, model = counter_with(counts(12)), ServedModel("m", folder, BACKENDS)
    count = await counter.count(chat_ask(HELLO), model)
    for _ in range(5):
        assert counter.observe("m", count, 10) == 0
        assert counter.observe("m", Count(3, 3, CountKind.ESTIMATE, "estimate"), 10) == -7
        assert counter.observe("m", count, 0) is None
        assert counter.observe("unheard of", count, 10) is None
    assert (await counter.count(chat_ask(HELLO), model)).source == "local"


async def test_a_backend_that_counts_wrongly_only_estimates() -> None:
    counter, model = counter_with(counts(50), distrust_after=1), ServedModel("m", "/nowhere", BACKENDS)
    count = await counter.count(chat_ask(HELLO), model)
    assert counter.observe("m", count, 60) == -10
    count = await counter.count(chat_ask(HELLO), model)
    assert (count.tokens, count.kind, count.source) == (50, CountKind.ESTIMATE, "tokenize")


async def test_estimates_learn_from_usage() -> None:
    counter, model = counter_with(down()), ServedModel("m", "/nowhere")
    ask = text_ask("lorem ipsum " * 200)
    first = await counter.count(ask, model)
    counter.observe("m", first, 1200)
    assert (await counter.count(ask, model)).tokens == 1200


async def test_one_load_serves_all_who_wait_for_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def slow(source: str, options: TemplateOptions, *, hub: bool, cache_bytes: int) -> LocalCounter:
        loads.append(source)
        time.sleep(0.05)
        return LOADED.get((source, options)) or load(source, options, hub=False, cache_bytes=0)

    monkeypatch.setattr(service, "load", slow)
    counter = counter_with(down())
    models = [ServedModel("m", folder), ServedModel("alias", folder)]
    found = await asyncio.gather(*(counter.count(chat_ask(HELLO), models[number % 2]) for number in range(20)))
    assert {count.source for count in found} == {"local"}
    assert loads == [folder]


async def test_a_load_that_takes_long_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()

    def stuck(source: str, options: TemplateOptions, *, hub: bool, cache_bytes: int) -> LocalCounter:
        held.wait(30)
        raise RuntimeError("late")

    monkeypatch.setattr(service, "load", stuck)
    counter = counter_with(counts(7))

    async def impatient(*_: Any) -> LocalCounter:
        return await loader.get("slow", TemplateOptions(), 0.05)

    loader = counter._loading
    monkeypatch.setattr(counter, "_local", impatient)
    count = await asyncio.wait_for(counter.count(chat_ask(HELLO), ServedModel("m", "slow", BACKENDS)), 5)
    assert count.source == "tokenize"
    view = counter.describe("m")
    assert view is not None
    assert view.reason == "its tokenizer is still loading"
    held.set()


async def test_a_loader_that_breaks_is_no_error_for_anyone_and_is_tried_again_later(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def broken(source: str, options: TemplateOptions, *, hub: bool, cache_bytes: int) -> LocalCounter:
        attempts.append(1)
        raise MemoryError("too big")

    monkeypatch.setattr(service, "load", broken)
    counter, model = counter_with(counts(7)), ServedModel("m", folder, BACKENDS)
    for _ in range(3):
        assert (await counter.count(chat_ask(HELLO), model)).source == "tokenize"
    assert len(attempts) == 1
    monkeypatch.setattr(loading, "RETRY_AFTER_S", 0.0)
    await counter.count(chat_ask(HELLO), model)
    for _ in range(100):
        if len(attempts) == 2:
            break
        await asyncio.sleep(0.01)
    assert len(attempts) == 2


async def test_settings_of_a_model_reach_its_counter(folder: str, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ style }}" + " a" * 30)
    models = {
        "m": ModelSettings(tokenizer=folder, chat_template=template, default_chat_template_kwargs={"style": " b" * 10})
    }
    counter, model = counter_with(down(), models), ServedModel("m", "/nowhere")
    await counter.warm(model)
    count = await counter.count(chat_ask(HELLO), model)
    assert count == Count(40, 40, CountKind.EXACT, "local")


async def test_gpt_oss_chats_are_only_estimated_by_tokenize(tmp_path: Path) -> None:
    source = llama_like(tmp_path)
    (source / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    counter, model = counter_with(counts(7), distrust_after=1), ServedModel("m", str(source), BACKENDS)
    await counter.warm(model)
    count = await counter.count(chat_ask(HELLO), model)
    if count.source == "local":  # rendered here by openai-harmony; once it errs, /tokenize has another template
        assert counter.observe("m", count, count.tokens + 5) == -5
        count = await counter.count(chat_ask(HELLO), model)
    assert (count.kind, count.source) == (CountKind.ESTIMATE, "tokenize")


async def test_warming_says_which_source_was_chosen_and_why(folder: str) -> None:
    class Same(FakeBackend):
        async def post(self, url: str, body: Any, headers: Any, timeout_s: float) -> Any:
            answer = await super().post(url, body, headers, timeout_s)
            local = LOADED[folder, TemplateOptions()]
            return (200, {"count": _tokenized(local, body)}) if url.endswith("/tokenize") else answer

    line = await counter_with(Same((200, {}))).warm(ServedModel("m", folder, BACKENDS))
    assert line.startswith(f"m: counted locally with {folder} (fastokens: equal to transformers on ")
    assert line.endswith(
        "string content; render: http://a:1/v1/chat/completions/render answered 403; "
        "count_tokens: http://a:1/v1/messages/count_tokens answered 403; tokenize: equal on 6 of 6 probes)"
    )
    line = await counter_with(counts(3)).warm(ServedModel("m", "/nowhere", BACKENDS))
    assert line.startswith("m: counted by the backends' tokenize: there is no folder /nowhere on this machine; ")
    line = await counter_with(down()).warm(ServedModel("m", "/nowhere", BACKENDS))
    assert line.startswith("m: estimated: there is no folder /nowhere on this machine; http://a:1/")
    assert line.endswith("http://a:1/tokenize failed: connection refused")


def _tokenized(local: LocalCounter, body: dict[str, Any]) -> int:
    if "prompt" in body:
        return local.count(TextPrompts((body["prompt"],), body["add_special_tokens"]), {})[0]
    kwargs = body.get("chat_template_kwargs", {})
    return local.count(ChatPrompt(body["messages"], tools=body.get("tools"), chat_template_kwargs=kwargs), {})[0]


async def test_a_server_with_another_template_is_found_out_before_its_first_request(folder: str) -> None:
    backend = counts(3)
    counter, model = counter_with(backend), ServedModel("m", folder, BACKENDS)
    line = await counter.warm(model)
    assert "counted by the backends: local counts were wrong, tokenize of the backend counts 3 where we count" in line
    assert (await counter.count(chat_ask(HELLO), model)).source == "tokenize"


async def test_the_render_endpoint_comes_before_tokenize_and_a_sidecar_before_the_backends() -> None:
    path = "/v1/chat/completions/render"
    backend = FakeBackend((200, {"count": 7}), {path: (200, {"token_ids": [1, 2]})})
    model = ServedModel("m", "/nowhere", BACKENDS)
    count = await counter_with(backend).count(chat_ask(HELLO), model)
    assert (count.tokens, count.kind, count.source) == (2, CountKind.EXACT, "render")
    beside = {"m": ModelSettings(render_url="http://beside:9")}
    await counter_with(backend, beside).count(chat_ask(HELLO), model)
    assert [url for url, _, _ in backend.asked] == [f"http://a:1{path}", f"http://beside:9{path}"]


async def test_a_tokenize_that_differs_from_the_render_endpoint_is_the_one_not_trusted(folder: str) -> None:
    class Rendering(FakeBackend):
        async def post(self, url: str, body: Any, headers: Any, timeout_s: float) -> Any:
            if not url.endswith("/v1/chat/completions/render"):
                return await super().post(url, body, headers, timeout_s)
            fields = {key: body[key] for key in ("tools", "reasoning_effort") if key in body}
            (tokens,) = LOADED[folder, TemplateOptions()].count(ChatPrompt(body["messages"], **fields), {})
            return 200, {"token_ids": [0] * tokens}

    changes: list[tuple[str, str, str]] = []
    backend = Rendering((200, {"count": 3}))
    counter = Counter(CountingSettings(), {}, backend.post, lambda *change: changes.append(change))
    line = await counter.warm(ServedModel("m", folder, BACKENDS, vllm_version="0.32.0"))
    assert "counted locally" in line
    assert "render: equal on 5 of 5 probes" in line
    assert changes == [("m", "tokenize", "lost")]
    await counter.count(chat_ask(HELLO), ServedModel("m", folder, BACKENDS, vllm_version="0.33.0"))
    assert changes[1:] == [("m", "tokenize", "regained")]


async def test_pairs_are_counted_here_and_still_an_estimate(folder: str) -> None:
    body = json.dumps({"query": "q", "documents": ["a", "b c"]}).encode()
    ask = pooling.parse(body, "application/json", "/rerank")
    count = await counter_with(down()).count(ask, ServedModel("m", folder))
    assert (count.kind, count.source) == (CountKind.ESTIMATE, "local")
    assert count.total_tokens == 3 + 4


async def test_token_ids_and_their_strings(folder: str) -> None:
    counter, model = counter_with(down()), ServedModel("m", folder)
    ids = await counter.token_ids(TextPrompts(("Hello <|im_start|>é",)), 30, model)
    assert ids is not None
    assert ids.strings() == ["Hello", "Ġ", "<|im_start|>", "Ã©"]
    assert len(ids.tokens) == 4
    assert await counter.token_ids(TextPrompts(("\ud800",)), 30, model) is None
    assert await counter.token_ids(ChatPrompt(HELLO, chat_template="{{ x }}"), 30, model) is None, "not trusted"
    assert await counter.token_ids(TextPrompts(("x",)), 30, ServedModel("n", "/nowhere")) is None


async def test_a_requests_own_template_is_rendered_where_the_server_trusts_it(folder: str) -> None:
    ask = chat_ask(HELLO, chat_template=" a" * 5)
    assert (await counter_with(down()).count(ask, ServedModel("m", folder))).kind is CountKind.ESTIMATE
    trusting = counter_with(down(), {"m": ModelSettings(trust_request_chat_template=True)})
    await trusting.warm(ServedModel("m", folder))
    assert (await trusting.count(ask, ServedModel("m", folder))).tokens == 5


async def test_tools_are_left_out_for_a_choice_of_none_where_the_server_does(folder: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    ask, model = chat_ask(HELLO, tools=tools, tool_choice="none"), ServedModel("m", folder)
    shown = await counter_with(down()).count(ask, model)
    hiding = counter_with(down(), {"m": ModelSettings(exclude_tools_when_tool_choice_none=True)})
    await hiding.warm(model)
    assert (await hiding.count(ask, model)).tokens == 10 < shown.tokens


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(
    st.sampled_from(["tools", "tool_choice", "chat_template_kwargs", "documents", "reasoning_effort", "n"]), JSON
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "reasoning", "name"]), JSON, max_size=4),
    max_size=3,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=MESSAGES, fields=FIELDS)
async def test_no_request_makes_counting_fail(folder: str, messages: list[Any], fields: dict[str, Any]) -> None:
    try:
        ask = chat_ask(messages, **fields)
    except Exception:
        return  # the parser's own answer
    count = await counter_with(down()).count(ask, ServedModel("m", folder, BACKENDS))
    assert count.tokens >= 0
