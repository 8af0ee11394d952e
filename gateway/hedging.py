"""Hedging: a stream whose first byte is overdue goes to a second backend, too, and the first to begin is relayed.

Both attempts hold a lease of their own. Whoever loses is broken off and released at once; bytes of one reach the
client, and the usage of one is learned from.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.answering import Answering, Attempt
from gateway.config import RelaySettings
from gateway.exceptions import BackendFailed
from gateway.observe.metrics import Metrics
from gateway.relay.client import Client, Scope
from gateway.relay.hedge import HedgePolicy
from gateway.relay.lease import Lease
from gateway.relay.waiting import WaitingRoom
from gateway.trace import Trace
from gateway.types import Ask

log = logging.getLogger("kvgate.hedging")


@dataclass(frozen=True, slots=True)
class Race:
    """A request that may be attempted twice. ``second`` finds a place for that, or ``None``; ``leases`` are those the
    request has, for its caller to release; ``waiting`` keeps its client while it waits beyond the usual."""

    scope: Scope
    ask: Ask
    client: Client
    trace: Trace
    leases: list[Lease]
    waiting: WaitingRoom
    second: Callable[[], Lease | None]


class Hedger:
    """Has requests answered by one backend, or by the first of two."""

    def __init__(self, settings: RelaySettings, answering: Answering, metrics: Metrics) -> None:
        self._hold_s = settings.hold_headers_s
        self._answering = answering
        self._metrics = metrics
        self.policy = HedgePolicy(settings)

    async def exchange(self, race: Race) -> None:
        """``Answering.exchange`` on the first lease of ``race``, and on a second if that takes too long."""
        policy, trace, lease = self.policy, race.trace, race.leases[0]
        expected_s = lease.expected_first_byte_s
        delay_s = policy.delay_s(race.ask, expected_s)
        started_s = time.monotonic()
        try:
            if delay_s is None:
                await self._answering.exchange(race.scope, race.ask, lease, race.client, trace)
            else:
                await self._exchange(race, delay_s, started_s)
        finally:
            begun_s = trace.progress.first_byte_s
            if race.ask.stream and begun_s is not None and expected_s is not None:
                # If the second one won, the first would have taken this long at least.
                policy.note(expected_s, begun_s - started_s)

    async def _exchange(self, race: Race, delay_s: float, started_s: float) -> None:
        attempts = [self._begun(race, race.leases[0])]
        try:
            winner = await self._winner(race, attempts, delay_s, started_s)
            for attempt in attempts:
                if attempt is not winner:
                    attempt.close()
            await self._answering.finish(race.ask, winner, race.client, race.trace)
        finally:
            for attempt in attempts:
                attempt.close()

    async def _winner(self, race: Race, attempts: list[Attempt], delay_s: float, started_s: float) -> Attempt:
        """The attempt to be relayed. ``attempts``: those made, to be closed by the caller."""
        first = attempts[0]
        assert first.task is not None
        await asyncio.wait({first.task}, timeout=delay_s)
        if first.task.done():
            first.task.result()
            return first
        lease = self._second(race)
        if lease is None:
            return await self._alone(first, started_s + self._hold_s - time.monotonic())
        attempts.append(self._begun(race, lease))
        outcome = "abandoned"
        race.waiting.queued = True
        try:
            winner = await self._first_of(attempts)
            outcome = "lost" if winner is first else "won"
        except BackendFailed:
            outcome = "failed"
            raise
        finally:
            race.waiting.queued = False
            self._metrics.hedges.labels(outcome).inc()
        race.trace.hedge = outcome
        if winner is not first and not first.lease.failed:
            first.lease.outrun()
        return winner

    async def _first_of(self, attempts: list[Attempt]) -> Attempt:
        """The first that begins to answer. Raises the first one's ``BackendFailed`` if none does."""
        failures: list[BackendFailed] = []
        running = {attempt.task: attempt for attempt in attempts if attempt.task is not None}
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task in done]:
                attempt = running.pop(task)
                try:
                    task.result()
                except BackendFailed as error:
                    failures.insert(0 if attempt is attempts[0] else len(failures), error)
                else:
                    # What a second backend refuses, the first may do yet.
                    if attempt is attempts[0] or attempt.streams or not running:
                        return attempt
                attempt.close()
        raise failures[0]

    async def _alone(self, attempt: Attempt, left_s: float) -> Attempt:
        """There is no second one: go on as if there had never been a thought of it, with the status held ``left_s``."""
        task = attempt.task
        assert task is not None
        await asyncio.wait({task}, timeout=max(0.0, left_s))
        if not task.done() and attempt.streams:  # the status is there, and is told now; the first byte may come later
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled():
                return attempt
        await task
        return attempt

    def _second(self, race: Race) -> Lease | None:
        """A place on another backend, if one is free at once and not too many had one."""
        if not self.policy.budget.spend():
            self._metrics.hedges_denied.labels("budget").inc()
            return None
        lease = race.second()
        if lease is None:
            self.policy.budget.give_back()
            self._metrics.hedges_denied.labels("no_room").inc()
            return None
        race.leases.append(lease)
        slow, taken = race.leases[0].backend.name, lease.backend.name
        log.info("request %s: no first byte from %s yet, asking %s, too", race.trace.request_id, slow, taken)
        return lease

    def _begun(self, race: Race, lease: Lease) -> Attempt:
        attempt = Attempt(lease)
        attempt.task = asyncio.create_task(self._answering.begin(race.scope, race.ask, attempt, race.trace))
        return attempt
