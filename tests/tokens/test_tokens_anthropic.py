"""Anthropic's requests become the chat that vLLM makes of them for the model's template."""

from __future__ import annotations

from gateway.tokens.anthropic import effort_without_thinking, settled, wants_system_first
from gateway.tokens.errors import CannotCount
from gateway.types import ChatPrompt

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)
TALK = [
    {"role": "user", "content": "a"},
    {"role": "system", "content": "One."},
    {"role": "user", "content": "b"},
    {"role": "system", "content": "Two."},
]


def test_a_template_that_fails_on_a_system_message_in_the_middle_wants_it_first() -> None:
    assert not wants_system_first([PLAIN])
    assert wants_system_first([STRICT])
    assert wants_system_first([PLAIN, STRICT]), "one of both is enough"


def test_vllm_tries_templates_without_their_functions() -> None:
    assert wants_system_first(["{{ strftime_now('%Y') }}" + PLAIN])
    assert wants_system_first(["{% generation %}x{% endgeneration %}"])
    assert wants_system_first([]), "a model without a template merges, too"


def test_merged_system_messages_stand_in_front_joined_by_nothing() -> None:
    merged = settled(ChatPrompt(TALK, from_messages=True), system_first=True, effort_of_none="none")
    assert merged.messages == [
        {"role": "system", "content": "One.Two."},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert not merged.from_messages
    left = settled(ChatPrompt(TALK, from_messages=True), system_first=False, effort_of_none="none")
    assert left.messages == TALK


def test_thinking_off_is_the_effort_that_the_template_understands() -> None:
    def by_effort(prompt: ChatPrompt) -> str:
        return f"effort {prompt.reasoning_effort}"

    def deaf(prompt: ChatPrompt) -> str:
        return "the same"

    def refusing(prompt: ChatPrompt) -> str:
        if prompt.reasoning_effort == "none":
            raise CannotCount("no")
        return "x"

    assert effort_without_thinking(by_effort) == "none"
    assert effort_without_thinking(deaf) == "low"
    assert effort_without_thinking(refusing) == "low"
    off = ChatPrompt(TALK, reasoning_effort="none", from_messages=True)
    assert settled(off, system_first=False, effort_of_none="low").reasoning_effort == "low"
    high = ChatPrompt(TALK, reasoning_effort="high", from_messages=True)
    assert settled(high, system_first=False, effort_of_none="low").reasoning_effort == "high"
