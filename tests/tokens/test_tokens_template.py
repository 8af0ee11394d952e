"""Chat templates render as in transformers, and are understood as vLLM understands them."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from gateway.tokens.errors import CannotCount
from gateway.tokens.template import ChatTemplate

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def render(source: str, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, tools, variables, {"bos_token": "<s>"})


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, "string"),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for part in m.content | list %}{{ part }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages[1:] %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}", "openai"),
        ("{% set ms = messages %}{% for m in ms %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% set content = 1 %}{% for p in content %}{% endfor %}", "openai"),
        ("{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{{ show('a') }}", "string"),
        (
            "{% macro show(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(x=m['content']) }}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        (
            "{% set ns = namespace() %}{% set ns.m = messages %}{% for m in messages %}{% for p in m.content %}"
            "{% endfor %}{% endfor %}",
            "string",
        ),
        ("{% for a, b in messages %}{% for p in a.content %}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_the_content_format_is_found_as_vllm_finds_it(source: str, expected: str) -> None:
    assert ChatTemplate(source).content_format == expected


def test_blocks_are_trimmed_and_json_is_printed_as_transformers_prints_it() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content | tojson }}\n  {% endif %}\n{% endfor %}"
    assert (
        render(source, [says("user", {"é": "<a>&'", "b": [1, 2.5, None]})]) == '{"é": "<a>&\'", "b": [1, 2.5, null]}\n'
    )
    assert render("{{ messages[0].content | tojson(indent=2) }}", [says("user", {"a": 1})]) == '{\n  "a": 1\n}'


def test_only_variables_the_template_reads_are_passed_and_some_never() -> None:
    source = "{{ bos_token }}|{{ enable_thinking }}|{{ padding is defined }}|{{ tools is none }}"
    text = render(source, [], enable_thinking=False, padding=True, other=1)
    assert text == "<s>|False|False|True"
    assert render("{{ bos_token }}", [], bos_token="B") == "B", "the request's kwargs override special tokens"


def test_generation_blocks_and_loop_controls_are_known() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, [says("assistant", "a"), says("user", "b")]) == "a"


def test_attributes_of_dicts_are_their_items_unless_dicts_have_such_methods() -> None:
    source = (
        "{{ messages[0].content.missing is defined }}{% for k, v in messages[0].content.items() %}{{ k }}{% endfor %}"
    )
    assert render(source, [says("user", {"items": 1, "b": 2})]) == "Falseitemsb"


@pytest.mark.parametrize(
    "attack", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__ }}"]
)
def test_templates_stay_in_their_sandbox(attack: str) -> None:
    try:
        text = render(attack, [says("user", "a")])
    except CannotCount:
        return
    assert "class" not in text


def test_developer_messages_become_one_system_message_where_the_template_does_not_know_them() -> None:
    messages = [says("user", "u"), says("developer", "d", tools=None), says("system", [{"type": "text", "text": "s"}])]
    assert render(PLAIN, messages) == "[system:d\n\ns][user:u]"
    assert render(PLAIN + "{# 'developer' #}", messages[:2]) == "[user:u][developer:d]"
    assert render(PLAIN, [says("developer", "d"), says("user", "u")]) == "[system:d][user:u]"
    assert render(PLAIN, [says("system", "s"), says("system", "t")]) == "[system:s][system:t]", "untouched without one"


def test_a_final_message_can_be_left_open() -> None:
    messages = [says("user", "u"), says("assistant", "I think")]
    assert render(PLAIN, messages, continue_final_message=True) == "[user:u][assistant:I think"
    trimming = PLAIN.replace("m.content", "m.content | trim")
    assert render(trimming, [says("assistant", "I think ")], continue_final_message=True) == "[assistant:I think"
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}.{% endfor %}{% endfor %}"
    open_part = [says("assistant", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    assert render(parts, open_part, continue_final_message=True) == "a.b"
    assert open_part[0]["content"][1]["text"] == "b", "the caller's message stays as it is"


@pytest.mark.parametrize(
    ("messages", "variables"),
    [
        ([says("assistant", "a")], {"continue_final_message": True, "add_generation_prompt": True}),
        ([says("assistant", [])], {"continue_final_message": True}),
        ([says("user", "a")], {"documents": ["text"]}),
        ([says("user", "a")], {"return_assistant_tokens_mask": True}),
    ],
)
def test_what_transformers_refuses_is_refused(messages: list[dict[str, Any]], variables: dict[str, Any]) -> None:
    with pytest.raises(CannotCount) as caught:
        render(PLAIN, messages, **variables)
    assert caught.value.refused


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages[0].a.b.c }}"])
def test_a_template_that_raises_leaves_the_request_to_other_sources(source: str) -> None:
    with pytest.raises(CannotCount) as caught:
        render(source, [says("user", "a")])
    assert not caught.value.refused, "the server may run with another template"


def test_a_broken_template_is_no_template() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% for %}")
