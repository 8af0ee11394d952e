"""Why a request is not placed, in words for its client."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.exceptions import Busy, ContextOverflow, GatewayError, NoBackend, ShuttingDown
from gateway.types import BackendView, Condition, Overflow, Refused, Waiter


def queue_full(retry_after_s: float) -> Busy:
    """There is no room to wait in."""
    return Busy("The KV caches are full and so is the queue. Try again later.", retry_after_s)


def closing() -> ShuttingDown:
    """Nobody may wait any more."""
    return ShuttingDown("The gateway is shutting down. Try again.")


def refusal(
    waiter: Waiter, decision: Refused, views: Mapping[str, BackendView], now_s: float, retry_after_s: float
) -> GatewayError:
    """The error that tells of a decision."""
    if decision.reason == "no_backend":
        if waiter.excluded and all(offer.backend in waiter.excluded for offer in waiter.offers):
            return NoBackend("Every backend that serves the model has failed this request. Try again later.")
        return _no_backend(waiter, views)
    if decision.reason == "too_large":
        return ContextOverflow(_overflow(waiter, views))
    waited_s = now_s - waiter.arrived_s
    if waiter.tag is not None:  # it was placed before: ``arrived_s`` is when it came back
        return Busy(
            f"A backend sent the request back, and within {waited_s:.0f} s no other had room. Try again later.",
            retry_after_s,
        )
    beside = " beside what is kept for conversations about to return" if decision.reason == "kept_out" else ""
    room = f"No KV cache had room for the request within {waited_s:.0f} s{beside}."
    return Busy(f"{room} Try again later.", retry_after_s)


# How a backend stands, in words where its name for it is none, and when to try again.
_WORDS = {Condition.STARTING: "is still starting", Condition.STANDBY: "stands by for one of them"}
_RETRY_AFTER_S = {Condition.ASLEEP: 15.0, Condition.STARTING: 10.0}
# Where one stands so and is not taken, it came back with other models or a smaller window.
_TAKING = frozenset({Condition.UP, Condition.WARMING, Condition.OVERLOADED, Condition.EJECTED})
_MOST_NAMED = 4


def _no_backend(waiter: Waiter, views: Mapping[str, BackendView]) -> NoBackend:
    """Why there is none: how each stands that could have taken it."""
    names = sorted({offer.backend for offer in waiter.offers} & views.keys())
    told = [f"{name} {_stands(waiter, name, views[name].condition)}" for name in names]
    if len(told) > _MOST_NAMED:
        told[_MOST_NAMED:] = [f"and {len(told) - _MOST_NAMED} more"]
    why = f": {', '.join(told)}" if told else ""
    rests_s = [_RETRY_AFTER_S.get(views[name].condition, 5.0) for name in names if name not in waiter.excluded]
    return NoBackend(
        f"No backend that serves the model takes requests{why}. Try again later.", min(rests_s, default=5.0)
    )


def _stands(waiter: Waiter, name: str, condition: Condition) -> str:
    if name in waiter.excluded:
        return "has failed this request"
    if condition in _TAKING:
        return "does not serve it any more"
    return _WORDS.get(condition, f"is {condition.value}")


def _overflow(waiter: Waiter, views: Mapping[str, BackendView]) -> Overflow:
    """The numbers of a prompt that no cache can hold: the largest cache counts as the window."""
    names = {offer.backend for offer in waiter.offers} - waiter.excluded
    caches = [kv for name in names if name in views and (kv := views[name].kv) is not None]
    limit = max((kv.engine_capacity_blocks * kv.block_size_tokens for kv in caches), default=0)
    need = waiter.groups[0].need
    return Overflow(need.prompt_tokens, need.output_tokens, limit, limit)
