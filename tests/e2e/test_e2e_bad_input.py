"""Whatever nonsense a client sends, in any dialect: the server's own answer, or a clear refusal; never a failure."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from e2e_backends import Backends
from e2e_gateway import Gateway

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BROKEN_IMAGE = "data:image/png;base64,iVBORw0KGgoAAA"


def said(content: Any, role: Any = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more}]}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat: unknown role": (CHAT, said("x", role="wizard")),
    "chat: no role": (CHAT, {"messages": [{"content": "x"}]}),
    "chat: role is a number": (CHAT, said("x", role=7)),
    "chat: no content": (CHAT, {"messages": [{"role": "user"}]}),
    "chat: content is an object": (CHAT, said({"a": 1})),
    "chat: content is a number": (CHAT, said(5)),
    "chat: unknown part": (CHAT, said([{"type": "hologram", "hologram": "x"}])),
    "chat: result without a call": (CHAT, {"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}),
    "chat: no messages": (CHAT, {"messages": []}),
    "chat: tools are strings": (CHAT, {**said("x"), "tools": ["a"]}),
    "chat: tools are empty": (CHAT, {**said("x"), "tools": []}),
    "chat: tool without a name": (CHAT, {**said("x"), "tools": [{"type": "function", "function": {}}]}),
    "chat: template kwargs are a list": (CHAT, {**said("x"), "chat_template_kwargs": [1]}),
    "chat: template in the kwargs": (CHAT, {**said("x"), "chat_template_kwargs": {"chat_template": "x"}}),
    "chat: kwargs of transformers": (CHAT, {**said("x"), "chat_template_kwargs": {"tokenize": True}}),
    "chat: a template of its own": (CHAT, {**said("x"), "chat_template": "{{ raise_exception('no') }}"}),
    "chat: a template that never ends": (CHAT, {**said("x"), "chat_template": "{% for x in range(99999999) %}"}),
    "chat: broken image": (CHAT, said([{"type": "image_url", "image_url": {"url": BROKEN_IMAGE}}])),
    "chat: image without a url": (CHAT, said([{"type": "image_url", "image_url": {}}])),
    "chat: lone surrogate": (CHAT, said("\ud800 and \udfff")),
    "chat: lone surrogate in a tool": (
        CHAT,
        {**said("x"), "tools": [{"type": "function", "function": {"name": "\ud800"}}]},
    ),
    "chat: both endings": (CHAT, {**said("x"), "continue_final_message": True, "add_generation_prompt": True}),
    "chat: arguments are a list": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": [1]}}]}]},
    ),
    "chat: priority is a word": (CHAT, {**said("x"), "priority": "high"}),
    "text: priority is a list": (TEXT, {"prompt": "x", "priority": [1]}),
    "responses: priority is a fraction": (RESPONSES, {"input": "x", "priority": 0.5}),
    "text: prompt is an object": (TEXT, {"prompt": {"a": 1}}),
    "text: prompt is mixed": (TEXT, {"prompt": ["a", 1]}),
    "text: no prompt": (TEXT, {}),
    "text: empty list": (TEXT, {"prompt": []}),
    "text: lone surrogate": (TEXT, {"prompt": "a\ud800"}),
    "text: ids out of range": (TEXT, {"prompt": [10**12]}),
    "text: negative ids": (TEXT, {"prompt": [-5]}),
    "responses: input is a number": (RESPONSES, {"input": 5}),
    "responses: empty input": (RESPONSES, {"input": []}),
    "responses: item is a string": (RESPONSES, {"input": ["x"]}),
    "responses: unknown item": (RESPONSES, {"input": [{"type": "dream", "text": "x"}]}),
    "responses: unknown role": (RESPONSES, {"input": [{"role": "wizard", "content": "x"}]}),
    "responses: no content": (RESPONSES, {"input": [{"role": "user"}]}),
    "responses: output without a call": (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
    ),
    "responses: call without a name": (RESPONSES, {"input": [{"type": "function_call", "call_id": "c"}]}),
    "responses: encrypted reasoning": (
        RESPONSES,
        {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}]},
    ),
    "responses: unknown earlier answer": (RESPONSES, {"input": "x", "previous_response_id": "resp_none"}),
    "responses: instructions are a list": (RESPONSES, {"input": "x", "instructions": ["y"]}),
    "responses: unknown tool": (RESPONSES, {"input": "x", "tools": [{"type": "teleport"}]}),
    "responses: tool without a name": (RESPONSES, {"input": "x", "tools": [{"type": "function"}]}),
    "responses: lone surrogate": (RESPONSES, {"input": "\udc00"}),
    "responses: broken image": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": BROKEN_IMAGE}]}]},
    ),
    "messages: unknown role": (MESSAGES, said("x", role="wizard")),
    "messages: no content": (MESSAGES, {"messages": [{"role": "user"}]}),
    "messages: unknown block": (MESSAGES, said([{"type": "hologram"}])),
    "messages: block is a string": (MESSAGES, said(["x"])),
    "messages: result without a use": (MESSAGES, said([{"type": "tool_result", "tool_use_id": "t", "content": "x"}])),
    "messages: use without a name": (MESSAGES, said([{"type": "tool_use"}], role="assistant")),
    "messages: input is a string": (
        MESSAGES,
        said([{"type": "tool_use", "name": "f", "input": "x"}], role="assistant"),
    ),
    "messages: system is a number": (MESSAGES, {**said("x"), "system": 5}),
    "messages: tool without a schema": (MESSAGES, {**said("x"), "tools": [{"name": "f"}]}),
    "messages: thinking is a word": (MESSAGES, {**said("x"), "thinking": "hard"}),
    "messages: lone surrogate": (MESSAGES, said("\ud800")),
    "messages: broken image": (
        MESSAGES,
        said([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}]),
    ),
    "messages: no messages": (MESSAGES, {"messages": []}),
}
BUDGET = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


def encoded(path: str, body: dict[str, Any], model: str) -> bytes:
    return json.dumps({"model": model, BUDGET[path]: 1, **body}).encode()


@pytest.mark.parametrize("name", BODIES)
def test_bad_input_gets_the_servers_own_answer(gateway: Gateway, backends: Backends, name: str) -> None:
    path, body = BODIES[name]
    content = encoded(path, body, backends.model)
    headers = {"content-type": "application/json"}
    ours = gateway.http.post(path, content=content, headers=headers)
    assert ours.status_code < 500, ours.text
    theirs = httpx2.post(f"{backends.large.url}{path}", content=content, headers=headers, timeout=60, trust_env=False)
    if ours.status_code == 200 and "x-kvgate-repairs" in ours.headers:
        return  # put right on its way, which the server then takes
    if theirs.status_code < 500:
        assert ours.status_code == theirs.status_code, (ours.text, theirs.text)
    if ours.status_code >= 400:
        assert ours.json()["error"]["message"]
        assert (ours.json().get("type") == "error") is (path == MESSAGES)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_fifty_megabytes_are_refused_and_hold_nobody_up(gateway: Gateway, path: str) -> None:
    text = "word " * (10 << 20)
    body = {"input": text} if path == RESPONSES else said(text)
    answer = gateway.http.post(
        path, content=encoded(path, body, gateway.model), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text[:500]
    assert "maximum context length" in answer.text or "prompt is too long" in answer.text
