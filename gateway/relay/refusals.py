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
    return Busy(f"No KV cache had room for the request within {waited_s:.0f} s. Try again later.", retry_after_s)


# What is to be said of backends that all stand so, and when to try again.
_WORDS = {
    Condition.ASLEEP: ("asleep", 15.0),
    Condition.STARTING: ("still starting", 10.0),
}


def _no_backend(waiter: Waiter, views: Mapping[str, BackendView]) -> NoBackend:
    """Why there is none, as far as it is the same for all."""
    names = {offer.backend for offer in waiter.offers} - waiter.excluded
    conditions = {views[name].condition for name in names if name in views}
    words, retry_after_s = "down or draining", 5.0
    if conditions and conditions <= _WORDS.keys():
        words = " or ".join(_WORDS[condition][0] for condition in sorted(conditions))
        retry_after_s = min(_WORDS[condition][1] for condition in conditions)
    elif Condition.ASLEEP in conditions or Condition.STARTING in conditions:
        words, retry_after_s = "down, draining, asleep or still starting", 10.0
    return NoBackend(f"Every backend that could take the request is {words}. Try again later.", retry_after_s)


def _overflow(waiter: Waiter, views: Mapping[str, BackendView]) -> Overflow:
    """The numbers of a prompt that no cache can hold: the largest cache counts as the window."""
    names = {offer.backend for offer in waiter.offers} - waiter.excluded
    caches = [kv for name in names if name in views and (kv := views[name].kv) is not None]
    limit = max((kv.engine_capacity_blocks * kv.block_size_tokens for kv in caches), default=0)
    need = waiter.groups[0].need
    return Overflow(need.prompt_tokens, need.output_tokens, limit, limit)
