"""A message's share of a chat: the same wherever it stands, and in sum close to the whole count."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokens_helpers import chat_ask, llama_like

from gateway.config import CountingSettings
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.tokens.service import Counter, ServedModel
from gateway.types import ChatPrompt

TOOLS = [{"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def qwen(model_folder: Path) -> LocalCounter:
    return load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=1 << 20)


def call(number: int, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number}", "type": "function", "function": {"name": "ls", "arguments": json.dumps(arguments)}}


def agent(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful engineer."},
        {"role": "user", "content": "Find the bug in main.py, please."},
    ]
    for turn in range(turns):
        calls = [call(turn, path=f"/src/{turn}")]
        messages.append({"role": "assistant", "content": f"Looking at part {turn}.", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call{turn}", "content": f"file{turn}.py\n" * 20})
    return messages


def shares(counter: LocalCounter, messages: list[Any], **fields: Any) -> tuple[tuple[int, ...], int]:
    prompt = ChatPrompt(messages, **fields)
    found = counter.message_tokens(prompt, {})
    return found, counter.overhead_tokens(prompt, {}, found)


def test_shares_of_an_agent_conversation_add_up_to_its_count(qwen: LocalCounter) -> None:
    for tools in (None, TOOLS):
        messages = agent(12)
        found, overhead = shares(qwen, messages, tools=tools)
        (whole,) = qwen.count(ChatPrompt(messages, tools), {})
        assert abs(sum(found) + overhead - whole) <= 2
        assert min(found) > 3


def test_a_message_has_the_same_share_wherever_it_stands(qwen: LocalCounter) -> None:
    messages = agent(6)
    whole, _ = shares(qwen, messages, tools=TOOLS)
    for start in range(1, len(messages)):
        assert shares(qwen, messages[start:])[0] == whole[start:]
    assert shares(qwen, messages[::-1])[0] == whole[::-1]


def test_reasoning_between_tool_calls_counts_and_after_a_question_does_not(qwen: LocalCounter) -> None:
    thought = "I should look at the folder first. " * 10
    plain, calling = {"role": "assistant", "content": "Done."}, {"role": "assistant", "tool_calls": [call(1)]}
    both, _ = shares(qwen, [plain, {**plain, "reasoning": thought}, calling, {**calling, "reasoning": thought}])
    assert both[0] == both[1]
    assert both[3] - both[2] >= qwen.measure(thought)


def test_what_the_template_refuses_is_measured_as_text(qwen: LocalCounter) -> None:
    odd = ["no object", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, {}, None]
    found, overhead = shares(qwen, [*odd, {"role": "user", "content": "\ud800"}], tools=TOOLS)
    assert all(share > 0 for share in found)
    assert found[1] > 1000
    assert overhead > 0


def test_a_template_that_wants_turns_to_alternate_has_shares_too(tmp_path: Path) -> None:
    folder = llama_like(tmp_path / "alternating")
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate') }}{% endif %}<|start|>{{ m.role }}<|end|>{{ m.content }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    counter = load(str(folder), TemplateOptions(), hub=False, cache_bytes=0)
    messages = [{"role": role, "content": "the quick brown fox"} for role in ("user", "assistant", "user")]
    found, overhead = shares(counter, messages)
    assert sum(found) + overhead == counter.count(ChatPrompt(messages), {})[0]
    assert found[0] == found[2]


def test_the_service_gives_shares_once_the_tokenizer_is_there(model_folder: Path) -> None:
    async def scenario() -> None:
        async def no_backend(*_: Any) -> Any:
            raise OSError

        counter = Counter(CountingSettings(), {}, no_backend)
        served, ask = ServedModel("m", str(model_folder)), chat_ask(agent(3), tools=TOOLS)
        try:
            assert await counter.message_tokens(ask, served) is None
            await counter.warm(served)
            count = await counter.count(ask, served)
            found = await counter.message_tokens(ask, served)
            assert found is not None
            assert abs(sum(found[0]) + found[1] - count.tokens) <= 2
        finally:
            counter.close()

    asyncio.run(scenario())
