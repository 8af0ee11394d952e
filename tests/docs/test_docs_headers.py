"""The page of the headers lists those the code sets and no others."""

from __future__ import annotations

import re

from docs_pages import CODE, page, quoted, rows, section


def headers_of_the_code() -> set[str]:
    """Every header of our own that is written out in the gateway; the simulator is no part of it."""
    found: set[str] = set()
    for file in CODE.rglob("*.py"):
        if "simulator" not in file.relative_to(CODE).parts:
            found |= set(re.findall(r"x-kvgate-[a-z]+(?:-[a-z]+)*", file.read_text(encoding="utf-8")))
    return found


def test_page_lists_exactly_the_headers_of_the_code() -> None:
    text = page("docs/headers.md")
    tables = section(text, "In a request") + section(text, "In an answer")
    listed = {name for cells in rows(tables) for name in quoted(cells[0]) if name.startswith("x-kvgate-")}
    assert listed == headers_of_the_code()


def test_some_are_found() -> None:
    assert {"x-kvgate-backend", "x-kvgate-prompt-tokens", "x-kvgate-clamped-from"} <= headers_of_the_code()


def test_page_lists_the_headers_of_errors() -> None:
    code = (CODE / "api" / "errors.py").read_text(encoding="utf-8")
    for name in ("x-should-retry", "retry-after", "retry-after-ms", "www-authenticate"):
        assert f'"{name}"' in code
        assert f"`{name}" in section(page("docs/headers.md"), "In an error")
