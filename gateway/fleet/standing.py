"""How a backend stands, in one word: why requests go there, or do not. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.fleet.breaker import BreakerState
from gateway.types import Condition

# A server that never answered may be loading its model: so long it is taken for one that starts, then for down.
START_S = 900.0


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known of a backend now. ``reachable``: it answers; ``None`` before the first look. ``starting``: it said
    that it is not ready, or was never there and may come. ``standby``: another backend is the same server."""

    reachable: bool | None
    starting: bool = False
    asleep: bool = False
    standby: bool = False
    draining: bool = False
    breaker: BreakerState = BreakerState.CLOSED
    ejected: bool = False
    overloaded: bool = False
    warming: bool = False


def condition(signs: Signs) -> Condition:
    """The first word that is true, from what only others can change to what passes by itself."""
    if signs.reachable is None:
        return Condition.UNKNOWN
    if not signs.reachable:
        return Condition.STARTING if signs.starting else Condition.DOWN
    if signs.asleep:
        return Condition.ASLEEP
    if signs.draining:
        return Condition.DRAINING
    if signs.standby:
        return Condition.STANDBY
    if signs.breaker is not BreakerState.CLOSED:
        return Condition.FAILING
    if signs.ejected:
        return Condition.EJECTED
    if signs.overloaded:
        return Condition.OVERLOADED
    return Condition.WARMING if signs.warming else Condition.UP
