"""Decisions over a whole queue at once, for whoever keeps no ``Placer``: a laboratory, a test. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.config import PlacingSettings
from gateway.routing.placer import Placer
from gateway.types import BackendView, Decision, Waiter


def assign(
    queue: Iterable[Waiter], views: Mapping[str, BackendView], now_s: float, settings: PlacingSettings
) -> list[Decision]:
    """Decisions for ``queue``; who is not mentioned waits on. ``views`` are of one moment."""
    placer = Placer(settings)
    placer.see(views.values())
    placer.put(queue)
    return placer.decide(now_s)
