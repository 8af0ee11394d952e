"""A conversation that grew is counted as if nothing of it were known, however it was changed in between."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokens_helpers import LLAMA_TEMPLATE, llama_like
from tokens_random import EXAMPLES, MESSAGES, TOOLS

from gateway.api import chat
from gateway.tokens.errors import CannotCount
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.tokens.template import ChatTemplate
from gateway.types import ChatPrompt


@pytest.fixture(scope="module")
def qwen(model_folder: Path) -> LocalCounter:
    return load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=1 << 22)


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> LocalCounter:
    """The same model, remembering nothing."""
    return load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=0)


def outcome(counter: LocalCounter, prompt: ChatPrompt) -> Any:
    try:
        return counter.count(prompt, {})
    except CannotCount as error:
        return error.refused


@pytest.mark.timeout(900)
@settings(max_examples=EXAMPLES or 100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MESSAGES, min_size=1, max_size=8), st.sampled_from([None, TOOLS]), st.booleans(), st.data())
def test_parts_of_a_conversation_add_up_to_the_whole(
    qwen: LocalCounter, plain: LocalCounter, messages: list[Any], tools: Any, opens: bool, data: st.DataObject
) -> None:
    for length in sorted({data.draw(st.integers(1, len(messages))), len(messages)}):
        prompt = ChatPrompt(messages[:length], tools, add_generation_prompt=opens)
        assert outcome(qwen, prompt) == outcome(plain, prompt)


def test_random_edits_between_requests_change_no_count(qwen: LocalCounter, plain: LocalCounter) -> None:
    dice = random.Random(11)
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    resumed = 0
    for step in range(400):
        kind, place = dice.random(), dice.randrange(len(messages))
        if kind < 0.6:
            call = {"id": f"c{step}", "type": "function", "function": {"name": "ls", "arguments": '{"a": %d}' % step}}  # noqa: UP031
            messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}]
            messages.append(
                {"role": "tool", "tool_call_id": f"c{step}", "content": f"file {step}\n" * dice.randint(1, 9)}
            )
        elif kind < 0.7:
            messages = [*messages, {"role": "user", "content": f"and {step}?"}]
        elif kind < 0.8:
            messages = messages[: max(2, place)]
        elif kind < 0.9:
            messages = [*messages[:place], {**messages[place], "content": f"edited {step}"}, *messages[place + 1 :]]
        else:
            messages = copy.deepcopy(messages)
        prompt = ChatPrompt(
            messages,
            dice.choice((TOOLS, TOOLS, None)),
            chat_template_kwargs={"enable_thinking": False} if dice.random() < 0.1 else {},
        )
        known = qwen.count_known(prompt, {}, 100_000)
        resumed += known is not None
        if known is not None:
            assert (known.tokens,) == plain.count(prompt, {})
        counted = qwen.begin(prompt, {})()
        assert (counted.tokens,) == plain.count(prompt, {})
        places = [tokens for _, tokens in counted.chain]
        assert places == sorted(places)
        assert all(0 < tokens <= counted.tokens for tokens in places)
    assert resumed > 100


def test_equal_prompts_have_equal_chains_whatever_was_counted_before(qwen: LocalCounter, model_folder: Path) -> None:
    fresh = load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=1 << 22)
    messages: list[Any] = [{"role": "user", "content": "read it all"}]
    for turn in range(12):
        calls = [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]
        messages += [{"role": "assistant", "content": f"step {turn}", "tool_calls": calls}]
        messages += [{"role": "tool", "tool_call_id": "c", "content": f"line {turn} of the file\n" * 200}]
        grown = qwen.begin(ChatPrompt(list(messages), TOOLS), {})()
    whole = fresh.begin(ChatPrompt(copy.deepcopy(messages), TOOLS), {})()
    assert grown == whole
    assert len(whole.chain) > 12
    other = fresh.begin(ChatPrompt([*messages[:9], {"role": "tool", "content": "else " * 900}], TOOLS), {})()
    shared = sum(one == two for one, two in zip(whole.chain, other.chain, strict=False))
    assert 0 < shared < len(whole.chain)
    assert whole.chain[:shared] == other.chain[:shared]
    assert max(right - left for (_, left), (_, right) in zip(whole.chain, whole.chain[1:], strict=False)) <= 1300


def test_what_is_kept_is_bounded(model_folder: Path) -> None:
    counter = load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=400_000)
    conversations = counter._conversations
    assert conversations is not None
    for number in range(60):
        counter.count(ChatPrompt([{"role": "user", "content": f"{number} " * 500}], TOOLS), {})
        assert 0 < conversations.kept_bytes <= 100_000


def test_a_tokenizer_that_puts_a_space_before_a_texts_first_word_is_never_cut(tmp_path: Path) -> None:
    counter = load(str(llama_like(tmp_path / "llama")), TemplateOptions(), hub=False, cache_bytes=1 << 20)
    assert counter.encoder.edges is None
    assert counter.count_known(ChatPrompt([{"role": "user", "content": "hi"}]), {}, 1000) is None


@pytest.mark.parametrize(
    "body",
    [
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}",
        "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{{ loop.first }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ messages[loop.index0 - 1].content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ messages[-1].content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ loop.nextitem is defined and loop.nextitem.role }}{% endfor %}",
        "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.changed(m.role) }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}",
        "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{{ n.i }}{% endfor %}{{ n.i }}",
        "{% set n = namespace(l=[]) %}{% for m in messages %}{% set n.l = n.l + [m.role] %}{{ n.l }}{% endfor %}",
        "{% set n = namespace(u=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.u = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}{{ loop.index0 > n.u }}{% endfor %}",
        "{% set ms = messages[1:] %}{% for m in ms %}{{ m.content }}{{ ms[loop.index0 - 1].role }}{% endfor %}",
        "{% macro say(m) %}{{ m.content }}{{ messages[0].role }}{% endmacro %}{% for m in messages %}"
        "{{ say(m) }}{% if not loop.last %}{{ messages[loop.index].role }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ tools | length if tools else x }}{% endfor %}{{ messages[-1] }}",
        "{% if tools %}{% for m in messages %}{{ m.content }}{% endfor %}{% else %}{{ messages }}{% endif %}",
        "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
        LLAMA_TEMPLATE,
    ],
)
def test_a_resumed_template_renders_what_it_renders_whole(body: str) -> None:
    template, dice = ChatTemplate(body), random.Random(5)
    pool = [{"role": role, "content": text} for role in ("user", "assistant", "system") for text in ("a", "b", "stop")]
    messages, known, chunks = [pool[0]], None, []
    for _ in range(200):
        kind, place = dice.random(), dice.randrange(len(messages))
        if kind < 0.7:
            messages = [*messages, dice.choice(pool)]
        elif kind < 0.85:
            messages = messages[: place + 1]
        else:
            messages = [*messages[:place], dice.choice(pool), *messages[place + 1 :]]
        tools, variables = dice.choice((TOOLS, TOOLS, None)), {"x": dice.choice((1, 1, True))}
        session = template.resume(messages, tools, variables, {"bos_token": "<s>"}, known, [True] * 500)
        if session is None:
            return  # nothing is claimed of such a template
        text = "".join(session.pieces)
        if session.entered:
            fresh = ["".join(session.pieces[a:b]) for a, b in zip(session.at, session.at[1:], strict=False)]
            chunks = chunks[: session.start] + fresh
            text = session.marks.before + "".join(chunks) + "".join(session.pieces[session.at[-1] :])
        known = session.marks if session.entered else None
        assert text == template.render(messages, tools, variables, {"bos_token": "<s>"})


def test_numbers_beyond_64_bits_are_counted_with_all_their_digits(qwen: LocalCounter, plain: LocalCounter) -> None:
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "parameters": {"maximum": (1 << 256) - 1}}}]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}).encode()
    prompt = chat.parse(body, "application/json").prompt
    assert isinstance(prompt, ChatPrompt)
    assert str((1 << 256) - 1) in plain.render(prompt, {})
    assert qwen.count(prompt, {}) == plain.count(prompt, {})


def test_the_tools_of_many_clients_are_not_all_remembered(model_folder: Path) -> None:
    counter = load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=400_000)
    for number in range(60):
        function = {**TOOLS[0]["function"], "name": f"f{number}", "description": "x" * 10_000}
        counter.count(ChatPrompt([{"role": "user", "content": "hi"}], [{**TOOLS[0], "function": function}]), {})
        assert 0 < counter.kept_bytes <= 2 * 100_000


def shared(one: Any, other: Any) -> int:
    """Tokens of the longest beginning that two chains have in common."""
    return max((tokens for link, tokens in other.chain if link in {link for link, _ in one.chain}), default=0)


def agent(turns: int, first: str) -> list[Any]:
    messages: list[Any] = [{"role": first, "content": "Be brief. " * 300}, {"role": "user", "content": "read"}]
    for turn in range(turns):
        call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": f"step {turn}", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "c", "content": f"line {turn} of the file\n" * 100})
    return messages


def test_conversations_with_a_developers_message_are_counted_by_what_is_new(
    qwen: LocalCounter, plain: LocalCounter
) -> None:
    before = qwen.begin(ChatPrompt(agent(8, "developer"), TOOLS), {})()
    prompt = ChatPrompt(agent(9, "developer"), TOOLS)
    known = qwen.count_known(prompt, {}, 10_000)
    assert known is not None
    assert (known.tokens,) == plain.count(prompt, {})
    assert known == qwen.begin(ChatPrompt(agent(9, "system"), TOOLS), {})()
    assert before.tokens - 300 < shared(before, known) <= before.tokens
    late = [*agent(9, "developer"), {"role": "developer", "content": "Now hurry."}]
    for prompt in (ChatPrompt(late, TOOLS), ChatPrompt([*late, {"role": "user", "content": "go on"}], TOOLS)):
        assert (qwen.begin(prompt, {})().tokens,) == plain.count(prompt, {})


def test_beginnings_of_chats_that_are_rendered_whole_have_equal_hashes_too(plain: LocalCounter) -> None:
    for later in range(2, 12):
        one = plain.begin(ChatPrompt(agent(later - 1, "system"), TOOLS), {})()
        other = plain.begin(ChatPrompt(agent(later, "system"), TOOLS), {})()
        assert one.tokens * 0.98 - 800 < shared(one, other) <= other.tokens
        assert shared(one, plain.begin(ChatPrompt(agent(later, "user"), TOOLS), {})()) < 300
