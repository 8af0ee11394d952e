"""Looking at one backend again and again: which models it has, and what its metrics say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.config import BackendSettings, FleetSettings
from gateway.fleet.capacity import kv_capacity, used_blocks
from gateway.fleet.discovery import Probe, ProbeFailed
from gateway.fleet.hits import Verdict
from gateway.fleet.metrics_text import Reading
from gateway.fleet.pace import Pace, Sight
from gateway.fleet.pulse import DOUBT_AFTER_S
from gateway.fleet.standing import START_S
from gateway.fleet.troubles import Trouble

if TYPE_CHECKING:
    from gateway.fleet.backend import WatchedBackend

log = logging.getLogger("kvgate.fleet")

JITTER = 0.1
# Least pause between two looks at one backend, however many requests fail meanwhile.
LEAST_PAUSE_S = 0.2
# Reasons told of one failure to answer: some servers put a number into each.
MOST_REASONS = 8


class Looker:
    """Writes into its backend what it finds there.

    ``pace`` says how long to wait between two looks. ``error`` is what was wrong at the last one; ``scrapes`` counts
    the readings of metrics, ``scrape_failures`` those that failed. ``looked`` is set after the first look.
    """

    def __init__(
        self,
        backend: WatchedBackend,
        settings: BackendSettings,
        fleet: FleetSettings,
        clock: Callable[[], float],
        on_verdict: Callable[[WatchedBackend, Verdict], None],
    ) -> None:
        self.looked = asyncio.Event()
        self.pace = Pace(fleet.scrape_fastest_s, fleet.scrape_interval_s, fleet.scrape_slowest_s)
        self.error: str | None = None
        self.scrapes = 0
        self.scrape_failures = 0
        self._backend = backend
        self._fleet = fleet
        self._clock = clock
        self._on_verdict = on_verdict
        self._probe = Probe(settings, fleet.timeout_s)
        self._wake = asyncio.Event()
        self._began_s = 0.0
        self._moved = False  # something happened there between the last two readings
        self._paused = False
        self._mute = False  # its metrics were not answered at the last look
        self._discover_at_s = 0.0
        self._discover_failures = 0
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"<Looker at {self._backend.name}, {self.scrapes} scrapes, {self.scrape_failures} failed>"

    async def watch(self) -> None:
        """Look again and again until cancelled. One look at a time."""
        self._began_s = self._clock()
        while True:
            started_s = self._clock()
            self._moved = False
            try:
                await self.look()
            except Exception as error:
                log.exception("looking at backend %s failed; trying again", self._backend.name)
                self.error = f"looking at it failed: {type(error).__name__}: {error}"
                if self._backend.availability.reachable is None:  # nobody waits for what may never be known
                    self._backend.availability.set_reachable(False)
            finally:
                self.looked.set()
            self._backend.changed()  # with or without a new reading: an old one may have become too old meanwhile
            pause_s = self.pace.pause_s(self._sight(), self._clock() - started_s)
            pause_s *= random.uniform(1 - JITTER, 1 + JITTER)
            least_s = min(LEAST_PAUSE_S, pause_s)
            await asyncio.sleep(least_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s - least_s):
                    await self._wake.wait()
            self._wake.clear()

    async def look(self) -> None:
        """One look: models when they are due or in doubt, then metrics."""
        due = self._clock() >= self._discover_at_s or not self._backend.availability.reachable
        if due and not await self._discover():
            return
        await self._scrape()

    async def close(self) -> None:
        """Close the connection the looks use."""
        await self._probe.close()

    def look_soon(self) -> None:
        """Something happened: look at once, models included."""
        self._discover_at_s = 0.0
        self._wake.set()

    def hurry(self) -> None:
        """Something begins: read the metrics at once, and at the usual pace from then on."""
        self.pace.hurry()
        self._wake.set()

    async def _discover(self) -> bool:
        """Read models and version. Returns whether the backend said which models it has."""
        backend, availability = self._backend, self._backend.availability
        pulse = backend.pulse
        try:
            with self._listening():
                cards = await self._probe.cards()
            pulse.answered()
            if not await self._probe.alive():
                raise ProbeFailed("its engine is dead: /health answers 503", dead=True)
        except ProbeFailed as error:
            self._note_silence(error)
            if not error.silent:
                self._discover_failures += 1
            # A server that was never there may be loading its model: vLLM listens only when it is done.
            awaited = error.refused and not backend.cards and self._clock() - self._began_s < START_S
            if availability.starting and error.refused and not awaited and not backend.cards:
                log.warning("backend %s: not there after %.0f minutes, taken for down", backend.name, START_S / 60)
            availability.starting = error.starting or awaited
            self._tell(error)
            self.error = str(error)
            lost = pulse.judge(self._clock())
            gone = error.final or lost or self._discover_failures >= self._fleet.failures_to_open
            if availability.reachable is None or gone:
                availability.set_reachable(False)
            return False
        backend.version = await self._probe.version() or backend.version
        if self._discover_failures or not availability.reachable:
            self.error = None  # what was wrong with the metrics stays until they are read
        self._discover_failures = 0
        self._told.clear()
        self._discover_at_s = self._clock() + self._fleet.discover_interval_s
        if cards != backend.cards:
            told = ", ".join(f"{card.id} ({card.window_tokens})" for card in cards) or "-"
            log.info("backend %s serves %s", backend.name, told)
            backend.set_cards(cards)
        if backend.reading.awake is None:
            availability.set_asleep(self._paused or await self._probe.asleep())
        availability.set_reachable(True, again=self.scrapes > 0)
        return True

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Something is asked: notice if the answer is late."""
        self._backend.pulse.asked(self._clock())
        handle = asyncio.get_running_loop().call_later(DOUBT_AFTER_S, self._backend.pulse.overdue)
        try:
            yield
        finally:
            handle.cancel()

    def _note_silence(self, error: ProbeFailed) -> None:
        """A question was not answered as it should be: at all?"""
        if error.silent:
            self._backend.pulse.missed()
        else:
            self._backend.pulse.answered()

    def _tell(self, error: ProbeFailed) -> None:
        """Write into the log why it does not answer: each reason once until it does."""
        reason = str(error)
        if reason in self._told or len(self._told) >= MOST_REASONS:
            return
        self._told.add(reason)
        level = logging.INFO if error.starting else logging.WARNING
        check = f". {error.check} It joins as soon as it answers." if error.check else ""
        log.log(level, "backend %s: %s (%s)%s", self._backend.name, reason, shown_url(self._backend.url), check)

    async def _scrape(self) -> None:
        """Read the metrics and bring the ledger up to date. A failure puts the models in doubt, no more."""
        backend = self._backend
        backend.engines.begin_scrape()
        started_s = self._clock()
        # Of a server that answers all but its metrics, these say nothing.
        listening = contextlib.nullcontext() if self._mute else self._listening()
        try:
            with listening:
                reading = await self._probe.reading()
        except ProbeFailed as error:
            if not self._mute:
                self._note_silence(error)
            self._mute = error.silent
            self.scrape_failures += 1
            backend.tell(backend.witness.failed(str(error), self._clock()))
            self.error = str(error)
            self._discover_at_s = 0.0
            if error.refused:
                backend.availability.set_reachable(False)
            return
        self._mute = False
        backend.pulse.answered()
        self.scrapes += 1
        self.error = None
        heard = backend.witness.read(reading, backend.engines.in_flight, started_s)
        backend.tell(heard.turns)
        if heard.restarted:
            self._probe.forget()
            self._paused = False
            backend.forget()
            log.info("backend %s was restarted", backend.name)
            if not await self._discover():
                return
        self._moved = heard.moved
        backend.reading, backend.read_s = reading, started_s
        if heard.stuck or self._paused:
            self._paused = await self._probe.paused()
        if reading.awake is not None or self._paused:
            backend.availability.set_asleep(self._paused or reading.awake is False)
        if heard.verdict is not None and not backend.tells_cached:
            self._on_verdict(backend, heard.verdict)
        capacity = None if heard.blind else kv_capacity(reading, backend.max_model_len_tokens)
        count = len(reading.labels) or len(backend.engines)  # nothing said is not one
        if capacity != backend.engines.capacity or count != len(backend.engines):
            said = "unknown: placing by requests in flight" if capacity is None else str(capacity)
            log.info("backend %s: KV cache %s", backend.name, said)
            backend.set_capacity(count, capacity)
        if capacity is not None and (used := used_blocks(reading, capacity)) is not None:
            disobeyed = backend.engines.disobeyed
            backend.engines.reconcile(used, requests_by_rank(reading), started_s)
            if backend.engines.disobeyed > disobeyed:
                turn = backend.witness.troubles.begin(Trouble.RANKS_IGNORED, "", self._clock())
                backend.tell([turn] if turn is not None else [])

    def _sight(self) -> Sight:
        """What the last look found, as far as it says when the next one is due."""
        backend = self._backend
        if not backend.availability.reachable:
            return Sight(failed=True)
        if backend.pulse.misses:
            return Sight(doubtful=True)
        if backend.witness.silent:
            return Sight()
        capacity, in_flight = backend.engines.capacity, backend.engines.in_flight
        ratio = backend.engines.reserved_blocks / capacity.blocks if capacity is not None else None
        return Sight(in_flight > 0, ratio, backend.reading.waiting, self._moved)


def shown_url(url: str) -> str:
    """A URL without the name and password it may hold."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def requests_by_rank(reading: Reading) -> list[int] | None:
    """Requests that run or wait at each engine, as far as every engine tells both."""
    running, waiting = reading.running_by_engine, reading.waiting_by_engine
    if running is None or waiting is None:
        return None
    return [running[label] + waiting[label] for label in reading.labels]
