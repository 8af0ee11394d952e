"""Pages of the project as its tests read them: rows of tables, and what stands in backticks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "gateway"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every table row of a Markdown text, heads and rules left out."""
    found: list[list[str]] = []
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not line.startswith("|--") and not following.startswith("|--"):
            found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found


def quoted(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def section(text: str, title: str) -> str:
    """A second-level section, without its title. Raises ``AssertionError`` if there is none."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    found = [part for part in parts[1:] if part.splitlines()[0] == title]
    assert len(found) == 1, f"{len(found)} sections are titled {title!r}"
    return found[0]
