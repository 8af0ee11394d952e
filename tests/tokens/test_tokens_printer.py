"""Tools are printed once and remembered, within bounds."""

from __future__ import annotations

import json
from typing import Any

from gateway.tokens.printer import _KEPT_BYTES, Printer


def tools(number: int, size_bytes: int) -> list[dict[str, Any]]:
    return [{"name": f"{number}", "text": "x" * (size_bytes // 2)}, {"name": "other", "text": "y" * (size_bytes // 2)}]


def test_what_is_kept_prints_as_ever() -> None:
    printer, kept = Printer(), tools(1, 100)
    printer.keep(kept, 100)
    for value in (kept, kept[0], list(kept), {"a": None}):
        for indent in (None, 1, 2, 3, 4, None):
            assert printer(value, indent=indent) == json.dumps(value, ensure_ascii=False, indent=indent)


def test_the_tools_of_many_clients_are_not_all_remembered() -> None:
    printer = Printer()
    for number in range(40):
        printer.keep(tools(number, 1 << 20), 1 << 20)
        assert 0 < printer.kept_bytes <= _KEPT_BYTES
