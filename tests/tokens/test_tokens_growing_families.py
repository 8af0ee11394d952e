"""For each family whose conversations may be cut into parts: the parts' tokens add up to those of the whole.

The reference is transformers' own tokenizer, over the text rendered whole. Tokenizers and templates are those that
``make conformance`` has fetched; a family that is not at hand is skipped.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from families.catalogue import FAMILIES, MODELS, Family
from families.models import model_folder
from families.packages import CACHE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokens_random import AGENT_CHATS, ANY_CHATS, EXAMPLES

from gateway.tokens.encoder import Encoder, ReferenceEncoder, best_encoder
from gateway.tokens.errors import CannotCount
from gateway.tokens.growing import Rendered
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.tokens.template import ChatTemplate
from gateway.types import ChatPrompt

log = logging.getLogger(__name__)

# SmolLM2's template is its tokenizer's own; formats that are no templates are never resumed.
TEMPLATED = [family for family in FAMILIES if family.template is not None]


FEW = 20
# Their tokenizers take 15 s of CPU to load and to be held against transformers: tried with KVGATE_TEST_EXAMPLES only.
LARGE = frozenset({"gemma3", "gemma4"})
# Their templates mark messages by tokens that the tokenizer they stand on here does not have.
NEVER_RESUMED = frozenset({"GLM 4.6", "MiniMax M2", "Nemotron 3 Nano", "Seed-OSS", "Mistral Small 3.2 (Jinja)"})


@cache
def tokenizer_of(model: str) -> tuple[Encoder, ReferenceEncoder, dict[str, Any]]:
    """The encoder that serves, the reference, and the special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_folder(MODELS[model])), local_files_only=True)
    return best_encoder(tokenizer, 1 << 22)[0], ReferenceEncoder(tokenizer), dict(tokenizer.special_tokens_map)


def admitted(family: Family) -> tuple[LocalCounter, ReferenceEncoder]:
    """A counter that keeps conversations, and the reference. Skips the test where there is no such thing."""
    template = CACHE / "templates" / f"{family.template}.jinja"
    if not (template.is_file() and (CACHE / "tokenizers" / MODELS[family.model].tokenizer / "complete").is_file()):
        pytest.skip("its tokenizer or template is not here: make conformance")
    if family.model in LARGE and not EXAMPLES:
        pytest.skip("its tokenizer is large: KVGATE_TEST_EXAMPLES=2000")
    encoder, reference, special_tokens = tokenizer_of(family.model)
    compiled = ChatTemplate(template.read_text(encoding="utf-8"))
    if encoder.edges is None or compiled.plan is None:
        pytest.skip("its texts are never cut" if encoder.edges is None else "its template is always rendered whole")
    templates = {"default": compiled}
    return LocalCounter(
        encoder, "", templates, special_tokens, TemplateOptions(), None, history_bytes=1 << 22
    ), reference


def whole(counter: LocalCounter, reference: ReferenceEncoder, prompt: ChatPrompt) -> int | None:
    try:
        return reference.count(counter.render(prompt, {}), False)
    except CannotCount:
        return None


def in_parts(counter: LocalCounter, prompt: ChatPrompt) -> tuple[int | None, bool]:
    """Tokens, and whether the render began where an earlier one could be resumed."""
    try:
        step = counter.begin(prompt, {})
        assert isinstance(step, partial)
        rendered = step.args[0]
        return step().tokens, isinstance(rendered, Rendered) and rendered.session.start > 0
    except CannotCount:
        return None, False


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in TEMPLATED])
def test_parts_add_up_to_the_whole_in_every_family_that_is_cut(family: Family) -> None:
    counter, reference = admitted(family)
    counted = resumed = 0

    @settings(max_examples=EXAMPLES or FEW, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.one_of(ANY_CHATS, AGENT_CHATS, AGENT_CHATS), st.data())
    def check(chat: ChatPrompt, data: st.DataObject) -> None:
        nonlocal counted, resumed
        for length in sorted({data.draw(st.integers(1, len(chat.messages))), len(chat.messages)}):
            prompt = replace(chat, messages=chat.messages[:length])
            tokens, is_resumed = in_parts(counter, prompt)
            assert tokens == whole(counter, reference, prompt)
            counted += tokens is not None
            resumed += is_resumed

    check()
    assert counted > (EXAMPLES or FEW) // 4
    assert resumed > 0 or not EXAMPLES or family.name in NEVER_RESUMED
    log.info("%s: %d counted, %d of them resumed", family.name, counted, resumed)


def test_smollm2_whose_template_is_its_tokenizers_own() -> None:
    if not (CACHE / "tokenizers" / "smollm2" / "complete").is_file():
        pytest.skip("its tokenizer is not here: make conformance")
    counter = load(str(model_folder(MODELS["smollm2"])), TemplateOptions(), hub=False, cache_bytes=1 << 22)
    assert counter._conversations is not None
    _, reference, _ = tokenizer_of("smollm2")

    @settings(max_examples=EXAMPLES or FEW, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.one_of(ANY_CHATS, AGENT_CHATS))
    def check(chat: ChatPrompt) -> None:
        assert in_parts(counter, chat)[0] == whole(counter, reference, chat)

    check()
