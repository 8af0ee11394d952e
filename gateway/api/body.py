"""Request bodies: JSON is parsed once, as vLLM would take it, and what cannot be taken is said clearly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.api.growing import GrowingBodies
from gateway.api.numbers import has_large_integer
from gateway.exceptions import BadRequest

# Deeper nesting is taken for an attack. It is where orjson stops encoding; real tool schemas stay below 30.
MAX_DEPTH = 254

# Budgets beyond this are all the same to every window, and JavaScript clients read larger numbers wrongly.
LARGEST_INTEGER = (1 << 53) - 1

_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,40}(?:\.0*)?\s*", re.ASCII)
_LEAST_DEEP_BYTES = 2 * MAX_DEPTH
_BOM = b"\xef\xbb\xbf"
_bodies = GrowingBodies(96 << 20)


class LenientObject(dict[str, Any]):
    """A document that only Python's ``json`` could read truly, so that only it can write it again."""


def parse_object(body: bytes, content_type: str | None) -> dict[str, Any]:
    """The JSON object in ``body``, with what Python's ``json`` (so vLLM) takes beyond the standard: NaN, lone
    surrogates, integers beyond 64 bits; the last of equal keys wins. Raises ``BadRequest``.

    What is in the object may be shared with the objects of other bodies: nothing of it may be changed.
    """
    require_json(content_type)
    document = _bodies.parse(body)
    if document is not None:
        return document
    document = _parse(body)
    if not isinstance(document, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_named(document)}.")
    return document


def kept_bytes() -> int:
    """Memory, about, that is kept of bodies so that they need not be parsed whole when they have grown."""
    return _bodies.kept_bytes


def require_json(content_type: str | None) -> None:
    """Raise ``BadRequest`` unless the media type is ``application/json``; vLLM refuses others, an absent one too."""
    if not is_json(content_type):
        given = f"not {content_type[:100]!r}" if content_type else "and no content-type was sent"
        raise BadRequest(f"Unsupported Media Type: Only 'application/json' is allowed, {given}.")


def is_json(content_type: str | None) -> bool:
    """Whether the media type is ``application/json``, whatever its parameters."""
    return (content_type or "").split(";", 1)[0].strip().lower() == "application/json"


def model_name(document: Mapping[str, Any]) -> str:
    """The model asked for; empty when absent or null, which vLLM takes for its own. Raises ``BadRequest``."""
    name = document.get("model")
    if name is None:
        return ""
    if not isinstance(name, str):
        raise BadRequest(f"`model` must be a string, not {_named(name)}.", "model")
    return name


def integer(value: Any) -> int | None:
    """``value`` as pydantic reads an ``int`` field: 10, 10.0 and "10" are 10. ``None`` for anything else.

    Booleans count as anything else. The result is held within ±``LARGEST_INTEGER``.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value.partition(".")[0])
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        return None
    return max(-LARGEST_INTEGER, min(LARGEST_INTEGER, value))


def positive(value: Any, otherwise: int = 1) -> int:
    """``value`` as an integer of at least 1, else ``otherwise``."""
    number = integer(value)
    return number if number is not None and number >= 1 else otherwise


def truthy(value: Any, otherwise: bool = False) -> bool:
    """``value`` as pydantic reads a ``bool`` field: 1, "true", "yes", "on" and their like are true.

    What pydantic refuses is false; null is ``otherwise``.
    """
    if value is None:
        return otherwise
    if isinstance(value, str):
        return value.lower() in _TRUE
    return isinstance(value, bool | int | float) and value == 1


def text_or_none(value: Any) -> str | None:
    """``value`` if it is a string."""
    return value if isinstance(value, str) else None


def objects_or_none(value: Any) -> list[dict[str, Any]] | None:
    """``value`` if it is a non-empty list of objects."""
    return value if isinstance(value, list) and value and all(isinstance(item, dict) for item in value) else None


def _parse(body: bytes) -> Any:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _parse_leniently(body)
    if has_large_integer(body):
        return _parse_leniently(body)
    if len(body) > _LEAST_DEEP_BYTES:
        try:
            orjson.dumps(document)  # refuses beyond MAX_DEPTH: at 40 µs for 250 kB the cheapest way to know
        except TypeError:
            raise _too_deep() from None
    return document


def _parse_leniently(body: bytes) -> Any:
    try:
        text = body.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"The request body is not valid UTF-8: {error.reason} at byte {error.start}.") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise BadRequest("The request body is empty; a JSON object was expected.") from None
        raise BadRequest(
            f"The request body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(character {error.pos})."
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # CPython converts no integer of more than 4300 digits
        raise BadRequest("The request body holds a number with too many digits.") from None
    if _is_deep(document):
        raise _too_deep()
    return LenientObject(document) if isinstance(document, dict) else document


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def _too_deep() -> BadRequest:
    return BadRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.")


def _named(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "a number")
