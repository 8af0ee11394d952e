"""A backend counts by ``/tokenize``, with the knobs it ignores passed in ways it understands."""

from __future__ import annotations

from typing import Any

import pytest
from tokens_helpers import FakeBackend

from gateway.tokens.backend import MAX_TEXTS, RETRY_AFTER_S, Backends
from gateway.tokens.errors import CannotCount
from gateway.types import ChatPrompt, TextPrompts

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
