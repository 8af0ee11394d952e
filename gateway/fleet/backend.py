"""One backend as the fleet watches it: a loop that probes it, and what is known of it in between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.config import BackendSettings, FleetSettings
from gateway.fleet.breaker import Breaker, BreakerState
from gateway.fleet.capacity import KvCapacity, kv_capacity, used_blocks
from gateway.fleet.discovery import ModelCard, Probe, ProbeFailed
from gateway.fleet.ledger import Ledger
from gateway.fleet.metrics_text import Reading
from gateway.fleet.rates import Rates
from gateway.types import BackendView, Health, KvView, LoadView, Need

log = logging.getLogger("kvgate.fleet")

JITTER = 0.1
# Least pause between two looks at one backend, however many requests fail meanwhile.
LEAST_PAUSE_S = 0.2
# A view is built anew when the ledger changes; without changes its age may lag behind by this much.
VIEW_LIFE_S = 0.25
LEAST_WARMTH = 0.1

_keys = itertools.count(1)
NO_NEED = Need(0, 0)


@dataclass(frozen=True, slots=True)
class KvRecord:
    """The KV cache of one backend, for people. ``usage_ratio`` is of the capacity and ``None`` while stale."""

    engines: int
    block_size_tokens: int
    capacity_blocks: int
    used_blocks: int
    reserved_blocks: int
    free_blocks: int
    foreign_blocks: int
    shared_blocks: int
    capacity_tokens: int
    used_tokens: int
    reserved_tokens: int
    free_tokens: int
    usage_ratio: float
    virtual: bool
    stale: bool


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A name on one backend: ``max_model_len_tokens`` as the server says, ``window_tokens`` as requests can use it."""

    id: str
    root: str | None
    parent: str | None
    max_model_len_tokens: int | None
    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class BackendRecord:
    """All that is known of one backend, for metrics and the status page. ``kv`` is ``None`` while unknown."""

    name: str
    url: str
    health: Health
    breaker: BreakerState
    draining: bool
    error: str | None
    version: str | None
    models: tuple[ModelRecord, ...]
    in_flight: int
    running: int | None
    waiting: int | None
    kv: KvRecord | None
    age_s: float | None
    restarts: int
    scrapes: int
    scrape_failures: int
    prefill_tokens_per_s: float | None
    output_tokens_per_s: float | None
    loras: tuple[str, ...]


class Reservation:
    """What one request holds on a backend, from the moment it is placed until ``release``.

    ``ahead_tokens``: prompt tokens to be worked on before its first byte, its own left out. ``timed``: the moments at
    which it is told of bytes tell how fast the backend is.
    """

    __slots__ = (
        "_ahead_tokens",
        "_backend",
        "_first_s",
        "_grown_tokens",
        "_key",
        "_need",
        "_placed_s",
        "cached_tokens",
    )

    def __init__(
        self,
        backend: WatchedBackend,
        key: int,
        need: Need = NO_NEED,
        ahead_tokens: int = 0,
        cached_tokens: int = 0,
        timed: bool = False,
    ) -> None:
        self._backend = backend
        self._key = key
        self._need = need
        self._ahead_tokens = ahead_tokens
        self.cached_tokens = cached_tokens
        self._placed_s = backend.now_s() if timed else None
        self._first_s: float | None = None
        self._grown_tokens = 0

    @property
    def grown_tokens(self) -> int:
        """Tokens generated so far, over all sequences."""
        return self._grown_tokens

    def first_byte(self) -> None:
        """The backend began to answer."""
        self._backend.ledger.first_byte(self._key)
        if self._placed_s is not None and self._first_s is None:
            self._first_s = self._backend.now_s()

    def grow(self, tokens: int) -> None:
        """So many more tokens were generated."""
        self._grown_tokens += tokens
        self._backend.ledger.grow(self._key, tokens)

    def release(self) -> None:
        """Let go of everything. Doing so again changes nothing."""
        if self._placed_s is not None and self._first_s is not None:
            own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
            rates = self._backend.rates
            rates.prefilled(self._ahead_tokens + own_tokens, self._first_s - self._placed_s)
            rates.generated(self._grown_tokens // self._need.n - 1, self._backend.now_s() - self._first_s)
            self._backend.touched()
        self._placed_s = None
        self._backend.ledger.release(self._key)
        self._backend.breaker.released(self._key)


class WatchedBackend:
    """A backend and the loop (``watch``) that keeps what is known of it fresh.

    ``clock`` gives seconds (the event loop's); ``on_change`` is called after every look and every change of health,
    ``on_touch`` with the name whenever ``view`` would tell placing something new, and whether time alone will, too;
    ``on_load`` if ``load`` tells it all.
    """

    def __init__(
        self,
        settings: BackendSettings,
        fleet: FleetSettings,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_touch: Callable[[str, bool], None] = lambda name, resting: None,
        on_load: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.settings = settings
        self.name = settings.label
        self.url = settings.url
        self.ledger = Ledger(self._loaded)
        self.rates = Rates()
        self.breaker = Breaker(fleet.failures_to_open, fleet.reopen_after_s)
        self.cards: tuple[ModelCard, ...] = ()
        self.windows: Mapping[str, int] = {}
        self.version: str | None = None
        self.draining = False
        self.looked = asyncio.Event()
        self._fleet = fleet
        self._clock = clock
        self._on_change = on_change
        self._on_touch = on_touch
        self._on_load = on_load
        self._probe = Probe(settings, fleet.timeout_s)
        self._wake = asyncio.Event()
        self._reachable: bool | None = None
        self._back_s: float | None = None  # when it came back, for a slow start
        self._error: str | None = None
        self._reading = Reading()
        self._read_s: float | None = None
        self._discover_at_s = 0.0
        self._discover_failures = 0
        self._restarts = 0
        self._scrapes = 0
        self._scrape_failures = 0
        self._view: BackendView | None = None
        self._view_changes = -1
        self._view_until_s = 0.0

    def __repr__(self) -> str:
        return f"<WatchedBackend {self.name} {self.health(self._clock())} {self.ledger!r}>"

    async def watch(self) -> None:
        """Look at the backend again and again until cancelled. One look at a time."""
        while True:
            started_s = self._clock()
            try:
                await self.look()
            except Exception:
                log.exception("looking at backend %s failed; trying again", self.name)
            finally:
                self.looked.set()
            self._changed()
            pause_s = self._fleet.scrape_interval_s * random.uniform(1 - JITTER, 1 + JITTER)
            pause_s -= self._clock() - started_s
            await asyncio.sleep(min(LEAST_PAUSE_S, self._fleet.scrape_interval_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s - LEAST_PAUSE_S):
                    await self._wake.wait()
            self._wake.clear()

    async def look(self) -> None:
        """One look: models when they are due or in doubt, then metrics."""
        due = self._clock() >= self._discover_at_s or not self._reachable
        if due and not await self._discover():
            return
        await self._scrape()

    async def close(self) -> None:
        """Close the connection the looks use."""
        await self._probe.close()

    def found(self, cards: tuple[ModelCard, ...], capacity: KvCapacity | None) -> None:
        """It serves these models with a cache of that size."""
        self.cards = cards
        self._set_windows(capacity)
        self.ledger.set_capacity(capacity)
        self._set_reachable(True)

    def look_soon(self) -> None:
        """Something happened: look at once, models included."""
        self._discover_at_s = 0.0
        self._wake.set()

    def reserve(
        self,
        need: Need,
        budget_tokens: int | None,
        cached_tokens: int = 0,
        timed: bool = False,
        chain: tuple[tuple[int, int], ...] = (),
    ) -> Reservation:
        """Enter a request into the ledger. Never fails: whether it fits was decided before."""
        key = next(_keys)
        ledger = self.ledger
        self.breaker.placed(key, self._clock())
        reservation = Reservation(self, key, need, ledger.pending_prompt_tokens, cached_tokens, timed)
        chain = () if self._reading.caches is False else chain
        ledger.reserve(key, need.prompt_tokens, need.output_tokens, need.n, budget_tokens, cached_tokens, chain)
        return reservation

    def touched(self) -> None:
        """Something else than its load has changed."""
        self._view = None
        self._touch()

    def now_s(self) -> float:
        """The clock."""
        return self._clock()

    def note_failure(self, placed_s: float | None = None) -> None:
        """A request failed for the backend's sake that was placed at ``placed_s``."""
        if self.breaker.failed(self._clock(), placed_s):
            log.warning("backend %s: %d failures in a row, resting it", self.name, self.breaker.failures)
            self._changed()
        self.look_soon()

    def note_success(self) -> None:
        """The backend answered a request."""
        if self.breaker.failures and self.breaker.succeeded():
            self._back_s = self._clock()
            log.info("backend %s answers again", self.name)
            self._changed()
            self.look_soon()

    def drain(self, draining: bool) -> None:
        """Send nothing more there (or do so again). What runs there runs on."""
        if draining != self.draining:
            self.draining = draining
            self._changed()

    def health(self, now_s: float) -> Health:
        """Down: it cannot be reached or its breaker is open. Unknown until the first look is over."""
        if self._reachable is None:
            return Health.UNKNOWN
        if not self._reachable or self.breaker.state(now_s) is BreakerState.OPEN:
            return Health.DOWN
        return Health.UP

    def age_s(self, now_s: float) -> float | None:
        """Age of the last reading of the metrics."""
        return None if self._read_s is None else max(0.0, now_s - self._read_s)

    def view(self, now_s: float) -> BackendView:
        """The picture the placing sees.

        When the observation is too old, ``running`` and ``waiting`` are unknown. The ledger stays: our own footprints
        are exact without any scrape, and the last known foreign use beats none.
        """
        ledger = self.ledger
        if self._view is None or self._view_changes != ledger.changes or now_s >= self._view_until_s:
            stale = self._stale(now_s)
            half_open_at_s = self.breaker.half_open_at_s
            closed = half_open_at_s is None
            self._view = BackendView(
                self.name,
                self.url,
                self.health(now_s),
                self.windows,
                ledger.in_flight,
                ledger.view(now_s),
                None if stale else self._reading.running,
                None if stale else self._reading.waiting,
                closed or self.breaker.accepts(now_s),
                self.draining,
                ledger.pending_prompt_tokens,
                not closed and self.breaker.state(now_s) is BreakerState.HALF_OPEN,
                self.rates.prefill_s,
                self.rates.output_s,
                self.settings.weight * self._warmth(now_s),
                self._restarts,
                self._reading.caches is not False,
                self._reading.loras,
                self._reading.lora_slots,
            )
            self._view_changes = ledger.changes
            self._view_until_s = now_s + VIEW_LIFE_S
            if half_open_at_s is not None and half_open_at_s > now_s:
                self._view_until_s = min(self._view_until_s, half_open_at_s)
        return self._view

    def load(self, now_s: float) -> LoadView | BackendView:
        """What changes all the time, if nothing else can have changed."""
        kv_known = self._view is not None and self._view.kv is not None
        if self._view is None or self.breaker.half_open_at_s is not None or not kv_known:
            return self.view(now_s)
        ledger = self.ledger
        return LoadView(self.name, ledger.in_flight, ledger.pending_prompt_tokens, ledger.reserved_blocks)

    def view_is_due(self, now_s: float) -> bool:
        """Whether the last view has become old by time alone."""
        return self._view is None or now_s >= self._view_until_s

    def record(self, now_s: float) -> BackendRecord:
        """All that is known, for people."""
        stale = self._stale(now_s)
        view = self.ledger.view(now_s)
        return BackendRecord(
            name=self.name,
            url=self.url,
            health=self.health(now_s),
            breaker=self.breaker.state(now_s),
            draining=self.draining,
            error=self._error,
            version=self.version,
            models=tuple(
                ModelRecord(card.id, card.root, card.parent, card.window_tokens, self.windows.get(card.id))
                for card in self.cards
            ),
            in_flight=self.ledger.in_flight,
            running=None if stale else self._reading.running,
            waiting=None if stale else self._reading.waiting,
            kv=self._kv_record(view, stale),
            age_s=self.age_s(now_s),
            restarts=self._restarts,
            scrapes=self._scrapes,
            scrape_failures=self._scrape_failures,
            prefill_tokens_per_s=_inverse(self.rates.prefill_s),
            output_tokens_per_s=_inverse(self.rates.output_s),
            loras=tuple(sorted(self._reading.loras)),
        )

    def _kv_record(self, view: KvView | None, stale: bool) -> KvRecord | None:
        capacity = self.ledger.capacity
        if view is None or capacity is None:
            return None
        size = view.block_size_tokens
        return KvRecord(
            engines=capacity.engines,
            block_size_tokens=size,
            capacity_blocks=view.capacity_blocks,
            used_blocks=view.used_blocks,
            reserved_blocks=view.reserved_blocks,
            free_blocks=view.free_blocks,
            foreign_blocks=self.ledger.foreign_blocks,
            shared_blocks=self.ledger.shared_blocks,
            capacity_tokens=view.capacity_blocks * size,
            used_tokens=view.used_blocks * size,
            reserved_tokens=view.reserved_blocks * size,
            free_tokens=view.free_blocks * size,
            usage_ratio=view.used_blocks / view.capacity_blocks,
            virtual=capacity.virtual,
            stale=stale,
        )

    def _stale(self, now_s: float) -> bool:
        age_s = self.age_s(now_s)
        return age_s is None or age_s > self._fleet.stale_after_s

    def _warmth(self, now_s: float) -> float:
        """The part of its share that it gets now: it grows to the whole while it comes back."""
        if self._back_s is None:
            return 1.0
        slow_s = self._fleet.slow_start_s
        warmth = max(LEAST_WARMTH, (now_s - self._back_s) / slow_s) if slow_s else 1.0
        if warmth >= 1.0:
            self._back_s = None
            return 1.0
        return warmth

    def _loaded(self) -> None:
        self._on_load(self.name)

    def _touch(self) -> None:
        self._on_touch(self.name, self.breaker.half_open_at_s is not None or self._back_s is not None)

    def _changed(self) -> None:
        self._view = None
        self._touch()
        self._on_change()

    async def _discover(self) -> bool:
        """Read models and version. Returns whether the backend said which models it has."""
        try:
            cards = await self._probe.cards()
        except ProbeFailed as error:
            self._discover_failures += 1
            if self._error is None:
                log.warning("backend %s: %s", self.name, error)
            self._error = str(error)
            lost = error.refused or self._discover_failures >= self._fleet.failures_to_open
            if self._reachable is None or lost:
                self._set_reachable(False)
            return False
        self.version = await self._probe.version() or self.version
        if self._discover_failures or not self._reachable:
            self._error = None  # what was wrong with the metrics stays until they are read
        self._discover_failures = 0
        self._discover_at_s = self._clock() + self._fleet.discover_interval_s
        if cards != self.cards:
            log.info("backend %s serves %s", self.name, ", ".join(f"{c.id} ({c.window_tokens})" for c in cards) or "-")
            self.cards = cards
            self._set_windows(self.ledger.capacity)
        self._set_reachable(True)
        return True

    async def _scrape(self) -> None:
        """Read the metrics and bring the ledger up to date. A failure puts the models in doubt, no more."""
        self.ledger.begin_scrape()
        started_s = self._clock()
        try:
            reading = await self._probe.reading()
        except ProbeFailed as error:
            self._scrape_failures += 1
            if self._error is None:
                log.warning("backend %s: %s", self.name, error)
            self._error = str(error)
            self._discover_at_s = 0.0
            if error.refused:
                self._set_reachable(False)
            return
        self._scrapes += 1
        self._error = None
        if is_restart(self._reading, reading):
            self._restarts += 1
            self.rates.forget()
            log.info("backend %s was restarted", self.name)
            if not await self._discover():
                return
        self._reading, self._read_s = reading, started_s
        capacity = kv_capacity(reading, self._max_model_len())
        if capacity != self.ledger.capacity:
            log.info("backend %s: KV cache %s", self.name, capacity or "unknown: placing by requests in flight")
            self._set_windows(capacity)
            self.ledger.set_capacity(capacity)
        if capacity is not None and (used := used_blocks(reading, capacity)) is not None:
            self.ledger.reconcile(used, started_s)

    def _set_reachable(self, reachable: bool) -> None:
        if reachable is self._reachable:
            return
        if self._reachable is not None or reachable:
            log.log(logging.INFO if reachable else logging.WARNING, "backend %s is %s", self.name, _updown(reachable))
        if self._reachable is False and reachable and self._scrapes:
            self._back_s = self._clock()
        self._reachable = reachable
        self._discover_at_s = self._discover_at_s if reachable else 0.0
        self._changed()

    def _max_model_len(self) -> int | None:
        return max((card.window_tokens for card in self.cards if card.window_tokens is not None), default=None)

    def _set_windows(self, capacity: KvCapacity | None) -> None:
        """A prompt beyond one engine's cache would never be scheduled and block all behind it: it ends the window."""
        most = capacity.engine_tokens if capacity is not None else None
        self.windows = {
            card.id: card.window_tokens if most is None else min(card.window_tokens, most)
            for card in self.cards
            if card.window_tokens is not None
        }
        self._view = None
        self._touch()


def is_restart(before: Reading, after: Reading) -> bool:
    """Whether another process answers: another start time, or a counter that went back."""
    if before.started_s is not None and after.started_s is not None and before.started_s != after.started_s:
        return True
    return any(after.counters.get(name, value) < value for name, value in before.counters.items())


def _inverse(seconds: float | None) -> float | None:
    return None if not seconds else 1.0 / seconds


def _updown(reachable: bool) -> str:
    return "up" if reachable else "down"
