"""The map is true: its rooms are there, imports go one way, and links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from docs_pages import CODE, ROOT, page, quoted, rows, section

PURE_OF_ROOMS = ("api", "guard", "routing", "planner")
SHARED = {"types", "history", "exceptions", "config", "block_keys"}
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])


def imports(file: Path) -> set[str]:
    """The first name below ``gateway`` of everything ``file`` imports from there, at whatever depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("gateway.")}
    return found


@pytest.mark.parametrize("room", PURE_OF_ROOMS)
def test_room_imports_no_other_room(room: str) -> None:
    files = list((CODE / room).rglob("*.py"))
    assert files
    strays = {str(file.relative_to(CODE)): imports(file) - SHARED - {room, "__version__"} for file in files}
    assert {file: names for file, names in strays.items() if names} == {}


def test_no_room_imports_what_wires_them() -> None:
    for file in CODE.rglob("*.py"):
        if len(file.relative_to(CODE).parts) > 1 and file.relative_to(CODE).parts[0] != "cli":
            assert not imports(file) & {"app", "serving", "cli"}, file


def test_the_table_of_rooms_lists_every_folder() -> None:
    listed = {
        name.rstrip("/")
        for cells in rows(section(page("docs/architecture.md"), "Rooms"))
        for name in quoted(cells[0])
        if name.endswith("/")
    }
    assert listed == {folder.parent.name for folder in CODE.glob("*/__init__.py")}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, target
