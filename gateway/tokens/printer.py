"""``tojson`` as transformers defines it; what comes again and again (tool definitions) is printed once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.tokens.lru import Lru

# Of what is kept: the values themselves and how they print, about.
_KEPT_BYTES = 32 << 20
_BYTES_PER_BYTE = 4
# A template prints them in one style, or two; one that came with a request may be up to something else.
_MOST_STYLES = 3
_plain = json.JSONEncoder(ensure_ascii=False).encode


class Printer:
    """The ``tojson`` filter of one template."""

    def __init__(self) -> None:
        self._kept: Lru[int, tuple[Any, dict[Any, str]]] = Lru(_KEPT_BYTES)

    @property
    def kept_bytes(self) -> int:
        """Memory taken, about."""
        return self._kept.weight

    def keep(self, values: Sequence[Any], size_bytes: int) -> None:
        """``values`` and the sequence itself will not change: remember how they print. ``size_bytes``: as JSON."""
        self._kept.put(id(values), (values, {}), _BYTES_PER_BYTE * size_bytes)
        for value in values:
            self._kept.put(id(value), (value, {}), _BYTES_PER_BYTE * size_bytes // len(values))

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
            text = _printed(value, ensure_ascii, indent, separators, sort_keys)
            if len(kept[1]) < _MOST_STYLES:
                kept[1][style] = text
        return text


def _printed(value: Any, ensure_ascii: bool, indent: Any, separators: Any, sort_keys: bool) -> str:
    if not (ensure_ascii or sort_keys) and indent is None and separators is None:
        return _plain(value)  # what json.dumps does, less the making of an encoder
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
