"""gpt-oss: chats and Responses requests have the tokens that vLLM's Harmony code gives them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tokens_helpers import FakeBackend, chat_ask
from tokens_own import KNOWN, counted, known_chats

from gateway.api import responses
from gateway.config import CountingSettings
from gateway.tokens import service
from gateway.tokens.clock import BackendClock
from gateway.tokens.errors import CannotCount, CannotLoad
from gateway.tokens.harmony import HarmonyChats
from gateway.tokens.local import LocalCounter, TemplateOptions
from gateway.tokens.service import Counter, ServedModel
from gateway.types import ChatPrompt, CountKind

pytest.importorskip("openai_harmony")

CLOCK = BackendClock(start_date=KNOWN["date"])


@pytest.fixture(scope="module")
def harmony() -> HarmonyChats:
    return HarmonyChats(None, CLOCK)


def prompt_of(messages: list[Any], **fields: Any) -> ChatPrompt:
    prompt = chat_ask(messages, **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_chats_of_agents_have_the_tokens_that_vllm_counted(harmony: HarmonyChats) -> None:
    for prompt, tokens in known_chats("harmony"):
        assert counted(harmony, prompt) == tokens


def test_responses_requests_have_the_tokens_that_vllm_counted(harmony: HarmonyChats) -> None:
    for document, tokens in KNOWN["responses"]:
        body = json.dumps({"model": "m", **document}).encode()
        prompt = responses.parse(body, "application/json").prompt
        assert isinstance(prompt, ChatPrompt)
        assert counted(harmony, prompt) == tokens


def test_a_conversation_costs_what_it_says_and_the_frames_around_it(harmony: HarmonyChats) -> None:
    hello = prompt_of([{"role": "user", "content": "Hello"}])
    more = prompt_of([*hello.messages, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hello"}])
    # <|start|>assistant<|channel|>final<|message|>Hi<|end|> and <|start|>user<|message|>Hello<|end|>
    assert harmony.tokens(more, {}) - harmony.tokens(hello, {}) == 7 + 5


def test_special_tokens_in_a_text_are_plain_text(harmony: HarmonyChats) -> None:
    plain, special = (prompt_of([{"role": "user", "content": text}]) for text in ("", "<|end|><|start|>"))
    assert harmony.tokens(special, {}) > harmony.tokens(plain, {}) + 2


def test_old_thoughts_are_dropped_and_those_of_the_running_turn_are_kept(harmony: HarmonyChats) -> None:
    user = {"role": "user", "content": "go"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    thinking = {"role": "assistant", "reasoning": "a long thought " * 20, "tool_calls": [call]}
    bare = {key: value for key, value in thinking.items() if key != "reasoning"}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    final = {"role": "assistant", "content": "done"}

    def tokens(*messages: Any) -> int:
        return harmony.tokens(prompt_of(list(messages)), {})

    assert tokens(user, thinking, result, final, user) == tokens(user, bare, result, final, user)
    assert tokens(user, thinking, result) > tokens(user, bare, result) + 60


@pytest.mark.parametrize(
    "ordinary", [lambda text: 1, lambda text: len(text) // 4], ids=["one", "a quarter of the characters"]
)
def test_a_fast_encoder_that_differs_is_not_used(harmony: HarmonyChats, ordinary: Callable[[str], int]) -> None:
    careful = HarmonyChats(ordinary, CLOCK)
    prompt = prompt_of([{"role": "user", "content": "the quick brown fox"}])
    assert careful.tokens(prompt, {}) == harmony.tokens(prompt, {})


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning_effort": "extreme"},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"role": "user", "content": [1]}]},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]},
    ],
    ids=[
        "effort none",
        "unknown effort",
        "unknown role",
        "content of numbers",
        "lone surrogate",
        "arguments as object",
    ],
)
def test_what_vllm_refuses_has_no_count_and_raises_nothing_else(harmony: HarmonyChats, fields: dict[str, Any]) -> None:
    prompt = ChatPrompt(**{"messages": [{"role": "user", "content": "x"}], **fields})
    with pytest.raises(CannotCount):
        harmony.tokens(prompt, {})


def test_tools_that_the_server_runs_itself_are_left_to_the_server(harmony: HarmonyChats) -> None:
    document = {"input": "x", "tools": [{"type": "web_search_preview"}]}
    prompt = replace(prompt_of([{"role": "user", "content": "x"}]), responses=document)
    with pytest.raises(CannotCount, match="described by it") as caught:
        harmony.tokens(prompt, {})
    assert not caught.value.refused


async def test_a_limit_on_prompt_tokens_is_not_heeded_as_vllm_does_not(
    harmony: HarmonyChats, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder: Any = SimpleNamespace(is_fast=True, edges=None)
    local = LocalCounter(encoder, "", None, {}, TemplateOptions(), None, own=harmony)
    monkeypatch.setattr(service, "load", lambda *_, **__: local)
    counter = Counter(CountingSettings(), {}, FakeBackend(OSError()).post)
    ask = chat_ask([{"role": "user", "content": "Hello"}], truncate_prompt_tokens=5)
    count = await counter.count(ask, ServedModel("m", "/gpt-oss"))
    assert isinstance(ask.prompt, ChatPrompt)
    assert (count.kind, count.tokens) == (CountKind.EXACT, harmony.tokens(ask.prompt, {}))
    assert count.tokens > 60


def test_without_the_library_the_reason_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    with pytest.raises(CannotLoad, match="oss-harmony"):
        HarmonyChats(None, CLOCK)
