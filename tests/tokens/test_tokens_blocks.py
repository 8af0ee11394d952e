"""The KV blocks of a prompt: the same keys however it was counted, and those of a conversation that grew are kept."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens_helpers import FakeBackend, chat_ask, text_ask
from tokens_random import TOOLS

from gateway.block_keys import BlockWish, PromptBlocks, block_keys, id_bytes, root_key, same_bytes
from gateway.config import CountingSettings
from gateway.tokens import service
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.tokens.service import Counter, ServedModel
from gateway.types import ChatPrompt

WISH = BlockWish((16, 100), root_key())


@pytest.fixture(scope="module")
def qwen(model_folder: Path) -> LocalCounter:
    return load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=1 << 22)


def keys_of(blocks: PromptBlocks | None) -> dict[int, list[int]]:
    assert blocks is not None
    return {size: list(keys) for size, keys in blocks.keys.items()}


def expected(qwen: LocalCounter, prompt: ChatPrompt, root: int = WISH.root) -> dict[int, list[int]]:
    ids = id_bytes(qwen.ids(prompt, {}))
    return {size: list(block_keys(ids, size, root)) for size in WISH.sizes}


def test_random_edits_between_requests_leave_the_keys_right(qwen: LocalCounter) -> None:
    dice = random.Random(4)
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    resumed = 0
    for step in range(150):
        kind, place = dice.random(), dice.randrange(len(messages))
        if kind < 0.6:
            call = {"id": f"c{step}", "type": "function", "function": {"name": "ls", "arguments": f'{{"a": {step}}}'}}
            messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}]
            text = f"file {step}\n" * dice.randint(1, 90)
            messages.append({"role": "tool", "tool_call_id": f"c{step}", "content": text})
        elif kind < 0.7:
            messages = [*messages, {"role": "user", "content": f"and {step}?"}]
        elif kind < 0.8:
            messages = messages[: max(2, place)]
        elif kind < 0.9:
            messages = [*messages[:place], {**messages[place], "content": f"edited {step}"}, *messages[place + 1 :]]
        else:
            messages = copy.deepcopy(messages)
        prompt = ChatPrompt(messages, dice.choice((TOOLS, TOOLS, None)))
        root = root_key(dice.choice(["", "", "lora"]))
        wish = dice.choice([None, replace(WISH, root=root), replace(WISH, root=root)])  # now and then nobody asks
        known = qwen.count_known(prompt, {}, 100_000, wish)
        counted = known or qwen.begin(prompt, {}, wish)()
        resumed += known is not None and wish is not None
        if wish is None:
            assert counted.blocks is None
        else:
            assert keys_of(counted.blocks) == expected(qwen, prompt, root)
            assert counted.blocks is not None and counted.blocks.tokens == counted.tokens
    assert resumed > 30


@given(st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=50))
def test_equal_beginnings_end_where_they_differ(start: bytes, one: bytes, other: bytes) -> None:
    pairs = zip(start + one, start + other, strict=False)
    wanted = next((place for place, (a, b) in enumerate(pairs) if a != b), len(start) + min(len(one), len(other)))
    assert same_bytes(start + one, start + other) == wanted


def test_only_what_is_new_of_a_conversation_is_hashed(qwen: LocalCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.tokens import growing

    hashed: list[int] = []

    def counting(ids: bytes, size: int, root: int, known: Any = ()) -> Any:
        keys = block_keys(ids, size, root, known)
        hashed.append(len(keys) - len(known))
        return keys

    monkeypatch.setattr(growing, "block_keys", counting)
    messages: list[Any] = [{"role": "user", "content": "a long story " * 3000}, {"role": "assistant", "content": "no"}]
    wish = BlockWish((16,), WISH.root)
    qwen.begin(ChatPrompt(messages), {}, wish)()
    messages += [{"role": "user", "content": "and then? " * 8}]
    qwen.begin(ChatPrompt(messages), {}, wish)()
    assert hashed[0] > 500 and hashed[1] < 10


def test_prompts_of_the_three_kinds_come_with_keys(qwen: LocalCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(service, "load", lambda *rest, **more: qwen)
    sizes: tuple[int, ...] = ()
    backend = FakeBackend((200, {"count": 1}))
    counter = Counter(CountingSettings(), {}, backend.post, block_sizes=lambda: sizes)
    model = ServedModel("m", "/somewhere")
    text = "Once upon a time there was a gateway. " * 40

    async def blocks_of(ask: Any, served: ServedModel = model) -> PromptBlocks | None:
        return (await counter.count(ask, served)).blocks

    async def main() -> None:
        nonlocal sizes
        chat = chat_ask([{"role": "user", "content": text}])
        monkeypatch.setattr(counter, "_local", _ready(qwen))
        assert await blocks_of(chat) is None  # nobody reports blocks
        sizes = (16, 100)
        assert keys_of(await blocks_of(chat)) == expected(qwen, chat.prompt)
        adapted = await blocks_of(chat, replace(model, adapter="fr"))
        assert keys_of(adapted) == expected(qwen, chat.prompt, root_key("fr"))
        salted = await blocks_of(chat_ask([{"role": "user", "content": text}], cache_salt="x"))
        assert keys_of(salted) == expected(qwen, chat.prompt, root_key("", "x"))
        ids = qwen.encoder.ids(text, True)
        wanted = {size: list(block_keys(id_bytes(ids), size, WISH.root)) for size in WISH.sizes}
        assert keys_of(await blocks_of(text_ask(text))) == wanted
        assert keys_of(await blocks_of(text_ask(ids))) == wanted
        assert await blocks_of(text_ask([text, text])) is None  # two prompts
        assert await blocks_of(text_ask(text, truncate_prompt_tokens=50)) is None
        assert await blocks_of(text_ask([-1, 2**40])) is None
        counter.close()

    asyncio.run(main())


def _ready(local: LocalCounter) -> Any:
    async def get(model: ServedModel, wait_s: float | None = None) -> LocalCounter:
        return local

    return get
