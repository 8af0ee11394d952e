"""The page of the commands lists every command and every flag."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest
from docs_pages import page, quoted, rows, section

from gateway.cli import COMMANDS

PAGE = page("docs/cli.md")


def flags_of(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"gateway.cli.{command.replace('-', '_')}").configure(parser)
    return {
        flag
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--help"
    }


def flags_in(text: str) -> set[str]:
    """Flags in the first cells of the tables of ``text``."""
    return {
        flag
        for cells in rows(text)
        for words in quoted(cells[0])
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", words)
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_section_lists_exactly_the_flags_of_its_command(command: str) -> None:
    assert flags_in(section(PAGE, f"kvgate {command}")) == flags_of(command)


def test_page_has_a_section_for_every_command_and_no_other() -> None:
    titles = re.findall(r"^## kvgate (\S+)$", PAGE, re.MULTILINE)
    assert titles == list(COMMANDS)
    assert re.findall(r"^\| \[(\S+)\]\(#kvgate-\1\)", PAGE, re.MULTILINE) == list(COMMANDS)


def test_faults_of_the_simulator_are_listed() -> None:
    from gateway.simulator.faults import KINDS

    assert {word.split("=")[0] for word in quoted(section(PAGE, "kvgate simulate"))} >= set(KINDS)
