"""A backend counts by ``/tokenize``, with the knobs it ignores passed in ways it understands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokens_helpers import FakeBackend

from gateway.api.parsers import parser_of
from gateway.tokens.backend import MAX_TEXTS, RETRY_AFTER_S, Backends
from gateway.tokens.errors import CannotCount
from gateway.types import Ask, ChatPrompt, TextPrompts

URLS = ("http://a:1", "http://b:2")
USER = {"role": "user", "content": "hi"}


async def ask(
    backend: FakeBackend,
    prompt: ChatPrompt | TextPrompts,
    version: str | None = "0.32.0",
    urls: tuple[str, ...] = URLS,
) -> tuple[int, ...]:
    return await Backends(backend.post, 1.0).count("tokenize", prompt, None, "m", urls, {URLS[0]: "secret"}, version)


async def test_a_chat_is_sent_with_all_that_changes_its_prompt() -> None:
    backend = FakeBackend((200, {"count": 12}))
    prompt = ChatPrompt(
        [{"role": "assistant", "content": "a", "reasoning_content": "r"}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template="{{ x }}",
        chat_template_kwargs={"x": 1, "tokenize": True},
        documents=[{"text": "d"}],
        reasoning_effort="none",
        mm_processor_kwargs={"max_pixels": 1},
        media_io_kwargs={"video": {"fps": 1}},
    )
    assert await ask(backend, prompt) == (12,)
    ((url, body, headers),) = backend.asked
    assert url == "http://a:1/tokenize"
    assert headers == {"authorization": "Bearer secret"}
    assert body == {
        "model": "m",
        "messages": [{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": False,
        "chat_template": "{{ x }}",
        "chat_template_kwargs": {
            "x": 1,
            "documents": [{"text": "d"}],
            "reasoning_effort": "none",
            "enable_thinking": False,
        },
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "mm_processor_kwargs": {"max_pixels": 1},
        "media_io_kwargs": {"video": {"fps": 1}},
    }


async def test_every_text_is_asked_for_alone() -> None:
    backend = FakeBackend((200, {"count": 3}))
    assert await ask(backend, TextPrompts(("a", "b"), False)) == (3, 3)
    assert [body["prompt"] for _, body, _ in backend.asked] == ["a", "b"]
    assert all(body["add_special_tokens"] is False for _, body, _ in backend.asked)
    with pytest.raises(CannotCount):
        await ask(backend, TextPrompts(("a",) * (MAX_TEXTS + 1)))


@pytest.mark.parametrize(
    "answer",
    [
        OSError("refused"),
        (404, {"error": {"message": "no"}}),
        (500, {}),
        (200, {}),
        (200, {"count": "12"}),
        (200, {"count": True}),
        (200, {"count": -1}),
    ],
)
async def test_a_backend_without_an_answer_is_followed_by_the_next_and_no_other(answer: Any) -> None:
    backend = FakeBackend(answer)
    with pytest.raises(CannotCount) as caught:
        await ask(backend, ChatPrompt([USER]), urls=(*URLS, "http://c:3"))
    assert [url for url, _, _ in backend.asked] == ["http://a:1/tokenize", "http://b:2/tokenize"]
    assert not caught.value.refused


async def test_a_request_one_backend_refuses_is_not_put_to_another() -> None:
    backend = FakeBackend((400, {"error": {"message": "template says no"}}))
    with pytest.raises(CannotCount) as caught:
        await ask(backend, ChatPrompt([USER]))
    assert caught.value.refused
    assert len(backend.asked) == 1


async def test_no_backend_no_count() -> None:
    with pytest.raises(CannotCount, match="no backend is up"):
        await ask(FakeBackend((200, {"count": 1})), ChatPrompt([USER]), urls=())


@pytest.mark.parametrize(("version", "asked"), [("0.9.2", 0), ("0.10.2", 1), ("0.32.0", 1), (None, 1), ("dev", 1)])
async def test_old_servers_would_leave_out_the_tools(version: str | None, asked: int) -> None:
    backend = FakeBackend((200, {"count": 5}))
    prompt = ChatPrompt([USER], tools=[{"type": "function", "function": {"name": "f"}}])
    if asked:
        assert await ask(backend, prompt, version) == (5,)
    else:
        with pytest.raises(CannotCount, match="takes no tools"):
            await ask(backend, prompt, version)
    assert len(backend.asked) == asked


# --- the render endpoints and count_tokens

RENDERED = (200, {"token_ids": [1, 2, 3]})


def asked(path: str, **body: Any) -> Ask:
    return parser_of("POST", path)(json.dumps({"model": "m", **body}).encode(), "application/json", path)


async def count(backends: Backends, source: str, request: Ask, urls: tuple[str, ...] = URLS[:1]) -> tuple[int, ...]:
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt | TextPrompts)
    return await backends.count(source, prompt, request, "m", urls, {}, None)


@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER], "max_tokens": 9, "stream": True, "reasoning_effort": "low", "n": 2},
            {"messages": [USER], "reasoning_effort": "low"},
        ),
        ("/v1/responses", {"input": "x", "max_output_tokens": 9, "store": True}, {"input": "x"}),
        (
            "/v1/messages",
            {"messages": [USER], "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"messages": [USER], "max_tokens": 1},
        ),
    ],
)
async def test_a_request_is_rendered_as_it_came_less_what_renders_nothing(
    path: str, body: dict[str, Any], sent: dict[str, Any]
) -> None:
    backend = FakeBackend((200, {"count": 9}), {f"{path}/render": RENDERED})
    assert await count(Backends(backend.post, 1.0), "render", asked(path, **body)) == (3,)
    ((url, document, _),) = backend.asked
    assert url == f"{URLS[0]}{path}/render"
    assert document == {"model": "m", "mm_payload": "none", **sent}


async def test_count_tokens_takes_anthropics_requests_only() -> None:
    backend = FakeBackend((200, {"count": 9}), {"/v1/messages/count_tokens": (200, {"input_tokens": 8})})
    backends = Backends(backend.post, 1.0)
    request = asked("/v1/messages", messages=[USER], system="s", max_tokens=5, metadata={"user_id": "u"})
    assert await count(backends, "count_tokens", request) == (8,)
    assert backend.asked[0][1] == {"model": "m", "messages": [USER], "system": "s"}
    with pytest.raises(CannotCount):
        await count(backends, "count_tokens", asked("/v1/chat/completions", messages=[USER]))


async def test_an_endpoint_that_is_off_is_not_asked_again_for_ten_minutes() -> None:
    now_s = 1000.0
    backend = FakeBackend((200, {"count": 9}))
    backends = Backends(backend.post, 1.0, clock=lambda: now_s)
    request = asked("/v1/chat/completions", messages=[USER])
    for _ in range(3):
        with pytest.raises(CannotCount):
            await count(backends, "render", request)
    assert len(backend.asked) == 1
    assert backends.lacks(URLS[0], "/v1/chat/completions/render")
    now_s += RETRY_AFTER_S
    with pytest.raises(CannotCount):
        await count(backends, "render", request)
    assert len(backend.asked) == 2


async def test_an_unknown_model_says_nothing_of_the_endpoint() -> None:
    backend = FakeBackend((404, {"error": {"message": "The model `m` does not exist."}}))
    backends = Backends(backend.post, 1.0)
    with pytest.raises(CannotCount):
        await count(backends, "tokenize", asked("/v1/chat/completions", messages=[USER]))
    assert not backends.lacks(URLS[0], "/tokenize")
    backend.answer = (404, {"detail": "Not Found"})
    with pytest.raises(CannotCount):
        await count(backends, "tokenize", asked("/v1/chat/completions", messages=[USER]))
    assert backends.lacks(URLS[0], "/tokenize")


async def test_a_prompt_beyond_the_window_is_left_to_the_next_source_and_a_wrong_one_is_not() -> None:
    path = "/v1/chat/completions/render"
    long = (400, {"error": {"message": "This model's maximum context length is 4096 tokens. However, …"}})
    wrong = (400, {"error": {"message": "unknown role"}})
    request = asked("/v1/chat/completions", messages=[USER])
    for answer, refused in ((long, False), (wrong, True)):
        backends = Backends(FakeBackend((200, {"count": 9}), {path: answer}).post, 1.0)
        with pytest.raises(CannotCount) as caught:
            await count(backends, "render", request)
        assert caught.value.refused is refused
