"""What a chat template takes is found by rendering, for the kinds of templates there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.tokens.template import ChatTemplate
from gateway.tokens.traits import facts_of
from gateway.types import ModelFacts

PLAIN = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"""

# The rule of Qwen3.5 and later.
SYSTEM_FIRST = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}
{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
{{ raise_exception('No user query found in messages.') }}{% endif %}"""

# Those of Mistral.
ALTERNATING = """{% set turns = namespace(n=0) %}{% for m in messages %}
{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{% if (m.role == 'user') != (turns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% set turns.n = turns.n + 1 %}{% elif m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}
{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}
<{{ m.role }}>{{ m.content }}{% endfor %}"""

NO_SYSTEM = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"""

KNOWN_ROLES = """{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}<{{ m.role }}>
{{ m.content }}{% elif m.role == 'developer' %}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def local(model_folder: Path) -> LocalCounter:
    return load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=0)


def facts(local: LocalCounter, source: str) -> ModelFacts:
    other = LocalCounter(local.encoder, "", {"default": ChatTemplate(source)}, {}, TemplateOptions(), None)
    return facts_of(other, {}, (0, 32))


def test_qwen3_takes_everything(local: LocalCounter) -> None:
    assert facts_of(local, {}, (0, 32)) == ModelFacts((0, 32))


def test_a_plain_template_takes_everything(local: LocalCounter) -> None:
    assert facts(local, PLAIN) == ModelFacts((0, 32))


def test_a_template_that_wants_the_system_first_and_a_user(local: LocalCounter) -> None:
    assert facts(local, SYSTEM_FIRST) == ModelFacts((0, 32), takes_late_system=False, takes_no_user=False)


def test_a_template_of_turns(local: LocalCounter) -> None:
    assert facts(local, ALTERNATING) == ModelFacts(
        (0, 32),
        takes_late_system=False,
        takes_repeated_roles=False,
        takes_assistant_first=False,
        takes_user_after_tool=False,
        takes_open_calls=False,
        nine_character_ids=True,
    )


def test_a_template_without_system(local: LocalCounter) -> None:
    found = facts(local, NO_SYSTEM)
    assert not found.takes_system
    assert not found.takes_developer  # vLLM makes a system message of it
    assert found.takes_late_system


def test_a_template_that_drops_the_developer(local: LocalCounter) -> None:
    assert not facts(local, KNOWN_ROLES).takes_developer


def test_nothing_is_known_of_chats_that_are_not_rendered_here(local: LocalCounter) -> None:
    other = LocalCounter(local.encoder, "", None, {}, TemplateOptions(), "it has no chat template")
    assert facts_of(other, {}, None) == ModelFacts()
    assert facts(local, "{{ raise_exception('never') }}") == ModelFacts((0, 32))
