"""A local count equals vLLM's, and only an encoder that proves itself equal is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokens_helpers import LLAMA_TEMPLATE, chat_ask, llama_like, text_ask
from tokens_known import KNOWN

from gateway.tokens import encoder as encoders
from gateway.tokens.errors import CannotCount, CannotLoad
from gateway.tokens.local import MAX_TEXT_CHARS, LocalCounter, TemplateOptions, load, template_variables
from gateway.types import ChatPrompt, TextPrompts, TokenPrompts


def load_from(folder: Path, options: TemplateOptions | None = None) -> LocalCounter:
    return load(str(folder), options or TemplateOptions(), hub=False, cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def qwen(model_folder: Path) -> LocalCounter:
    return load_from(model_folder)


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_like(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama(llama_folder: Path) -> LocalCounter:
    return load_from(llama_folder)


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", KNOWN)
def test_counts_equal_the_usage_that_vllm_reported(qwen: LocalCounter, name: str) -> None:
    body, prompt_tokens = KNOWN[name]
    ask = chat_ask(**body)
    assert ask.prompt is not None
    (tokens,) = qwen.count(ask.prompt, {})
    if ask.truncate_prompt_tokens is not None:
        tokens = min(tokens, ask.truncate_prompt_tokens)
    assert tokens == prompt_tokens


def test_qwen_is_encoded_by_the_fast_encoder(qwen: LocalCounter) -> None:
    assert qwen.encoder.is_fast
    assert qwen.note.startswith("equal to transformers on")
    assert qwen.content_format == "string"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=30) | st.sampled_from(["<|im_end|>", "<think>", "\n\n", " ", "  x"]), max_size=6))
def test_any_text_has_as_many_tokens_as_transformers_says(qwen: LocalCounter, pieces: list[str]) -> None:
    text = "".join(pieces)
    reference = encoders.ReferenceEncoder(REFERENCE["tokenizer"])
    assert qwen.encode((text,), True) == (len(reference.ids(text, True)),)
    assert reference.count(text, False) == len(reference.ids(text, False))


REFERENCE: dict[str, Any] = {}


@pytest.fixture(autouse=True, scope="module")
def _reference(model_folder: Path) -> None:
    REFERENCE["tokenizer"] = tokenizer_of(model_folder)


def test_a_tokenizer_with_a_bos_of_its_own_adds_it_to_texts_and_not_to_chats(llama: LocalCounter) -> None:
    bare, with_bos = (llama.count(TextPrompts(("hello world",), special), {})[0] for special in (False, True))
    assert with_bos == bare + 1
    prompt = ChatPrompt([{"role": "user", "content": "hello world"}])
    assert llama.render(prompt, {}) == "<s><|start|>user<|end|>hello world<|eot|><|start|>assistant<|end|>"
    doubled = ChatPrompt(prompt.messages, add_special_tokens=True)
    assert llama.count(doubled, {})[0] == llama.count(prompt, {})[0] + 1


def test_a_fast_encoder_that_differs_is_not_used(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = encoders.FastEncoder.ids

    def wrong(self: encoders.FastEncoder, text: str, add_special_tokens: bool) -> list[int]:
        return right(self, text, add_special_tokens)[: 3 if "fox" in text else None]

    monkeypatch.setattr(encoders.FastEncoder, "ids", wrong)
    counter = load_from(model_folder)
    assert counter.encoder.name == "transformers"
    assert "differs on" in counter.note
    assert counter.count(TextPrompts(("the quick brown fox jumps",)), {}) == (5,)


def test_a_vocabulary_the_fast_encoder_cannot_read_is_no_failure(llama: LocalCounter) -> None:
    assert llama.encoder.name == "transformers"
    assert llama.note.startswith("fastokens cannot take it: ")
    assert llama.count(TextPrompts(("hello",)), {})[0] > 0


def test_the_remembered_segments_change_no_count(model_folder: Path, qwen: LocalCounter) -> None:
    forgetful = load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=0)
    messages = [{"role": "user", "content": "one two three " * 9}]
    for _ in range(6):
        messages.append({"role": "assistant", "content": " ".join(str(message) for message in messages)})
        prompt = ChatPrompt(messages)
        assert qwen.count(prompt, {}) == forgetful.count(prompt, {})


@pytest.mark.parametrize("encoder_name", ["fast", "reference"])
def test_text_that_is_not_unicode_is_not_counted(encoder_name: str, qwen: LocalCounter, model_folder: Path) -> None:
    encoder = qwen.encoder if encoder_name == "fast" else encoders.ReferenceEncoder(tokenizer_of(model_folder))
    with pytest.raises(CannotCount) as caught:
        encoder.count("half a pair \ud83d", False)
    assert caught.value.refused


def test_a_text_beyond_every_window_is_not_encoded(qwen: LocalCounter) -> None:
    with pytest.raises(CannotCount) as caught:
        qwen.encode(("x" * (MAX_TEXT_CHARS + 1),), False)
    assert caught.value.refused


def test_lengths_of_token_prompts_are_taken_as_they_are(qwen: LocalCounter) -> None:
    assert qwen.count(TokenPrompts((3, 7)), {}) == (3, 7)


def test_every_text_is_a_prompt_of_its_own(qwen: LocalCounter) -> None:
    prompt = text_ask(["a b c", "d"]).prompt
    assert isinstance(prompt, TextPrompts)
    assert qwen.count(prompt, {}) == (3, 1)


def test_a_reasoning_effort_switches_thinking_unless_the_request_does() -> None:
    def of(**fields: Any) -> dict[str, Any]:
        return template_variables(ChatPrompt([], **fields), {"enable_thinking": True, "other": 1})

    assert of()["enable_thinking"] is True
    assert of(reasoning_effort="none")["enable_thinking"] is False
    assert of(reasoning_effort="low")["reasoning_effort"] == "low"
    assert of(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})["enable_thinking"] is False
    assert of(chat_template_kwargs={"enable_thinking": None, "other": "auto"})["enable_thinking"] is True
    assert of(chat_template_kwargs={"other": 2, "add_generation_prompt": False}) == {
        "enable_thinking": True,
        "other": 2,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }


def test_the_servers_own_template_goes_before_the_tokenizers(llama_folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages | length }}")
    counter = load_from(llama_folder, TemplateOptions(chat_template=given))
    assert counter.render(ChatPrompt([{"role": "user", "content": "a"}]), {}) == "1"


def test_the_servers_content_format_goes_before_the_detected_one(llama_folder: Path) -> None:
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": " b "}]
    prompt = ChatPrompt([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert load_from(llama_folder).render(prompt, {}).endswith("ab<|eot|>")
    as_string = load_from(llama_folder, TemplateOptions(content_format="string"))
    assert as_string.render(prompt, {}).endswith("a \n b<|eot|>")


def copied(folder: Path, target: Path, **files: str) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_text((folder / name).read_text())
    for name, text in files.items():
        (target / name.replace("__", ".")).write_text(text)
    return target


def test_named_templates_are_chosen_by_tools(llama_folder: Path, tmp_path: Path) -> None:
    folder = copied(llama_folder, tmp_path)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    counter = load_from(folder)
    messages = [{"role": "user", "content": "a"}]
    assert counter.render(ChatPrompt(messages), {}) == "plain"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert counter.render(ChatPrompt(messages, tools=tools), {}) == "1 tools"


def test_a_multimodal_processors_template_is_used_without_tools_only(llama_folder: Path, tmp_path: Path) -> None:
    folder = copied(
        llama_folder,
        tmp_path,
        chat_template__json='{"chat_template": "from the processor"}',
        preprocessor_config__json='{"processor_class": "SomeProcessor"}',
    )
    counter = load_from(folder)
    messages = [{"role": "user", "content": "a"}]
    assert counter.render(ChatPrompt(messages), {}) == "from the processor"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert counter.render(ChatPrompt(messages, tools=tools), {}).startswith("<s><|start|>user")


@pytest.mark.parametrize(
    ("architecture", "named"),
    [("KimiK3ForConditionalGeneration", "Kimi-K3"), ("DeepseekV41ForCausalLM", "V4.1")],
)
def test_models_that_vllm_renders_with_its_own_code_count_texts_only(
    llama_folder: Path, tmp_path: Path, architecture: str, named: str
) -> None:
    config = json.dumps({"architectures": [architecture]})
    counter = load_from(copied(llama_folder, tmp_path, config__json=config))
    assert counter.count(TextPrompts(("hello",)), {})[0] > 0
    with pytest.raises(CannotCount, match=named):
        counter.count(ChatPrompt([{"role": "user", "content": "a"}]), {})


def test_a_broken_template_leaves_texts_countable(llama_folder: Path, tmp_path: Path) -> None:
    folder = copied(llama_folder, tmp_path)
    (folder / "chat_template.jinja").write_text(LLAMA_TEMPLATE + "{% for %}")
    counter = load_from(folder)
    assert counter.no_chat is not None
    assert counter.no_chat.startswith("its chat template cannot be used")
    assert counter.count(TextPrompts(("hello",)), {})[0] > 0


@pytest.mark.parametrize("source", ["/no/such/folder", "./nor/this", "no-such/model-kvgate"])
def test_what_cannot_be_loaded_says_so_in_one_line(source: str) -> None:
    with pytest.raises(CannotLoad) as caught:
        load(source, TemplateOptions(), hub=False, cache_bytes=0)
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tools_in_kwargs_must_be_objects(qwen: LocalCounter) -> None:
    prompt = ChatPrompt([{"role": "user", "content": "a"}], chat_template_kwargs={"tools": ["f"]})
    with pytest.raises(CannotCount) as caught:
        qwen.count(prompt, {})
    assert caught.value.refused
