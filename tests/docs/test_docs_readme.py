"""What a newcomer reads first: the README names every extra, and ``make help`` every target, in 80 columns."""

from __future__ import annotations

import re
import subprocess
import tomllib

from docs_pages import ROOT, page, quoted, rows, section


def test_readme_names_every_extra_that_can_be_installed() -> None:
    extras = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"].keys() - {"dev"}
    installing = section(page("README.md"), "Install and run")
    assert {word for cells in rows(installing) for word in quoted(cells[0])} >= extras


def test_make_help_lists_every_target_in_eighty_columns() -> None:
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    phony = re.search(r"^\.PHONY: (.*)$", page("Makefile"), re.MULTILINE)
    assert phony is not None
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines if line.startswith("  ")} == set(phony[1].split())
    assert max(map(len, lines)) <= 80
