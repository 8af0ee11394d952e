"""The sample and the page of the settings say what the code says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import yaml
from docs_pages import ROOT, page, quoted, rows

from gateway.cli import main
from gateway.config import BackendSettings, ModelSettings, Settings
from gateway.configuring import known_keys, load

SAMPLE = ROOT / "config" / "kvgate.yaml"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVGATE_"):
            monkeypatch.delenv(name)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the sample, spelt as ``known_keys`` spells them, with its value."""
    for name, value in tree.items():
        if name == "backends" and not prefix:
            yield name, value
            yield from leaves(value[0], "backends[].")
        elif name == "models" and not prefix:
            yield name, value
            (model,) = value.values()
            yield from leaves(model, "models.NAME.")
        elif isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def defaults() -> dict[str, Any]:
    url = "http://127.0.0.1:8000"
    trees = {
        "": Settings().model_dump(mode="json"),
        "backends[].": BackendSettings(url=url).model_dump(mode="json"),
        "models.NAME.": ModelSettings().model_dump(mode="json"),
    }
    found: dict[str, Any] = {}
    for key in known_keys():
        stem = next((stem for stem in trees if stem and key.startswith(stem)), "")
        value: Any = trees[stem]
        for part in key.removeprefix(stem).split("."):
            value = value[part]
        found[key] = value
    return found


def test_sample_holds_every_key_with_its_default() -> None:
    sample = dict(leaves(yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))))
    assert sample.keys() == known_keys().keys()
    examples = {"backends", "models"}
    assert {key: value for key, value in sample.items() if key not in examples} == {
        key: value for key, value in defaults().items() if key not in examples
    }


def test_sample_is_loaded_and_changes_nothing_but_the_examples() -> None:
    settings = load(SAMPLE)
    assert [backend.url for backend in settings.backends] == ["http://127.0.0.1:8000"]
    assert settings.model_copy(update={"backends": (), "models": {}}) == Settings()


def test_sample_passes_the_check_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--config", str(SAMPLE)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["port"] == 8080


def test_sample_explains_every_key_in_the_words_of_the_code() -> None:
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    comments: dict[str, set[str]] = {}
    for above, line in pairwise(lines):
        found = re.match(r"\s*(?:- )?([a-z_]+):", line)
        if found and above.lstrip().startswith("# "):
            comments.setdefault(found[1], set()).add(above.lstrip()[2:])
    for key, text in known_keys().items():
        if key not in ("backends", "models"):  # more than one line stands above these
            assert text in comments.get(key.rpartition(".")[2], set()), key
    assert all(f"# {known_keys()[key]}" in lines for key in ("backends", "models"))


def test_page_lists_every_key_with_default_and_description() -> None:
    listed = {quoted(cells[0])[0]: cells for cells in rows(page("docs/settings.md"))}
    assert listed.keys() == known_keys().keys()
    for key, default in defaults().items():
        _, shown, text = listed[key]
        assert text == known_keys()[key]
        if key == "backends[].url":
            assert shown == "required"
        else:
            assert yaml.safe_load(quoted(shown)[0]) == default, key


def test_keys_named_in_the_text_exist() -> None:
    known = set(known_keys())
    for key in re.findall(r"\*\*(.+?)\*\*", page("docs/settings.md")):
        assert set(quoted(key)) <= known, key
