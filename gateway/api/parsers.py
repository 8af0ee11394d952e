"""Which parser reads a request: one for each path whose prompt can be counted, the generic one for all others."""

from __future__ import annotations

from collections.abc import Callable

from gateway.api import chat, completions, generic, messages, pooling, responses
from gateway.types import Ask

Parse = Callable[[bytes, str | None, str], Ask]

COUNTED: dict[str, Parse] = {
    chat.PATH: chat.parse,
    completions.PATH: completions.parse,
    responses.PATH: responses.parse,
    messages.PATH: messages.parse,
    **dict.fromkeys(pooling.PATHS, pooling.parse),
}


def parser_of(method: str, path: str) -> Parse:
    """The parser of requests to a normalised ``path``."""
    return COUNTED.get(path, generic.parse) if method == "POST" else generic.parse
