"""Requests of the conformance table, counted again: what a real vLLM said of them is in ``conformance.json``.

The families whose tokenizers come in small packages, so that a regression shows without vLLM; ``make conformance`` has
them all.
"""

from __future__ import annotations

from typing import Any

import pytest
import real_chats
from conformance_count import Recount
from conformance_requests import columns
from conformance_table import BEGIN, END, PAGE, block, read_results, totals
from families.catalogue import FAMILIES, MODELS, Family
from families.packages import CACHE, CannotFetch

RESULTS = read_results()

# Downloads of 1 to 17 MB; the others are counted where an earlier run has left them.
CHEAP = frozenset({"qwen3", "llama3.1", "deepseek-v3.2", "deepseek-v4", "mistral"})


def is_at_hand(family: Family) -> bool:
    tokenizer = CACHE / "tokenizers" / MODELS[family.model].tokenizer / "complete"
    template = family.template is None or (CACHE / "templates" / f"{family.template}.jinja").is_file()
    cheap = family.model in CHEAP and not (family.template or "").startswith("llama.cpp/")
    return cheap or (tokenizer.is_file() and template)


RECORDED = [family for family in FAMILIES if family.name in RESULTS["models"]]


@pytest.mark.timeout(300)  # the first test of a family may have to download its tokenizer
@pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in RECORDED])
def test_counts_equal_the_usage_that_vllm_reported(family: Family) -> None:
    if not is_at_hand(family):
        pytest.skip("its tokenizer is a large download: make conformance")
    record: dict[str, Any] = RESULTS["models"][family.name]
    try:
        recount = Recount(family, record["date"])
    except CannotFetch as error:
        pytest.skip(f"no tokenizer: {error}")
    compared = 0
    for column, bodies in columns(family.kwargs):
        for place, (body, theirs) in enumerate(zip(bodies, record["usage"][column], strict=True)):
            if isinstance(theirs, int):
                assert recount.count(body) == theirs, f"{column} #{place}"
                compared += 1
    assert compared > 15


def test_the_page_shows_the_table_of_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert block(RESULTS) in page


def test_every_request_was_counted_as_vllm_counts_it() -> None:
    counted, _, different = totals(RESULTS)
    assert counted > 1000
    assert different == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["Qwen 3", "Llama 3.1"])
def test_real_conversations_have_the_tokens_that_vllm_reported(name: str) -> None:
    """Every tenth of 2,454 requests of tau-bench; ``make conformance`` counts them all."""
    usage = RESULTS["real chats"].get(name)
    if usage is None:
        pytest.skip("not measured")
    family = next(family for family in FAMILIES if family.name == name)
    try:
        recount = Recount(family, RESULTS["models"][name]["date"])
    except CannotFetch as error:
        pytest.skip(f"no tokenizer: {error}")
    bodies = list(real_chats.requests())
    assert len(bodies) == len(usage) == 2454
    for place in range(0, len(bodies), 10):
        assert recount.count(bodies[place]) == usage[place], place
