"""Formats that are code, on new random conversations: our counts beside those of the installed vLLM's own front end."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from families.catalogue import FAMILIES, MODELS, Family
from families.models import model_folder
from families.packages import ROOT, CannotFetch
from families.random_chats import AgentChats
from tokens_helpers import chat_ask

from gateway.tokens.errors import CannotCount
from gateway.tokens.local import TemplateOptions, load

CHATS = 60
FORMATS = [
    family for family in FAMILIES if family.name in ("gpt-oss", "Mistral (tekken)", "DeepSeek V3.2", "DeepSeek V4")
]


@pytest.mark.vllm
@pytest.mark.timeout(1500)  # half a minute on an idle machine; it loads vLLM and four vocabularies
def test_new_chats_have_the_tokens_that_vllm_gives_them(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(2))
    chats = AgentChats(seed)
    bodies = [chats.body() for _ in range(CHATS)]
    try:
        folders = [model_folder(MODELS[family.model]) for family in FORMATS]
    except CannotFetch as error:
        pytest.skip(f"no tokenizer: {error}")
    flags = ["--enable-auto-tool-choice"]
    jobs = [
        {"model": str(folder), "flags": [*flags, *MODELS[family.model].flags], "chats": bodies}
        for family, folder in zip(FORMATS, folders, strict=True)
    ]
    for family, answers in zip(FORMATS, rendered_by_vllm(jobs, tmp_path), strict=True):
        equal = compare(family, bodies, answers["chats"], seed)
        assert equal > CHATS // 4, f"{family.name}: vLLM refused all but {equal}"


def rendered_by_vllm(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    given, found = folder / "jobs.json", folder / "results.json"
    given.write_text(json.dumps(jobs), encoding="utf-8")
    script = ROOT / "tests" / "vllm" / "families" / "render.py"
    command = [ROOT / ".venv-vllm" / "bin" / "python", script, given, found]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
    return results


def compare(family: Family, bodies: list[dict[str, Any]], answers: list[Any], seed: int) -> int:
    """How many chats both counted, all of them equally."""
    folder = model_folder(MODELS[family.model], family.architecture)
    local = load(str(folder), TemplateOptions(), hub=False, cache_bytes=1 << 20)
    equal = 0
    for place, (body, theirs) in enumerate(zip(bodies, answers, strict=True)):
        prompt = chat_ask(**body).prompt
        assert prompt is not None
        try:
            (ours,) = local.count(prompt, {})
        except CannotCount as error:
            assert not isinstance(theirs, int), f"{family.name}, seed {seed}, chat {place}: {error.reason}"
            continue
        if isinstance(theirs, int):
            assert ours == theirs, f"{family.name}, seed {seed}, chat {place}"
            equal += 1
    return equal
