"""What the gate needs of the fleet: how backends look, and a place in their ledgers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from gateway.fleet.fleet import Backend
from gateway.fleet.reservation import Reservation
from gateway.types import BackendView, LoadView, Need


class GateFleet(Protocol):
    """What the gate needs of the fleet."""

    def views(self, now_s: float) -> Mapping[str, BackendView]:
        """All backends as they look now."""

    def changed(self, now_s: float) -> Iterable[BackendView | LoadView]:
        """The backends that look otherwise than at the last call; at the first, all."""

    def reserve(
        self,
        name: str,
        need: Need,
        budget_tokens: int | None,
        cached_tokens: int = 0,
        timed: bool = False,
        chain: tuple[tuple[int, int], ...] = (),
        rank: int | None = None,
        heeded: bool = True,
    ) -> Reservation:
        """Enter a request into a backend's ledger."""

    def backend(self, name: str) -> Backend:
        """How to reach a backend."""
