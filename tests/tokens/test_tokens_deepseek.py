"""DeepSeek V3.2 and V4: chats rendered by our own code have the tokens that vLLM's encoders give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families.packages import CannotFetch
from families.vocabularies import tokenizer_folder
from tokens_own import counted, known_chats

from gateway.tokens.deepseek_texts import ASSISTANT, BEGIN, END, THINK, THINK_END, USER, V4_EFFORT
from gateway.tokens.deepseek_v4 import DeepseekV4
from gateway.tokens.deepseek_v32 import DeepseekV32
from gateway.tokens.encoder import Encoder, FastEncoder
from gateway.tokens.errors import CannotCount
from gateway.tokens.messages import conversation
from gateway.tokens.own import TextChats, TextFormat

FORMATS: dict[str, TextFormat] = {"deepseek_v32": DeepseekV32(), "deepseek_v4": DeepseekV4()}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    try:
        folder: Path = tokenizer_folder("deepseek_v4")
    except CannotFetch as error:
        pytest.skip(f"no DeepSeek tokenizer: {error}")
    return FastEncoder((folder / "tokenizer.json").read_text(encoding="utf-8"), 1 << 20)


def rendered(form: TextFormat, *messages: dict[str, Any], **variables: Any) -> str:
    return form.render(conversation(messages, form.content_format), None, variables)


@pytest.mark.parametrize("name", FORMATS)
def test_chats_of_agents_have_the_tokens_that_vllm_counted(name: str, encoder: Encoder) -> None:
    chats = TextChats(name, FORMATS[name], encoder)
    for prompt, tokens in known_chats(name):
        assert counted(chats, prompt) == tokens


USER_MESSAGE = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é", "n": [1]}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "b"}]}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_v32_opens_the_answer_as_thinking_is_on_or_off() -> None:
    assert rendered(FORMATS["deepseek_v32"], USER_MESSAGE) == f"{BEGIN}{USER}Hi{ASSISTANT}{THINK_END}"
    assert rendered(FORMATS["deepseek_v32"], USER_MESSAGE, thinking=True) == f"{BEGIN}{USER}Hi{ASSISTANT}{THINK}"


def test_v4_thinks_hard_unless_told_otherwise() -> None:
    form = FORMATS["deepseek_v4"]
    assert rendered(form, USER_MESSAGE) == f"{BEGIN}{V4_EFFORT['high']}{USER}Hi{ASSISTANT}{THINK}"
    assert rendered(form, USER_MESSAGE, reasoning_effort="low") == f"{BEGIN}{USER}Hi{ASSISTANT}{THINK}"
    assert rendered(form, USER_MESSAGE, reasoning_effort="none") == f"{BEGIN}{USER}Hi{ASSISTANT}{THINK_END}"
    assert rendered(form, USER_MESSAGE, thinking=False) == f"{BEGIN}{USER}Hi{ASSISTANT}{THINK_END}"


def test_v4_puts_results_in_the_order_of_their_calls() -> None:
    text = rendered(FORMATS["deepseek_v4"], USER_MESSAGE, CALLING, result("b", "second"), result("a", "first"))
    assert text.index("<tool_result>first</tool_result>") < text.index("<tool_result>second</tool_result>")


def test_v32_gathers_results_in_one_block_that_the_last_one_closes() -> None:
    one = rendered(FORMATS["deepseek_v32"], USER_MESSAGE, CALLING, result("a", "1"))
    both = rendered(FORMATS["deepseek_v32"], USER_MESSAGE, CALLING, result("a", "1"), result("b", "2"))
    assert one.endswith("<function_results>\n<result>1</result>")
    assert both == one + f"\n<result>2</result>\n</function_results>\n\n{THINK_END}"


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_spelled_out_one_by_one(name: str) -> None:
    text = rendered(FORMATS[name], USER_MESSAGE, CALLING, result("a", "1"), result("b", "2"))
    assert '<｜DSML｜parameter name="x" string="true">é</｜DSML｜parameter>' in text
    assert '<｜DSML｜parameter name="n" string="false">[1]</｜DSML｜parameter>' in text
    assert text.count(END) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "narrator", "content": "x"}],
        [{"role": "developer", "content": ""}],
        [USER_MESSAGE, result("a", "1")],
        [USER_MESSAGE, CALLING, *[result("a", "1")] * 3],
    ],
    ids=["unknown role", "empty developer", "result without call", "more results than calls"],
)
def test_v32_refuses_what_vllm_refuses(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(CannotCount) as caught:
        rendered(FORMATS["deepseek_v32"], *messages)
    assert caught.value.refused


def test_calls_of_an_unknown_shape_raise_nothing_else() -> None:
    odd = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"arguments": "{}"}}]}
    for form in FORMATS.values():
        with pytest.raises(CannotCount):
            rendered(form, USER_MESSAGE, odd)
