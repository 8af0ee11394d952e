"""The backends held against each other: who is far worse than its peers, and who is the same server as another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gateway.config import FleetSettings
from gateway.fleet.outliers import Outliers, Recent, Rules
from gateway.fleet.troubles import Trouble
from gateway.types import Health

if TYPE_CHECKING:
    from gateway.fleet.backend import WatchedBackend

log = logging.getLogger("kvgate.fleet")

INTERVAL_S = 2.0


class Peers:
    """Compares all backends from time to time."""

    def __init__(self, settings: FleetSettings) -> None:
        rules = Rules(
            settings.outlier_latency_factor,
            settings.outlier_failure_ratio,
            settings.outlier_rest_s,
            settings.outlier_most_ratio,
        )
        self._outliers = Outliers(rules) if settings.outlier_ejection else None
        self._interval_s = min(INTERVAL_S, settings.scrape_slowest_s)

    async def watch(self, backends: Mapping[str, WatchedBackend], clock: Callable[[], float]) -> None:
        """Compare them again and again until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self.compare(backends, clock())
            except Exception:
                log.exception("comparing the backends failed; trying again")

    def compare(self, backends: Mapping[str, WatchedBackend], now_s: float) -> None:
        """Once."""
        self._match(backends, now_s)
        if self._outliers is None:
            return
        groups: dict[frozenset[str], dict[str, Recent]] = {}
        for name, backend in backends.items():
            models = frozenset(card.id for card in backend.cards if card.parent is None)
            availability = backend.availability
            up = backend.health(now_s) is Health.UP
            if models and up and not availability.draining and availability.standby_for is None:
                groups.setdefault(models, {})[name] = availability.recent
        ejected, back = self._outliers.judge(list(groups.values()), now_s)
        for item in ejected:
            backends[item.name].availability.eject(now_s + item.rest_s, item.reason)
        for name in back:
            backends[name].availability.readmit()

    def _match(self, backends: Mapping[str, WatchedBackend], now_s: float) -> None:
        """Find backends that are one process, by the times it started and made its first counter. The first of them in
        the settings that can be reached serves; the others stand by, so that one cache has one ledger."""
        firsts: dict[tuple[float, float], WatchedBackend] = {}
        for backend in backends.values():
            identity = backend.witness.identity
            name = identity.name
            other = None
            if backend.availability.reachable and name is not None and name[1] > 0 and not identity.alternating:
                first = firsts.setdefault(name, backend)
                other = first.name if first is not backend else None
            if other is not None:
                turn = backend.witness.troubles.begin(Trouble.SAME_SERVER, f"as {other}", now_s)
                backend.tell([turn] if turn is not None else [])
            else:
                backend.tell(backend.witness.troubles.end(Trouble.SAME_SERVER, now_s))
            backend.availability.stand_by(other)
