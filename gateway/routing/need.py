"""What a request is expected to take, before anybody has learned anything about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config import PlacingSettings
from gateway.types import Group, Need, Offer

# An explicit budget up to so many times the expectation is reserved in full: a client that names a moderate budget
# tends to mean it, and no preemption can come of it. Larger ones are mostly a client's constant (32,000 and more).
FULL_BUDGET_FACTOR = 4


def expected_output_tokens(budget_tokens: int | None, room_tokens: int, settings: PlacingSettings) -> int:
    """Output tokens to reserve for one sequence.

    - no budget: ``expected_output_tokens`` of the settings;
    - a budget up to ``FULL_BUDGET_FACTOR`` times that: the whole budget;
    - a larger one: ``expected_output_tokens``. The ledger doubles it whenever the answer outgrows it.

    Never more than ``room_tokens``, what the window leaves beside the prompt.
    """
    expected = settings.expected_output_tokens
    if budget_tokens is not None and budget_tokens <= FULL_BUDGET_FACTOR * expected:
        expected = budget_tokens
    return max(0, min(expected, room_tokens))


def need_for(offer: Offer, prompt_tokens: int, n: int, settings: PlacingSettings) -> Need:
    """What the request needs on the backend of ``offer``."""
    room = max(0, offer.window_tokens - prompt_tokens)
    return Need(prompt_tokens, expected_output_tokens(offer.output_tokens, room, settings), max(1, n))


def groups_of(offers: Sequence[Offer], prompt_tokens: int, n: int, settings: PlacingSettings) -> tuple[Group, ...]:
    """Offers in order of preference, put together where they follow each other with one window and one budget."""
    groups: list[Group] = []
    start = 0
    for index, offer in enumerate(offers):
        first = offers[start]
        if offer.window_tokens != first.window_tokens or offer.output_tokens != first.output_tokens:
            groups.append(Group(tuple(offers[start:index]), need_for(first, prompt_tokens, n, settings)))
            start = index
    if offers:
        groups.append(Group(tuple(offers[start:]), need_for(offers[start], prompt_tokens, n, settings)))
    return tuple(groups)


def budget_tokens(offer: Offer, prompt_tokens: int) -> int:
    """The most output one sequence can have there: its budget, or what the window leaves."""
    room = max(0, offer.window_tokens - prompt_tokens)
    return room if offer.output_tokens is None else min(offer.output_tokens, room)
