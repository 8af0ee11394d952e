"""A fleet of real backends without sockets: ledgers, breakers, rates and views as in service, readings as told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

from gateway.config import BackendSettings, FleetSettings
from gateway.fleet.backend import WatchedBackend
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.discovery import ModelCard
from gateway.fleet.fleet import Backend
from gateway.fleet.reservation import Reservation
from gateway.fleet.targets import Target
from gateway.relay.gate import Gate
from gateway.types import BackendView, LoadView, Need, Offer

MODEL = "m"
SIZE = 16
# Between two moments at which a script in tenths of seconds can look.
STALE_AFTER_S = 10.05


class Grounds:
    """Backends by name, each of so many KV blocks; their windows hold whatever their caches do. ``gate`` is told of
    changes as the fleet tells it."""

    def __init__(self, blocks: Mapping[str, int], settings: FleetSettings | None = None) -> None:
        self.gate: Gate | None = None
        self._settings = settings or FleetSettings(stale_after_s=STALE_AFTER_S)
        self.blocks = dict(blocks)
        self.at: dict[str, Target] = {}
        self._touched: set[str] = set()
        self._loaded: set[str] = set()
        self._resting: set[str] = set()
        loop = asyncio.get_running_loop()
        for name in blocks:
            with patch("gateway.fleet.looking.Probe"):  # whose client would read certificates each time
                item = WatchedBackend(
                    BackendSettings(url=f"http://{name}:8000", name=name),
                    self._settings,
                    loop.time,
                    self._changed,
                    self._touch,
                    lambda target: self._loaded.add(target.name),
                )
            (target,) = item.targets
            self.at[target.name] = target
            self.find(target.name)
        self._touched |= set(self.at)

    def find(self, name: str, blocks: int | None = None) -> None:
        """It is up, with a cache of that size."""
        self.blocks[name] = blocks or self.blocks[name]
        item = self.at[name].backend
        capacity = KvCapacity(1, self.blocks[name], SIZE)
        item.found((ModelCard(MODEL, None, None, self.blocks[name] * SIZE),), capacity)
        self.scrape(name)

    def lose(self, name: str) -> None:
        """It cannot be reached."""
        self.at[name].backend.availability.set_reachable(False)

    def scrape(self, name: str, foreign_blocks: int = 0) -> None:
        """A reading: what is ours and has begun, and so much foreign.

        It is followed by looks that fail, until the next one: of these the first that finds it too old matters.
        """
        item = self.at[name].backend
        item.engines.begin_scrape()
        ours = sum(entry.blocks for ledger in item.engines for entry in ledger._entries.values() if entry.begun)
        item.engines.reconcile([min(ours + foreign_blocks, self.blocks[name])], None, asyncio.get_running_loop().time())
        reading = replace(item.reading, running=item.engines.in_flight + bool(foreign_blocks), waiting=0)
        item.reading, item.read_s = reading, asyncio.get_running_loop().time()
        item.changed()
        asyncio.get_running_loop().call_later(self._settings.stale_after_s + 0.01, item.changed)

    def views(self, now_s: float) -> Mapping[str, BackendView]:
        return {name: target.view(now_s) for name, target in self.at.items()}

    def changed(self, now_s: float) -> list[BackendView | LoadView]:
        touched, self._touched = self._touched, set()
        loaded, self._loaded = self._loaded, set()
        touched |= {name for name in self._resting if self.at[name].view_is_due(now_s)}
        told: list[BackendView | LoadView] = [self.at[name].view(now_s) for name in sorted(touched)]
        return told + [self.at[name].load(now_s) for name in sorted(loaded - touched)]

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
        item = self.at[name].backend
        return item.reserve(need, budget_tokens, cached_tokens, timed, chain, rank, heeded)

    def backend(self, name: str) -> Backend:
        return Backend(name, f"http://{name}", None, None, 0.0)

    def offers(self) -> tuple[Offer, ...]:
        """What guard would offer, smallest window first."""
        return tuple(
            Offer(name, self.blocks[name] * SIZE, None, False)
            for name in sorted(self.at, key=lambda name: (self.blocks[name], name))
        )

    def in_flight(self) -> int:
        return sum(target.backend.engines.in_flight for target in self.at.values())

    def is_idle_and_open(self, name: str, now_s: float) -> bool:
        """Whether it must take whatever it can hold."""
        view = self.at[name].view(now_s)
        idle = view.in_flight == 0 and not view.running and not view.waiting
        return idle and view.health.value == "up" and view.accepting and not view.draining

    def _changed(self) -> None:
        if self.gate is not None:
            self.gate.wake()

    def _touch(self, target: Target, resting: bool) -> None:
        self._touched.add(target.name)
        (self._resting.add if resting else self._resting.discard)(target.name)
