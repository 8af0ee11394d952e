"""What a request is expected to take. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config import PlacingSettings
from gateway.types import Group, Need, Offer

# An explicit budget up to so many times the expectation is reserved in full: a client that names a moderate budget
# tends to mean it, and no preemption can come of it. Larger ones are mostly a client's constant (32,000 and more).
FULL_BUDGET_FACTOR = 4


def expected_output_tokens(
    budget_tokens: int | None, room_tokens: int, settings: PlacingSettings, learned_tokens: int | None = None
) -> int:
    """Output tokens to reserve for one sequence.

    - ``reserve: budget`` in the settings: all of a budget that is named;
    - ``learned_tokens``, what most answers do not exceed, once there is enough to tell;
    - before that: ``expected_output_tokens`` of the settings if there is no budget, or one more than
      ``FULL_BUDGET_FACTOR`` times as large; else the whole budget.

    Never more than the budget, nor than ``room_tokens``, what the window leaves beside the prompt. Whenever an answer
    outgrows what was expected of it, the ledger doubles that.
    """
    expected = settings.expected_output_tokens
    if settings.reserve == "budget":
        expected = room_tokens if budget_tokens is None else budget_tokens
    elif learned_tokens is not None:
        expected = learned_tokens if budget_tokens is None else min(learned_tokens, budget_tokens)
    elif budget_tokens is not None and budget_tokens <= FULL_BUDGET_FACTOR * expected:
        expected = budget_tokens
    return max(0, min(expected, room_tokens))


def need_for(
    offer: Offer, prompt_tokens: int, n: int, settings: PlacingSettings, learned_tokens: int | None = None
) -> Need:
    """What the request needs on the backend of ``offer``."""
    room = max(0, offer.window_tokens - prompt_tokens)
    expected = expected_output_tokens(offer.output_tokens, room, settings, learned_tokens)
    return Need(prompt_tokens, expected, max(1, n))


def groups_of(
    offers: Sequence[Offer],
    prompt_tokens: int,
    n: int,
    settings: PlacingSettings,
    learned_tokens: int | None = None,
) -> tuple[Group, ...]:
    """Offers in order of preference, put together where they follow each other with one window and one budget."""
    if not offers:
        return ()
    groups: list[Group] = []
    start = 0
    first = offers[0]
    window_tokens, output_tokens = first.window_tokens, first.output_tokens
    for index, offer in enumerate(offers):
        if offer.window_tokens != window_tokens or offer.output_tokens != output_tokens:
            groups.append(
                Group(tuple(offers[start:index]), need_for(first, prompt_tokens, n, settings, learned_tokens))
            )
            start, first = index, offer
            window_tokens, output_tokens = first.window_tokens, first.output_tokens
    groups.append(Group(tuple(offers[start:]), need_for(first, prompt_tokens, n, settings, learned_tokens)))
    return tuple(groups)


def budget_tokens(offer: Offer, prompt_tokens: int) -> int:
    """The most output one sequence can have there: its budget, or what the window leaves."""
    room = max(0, offer.window_tokens - prompt_tokens)
    return room if offer.output_tokens is None else min(offer.output_tokens, room)
