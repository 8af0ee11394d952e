"""``tojson`` as transformers defines it; what comes again and again (tool definitions) is printed once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_MOST_KEPT = 4096
_plain = json.JSONEncoder(ensure_ascii=False).encode


class Printer:
    """The ``tojson`` filter of one template."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, dict[Any, str]]] = {}

    def keep(self, values: Sequence[Any]) -> None:
        """``values`` and the sequence itself will not change: remember how they print."""
        if len(self._kept) + len(values) > _MOST_KEPT:
            self._kept = {}
        for value in (values, *values):
            self._kept[id(value)] = (value, {})

    def __call__(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """``value`` as JSON."""
        kept = self._kept.get(id(value))
        if kept is None or kept[0] is not value or not (indent is None or isinstance(indent, int)) or separators:
            return _printed(value, ensure_ascii, indent, separators, sort_keys)
        style = (bool(ensure_ascii), type(indent), indent, separators is None, bool(sort_keys))
        text = kept[1].get(style)
        if text is None:
            text = kept[1][style] = _printed(value, ensure_ascii, indent, separators, sort_keys)
        return text


def _printed(value: Any, ensure_ascii: bool, indent: Any, separators: Any, sort_keys: bool) -> str:
    if not (ensure_ascii or sort_keys) and indent is None and separators is None:
        return _plain(value)  # what json.dumps does, less the making of an encoder
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
