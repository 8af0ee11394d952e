"""Why a request is not placed, in words for its client."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.exceptions import Busy, ContextOverflow, GatewayError, NoBackend, ShuttingDown
from gateway.types import BackendView, Overflow, Refused, Waiter


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
        return NoBackend("Every backend that could take the request is down or draining. Try again later.")
    if decision.reason == "too_large":
        return ContextOverflow(_overflow(waiter, views))
    waited_s = now_s - waiter.arrived_s
    return Busy(f"No KV cache had room for the request within {waited_s:.0f} s. Try again later.", retry_after_s)


def _overflow(waiter: Waiter, views: Mapping[str, BackendView]) -> Overflow:
    """The numbers of a prompt that no cache can hold: the largest cache counts as the window."""
    names = {offer.backend for offer in waiter.offers} - waiter.excluded
    caches = [kv for name in names if name in views and (kv := views[name].kv) is not None]
    limit = max((kv.engine_capacity_blocks * kv.block_size_tokens for kv in caches), default=0)
    need = waiter.groups[0].need
    return Overflow(need.prompt_tokens, need.output_tokens, limit, limit)
