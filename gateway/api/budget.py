"""What OpenAI-style bodies say of the output: its budget, and whether its usage is to be told in the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.body import integer, truthy


@dataclass(frozen=True, slots=True)
class Budget:
    """``tokens``: the output budget, ``None`` if there is none. ``field``: where it stands, or would.
    ``drop_fields``: fields that hold a number ≤ 0.
    """

    tokens: int | None
    field: str
    drop_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UsageWish:
    """Where in a stream the client wants ``usage``."""

    at_end: bool
    in_every_chunk: bool


def read_budget(document: Mapping[str, Any], fields: Sequence[str]) -> Budget:
    """The budget in the first of ``fields`` that holds one.

    A number ≤ 0 is no budget: clients send -1 for "no limit" (Roo) and vLLM refuses it, so the field must not go
    upstream. What is no integer at all is vLLM's to refuse.
    """
    numbers = {field: integer(document.get(field)) for field in fields}
    drop = tuple(field for field, number in numbers.items() if number is not None and number <= 0)
    for field, number in numbers.items():
        if number is not None and number > 0:
            return Budget(number, field, drop)
    return Budget(None, fields[-1], drop)


def read_usage_wish(document: Mapping[str, Any], stream: bool) -> UsageWish:
    """What ``stream_options`` asks for. As in vLLM, usage in every chunk needs ``include_usage`` too."""
    options = document.get("stream_options")
    if not stream or not isinstance(options, dict):
        return UsageWish(False, False)
    at_end = truthy(options.get("include_usage"))
    return UsageWish(at_end, at_end and truthy(options.get("continuous_usage_stats")))
