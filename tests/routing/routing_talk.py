"""A backend whose cache is full of conversations that are likely to return."""

from __future__ import annotations

from math import inf
from typing import Any

from routing_views import NOW_S, busy, waiter

from gateway.config import PlacingSettings
from gateway.routing.placer import Placer
from gateway.routing.prefixes import Chain
from gateway.types import Decision, Placed, Waiter

CONVERSATIONS = 4
TALKED_TOKENS = 3200  # of each of them: 200 blocks
TURNS = 8


def talk(number: int) -> Chain:
    """What a conversation has said so far."""
    return ((100 * number + 1, TALKED_TOKENS // 2), (100 * number + 2, TALKED_TOKENS))


def talking(*more: str, turns: int = TURNS, **fields: Any) -> Placer:
    """A placer of a backend ``a`` of 1,000 blocks, with ``most_kept`` 300 of them, after all had their turns there.

    ``more`` are backends that are full. ``turns`` 0: as many prompts were placed there, each of them a new one.
    """
    settings = {"headroom_ratio": 0.0, "keep_ratio": 0.3} | fields
    view = {"caches": settings.pop("caches", True)}
    placer = Placer(PlacingSettings(**settings))
    placer.see([busy("a", 0, **view), *(busy(name, 1000) for name in more)])
    number = 1_000_000
    for turn in range(turns or TURNS):
        for conversation in range(CONVERSATIONS):
            chain = talk(conversation if turns else CONVERSATIONS * turn + conversation)
            request = late(number, "a", tokens=TALKED_TOKENS, model="m", chain=chain)
            (decision,) = placer.add(request, NOW_S)
            assert isinstance(decision, Placed)
            placer.left("a", decision.own_tokens, NOW_S)
            placer.see([busy("a", 0, **view)])
            number += 1
    no_passes(placer)
    return placer


def no_passes(placer: Placer) -> None:
    """As if each backend had just let in one all the same, at great expense."""
    for room in placer._rooms.values():
        room.pass_s = inf


def a_pass(placer: Placer, name: str, at_s: float) -> None:
    """That backend may let in one all the same from then on."""
    placer._rooms[name].pass_s = at_s


def late(sequence: int, *names: str, **fields: Any) -> Waiter:
    """A request that comes now and waits for an hour."""
    return waiter(sequence, *names, **({"arrived_s": NOW_S, "deadline_s": NOW_S + 3600} | fields))


def back(sequence: int, *names: str, conversation: int = 0, more: int = 16, **fields: Any) -> Waiter:
    """The next turn of a conversation, with so many tokens more."""
    chain = talk(conversation)
    return late(sequence, *names, tokens=TALKED_TOKENS + more, model="m", chain=chain, **fields)


def placed(decisions: list[Decision]) -> list[tuple[int, str]]:
    return [(item.sequence, item.offer.backend) for item in decisions if isinstance(item, Placed)]
