"""Mistral: chats have the tokens that vLLM gives them with mistral-common."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokens_helpers import chat_ask
from tokens_own import counted, known_chats

from gateway.tokens.errors import CannotCount, CannotLoad
from gateway.tokens.local import TemplateOptions, load
from gateway.tokens.mistral import MistralChats, MistralEncoder
from gateway.types import ChatPrompt, TextPrompts

DATA = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
FILES = {"tekken": "tekken_240911.json", "sentencepiece": "mistral_instruct_tokenizer_240323.model.v3"}


@pytest.fixture(scope="module", params=FILES)
def named(request: pytest.FixtureRequest) -> tuple[str, MistralEncoder]:
    return request.param, MistralEncoder(DATA / FILES[request.param])


@pytest.fixture(scope="module")
def spm() -> MistralEncoder:
    return MistralEncoder(DATA / FILES["sentencepiece"])


def prompt_of(messages: list[Any], **fields: Any) -> ChatPrompt:
    prompt = chat_ask(messages, **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_chats_of_agents_have_the_tokens_that_vllm_counted(named: tuple[str, MistralEncoder]) -> None:
    name, encoder = named
    chats = MistralChats(encoder)
    for prompt, tokens in known_chats(name):
        assert counted(chats, prompt) == tokens


def test_ids_are_cut_to_their_end_as_vllm_does(spm: MistralEncoder) -> None:
    def tokens(identity: str) -> int:
        call = {"id": identity, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": identity, "content": "x"}
        return MistralChats(spm).tokens(prompt_of([{"role": "user", "content": "go"}, calling, result]), {})

    assert tokens("chatcmpl-tool-abcdefghi") == tokens("abcdefghi")


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([{"role": "user", "content": "x"}] * 2 + [{"role": "tool", "tool_call_id": "a", "content": "x"}], {}),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"a": 1}}),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], {}),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True, "add_generation_prompt": False}),
        ([{"role": "narrator", "content": "x"}], {}),
        ([{"role": "user", "content": "\ud83d"}], {}),
    ],
    ids=["result without call", "kwargs", "answered already", "nothing to continue", "unknown role", "surrogate"],
)
def test_what_vllm_refuses_has_no_count(spm: MistralEncoder, messages: list[Any], fields: dict[str, Any]) -> None:
    assert counted(MistralChats(spm), ChatPrompt(messages, **fields)) is None


def test_a_repository_in_mistrals_format_needs_no_other_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model.v3").write_bytes((DATA / FILES["sentencepiece"]).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MistralForCausalLM"]}))
    counter = load(str(tmp_path), TemplateOptions(), hub=False, cache_bytes=0)
    prompt = prompt_of([{"role": "user", "content": "Hello"}])
    text = counter.render(prompt, {})
    assert "[INST]" in text and "Hello" in text
    assert counter.count(prompt, {}) == (4,)  # <s> [INST] Hello [/INST]
    assert counter.count(TextPrompts(("Hello",)), {}) == (2,)
    with pytest.raises(CannotCount):
        counter.ids(prompt, {})


def test_without_the_library_the_reason_names_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("mistral_common")]:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(CannotLoad, match=r"kvgate\[families\]"):
        load(str(tmp_path), TemplateOptions(), hub=False, cache_bytes=0)


def test_a_broken_file_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(CannotLoad, match="cannot read"):
        load(str(tmp_path), TemplateOptions(), hub=False, cache_bytes=0)
