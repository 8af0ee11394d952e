"""One backend as the fleet watches it: a loop that probes it, and what is known of it in between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Mapping

from gateway.config import BackendSettings, FleetSettings
from gateway.fleet.breaker import Breaker, BreakerState
from gateway.fleet.capacity import KvCapacity, kv_capacity, used_blocks
from gateway.fleet.discovery import ModelCard, Probe, ProbeFailed
from gateway.fleet.engines import Engines
from gateway.fleet.hits import Verdict
from gateway.fleet.metrics_text import Reading
from gateway.fleet.outliers import Recent
from gateway.fleet.overload import FIRST_REST_S, Overload
from gateway.fleet.pace import Pace, Sight
from gateway.fleet.rates import Rates
from gateway.fleet.records import BackendRecord, EngineRecord, ModelRecord, kv_record
from gateway.fleet.standing import START_S, Signs, condition
from gateway.fleet.targets import Target
from gateway.fleet.troubles import SAID, Trouble, Turn
from gateway.fleet.witness import Witness
from gateway.types import Condition, Health, Need

log = logging.getLogger("kvgate.fleet")

JITTER = 0.1
# Least pause between two looks at one backend, however many requests fail meanwhile.
LEAST_PAUSE_S = 0.2
LEAST_WARMTH = 0.1
# A backend that says it is full may say so many times a second; the log does not.
QUIET_S = 60.0

_keys = itertools.count(1)
# The most the prompt may have taken of a whole answer's time for the rest to tell the pace of its output.
WHOLE_SHARE = 0.25
NO_NEED = Need(0, 0)


class Reservation:
    """What one request holds on a backend, from the moment it is placed until ``release``.

    ``ahead_tokens``: prompt tokens to be worked on before its first byte, its own left out. ``timed``: the moments at
    which it is told of bytes tell how fast the backend is.
    """

    __slots__ = (
        "_ahead_tokens",
        "_backend",
        "_counted",
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
        self._counted = False
        if timed:
            own_tokens = max(0, need.prompt_tokens - cached_tokens)
            backend.recent.placed(key, ahead_tokens + own_tokens, backend.now_s())

    @property
    def grown_tokens(self) -> int:
        """Tokens generated so far, over all sequences."""
        return self._grown_tokens

    @property
    def expected_first_byte_s(self) -> float | None:
        """Seconds from its placement to its first byte, as far as the backend is known."""
        own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
        return self._backend.rates.expected_s(self._ahead_tokens + own_tokens)

    def outrun(self) -> None:
        """Another backend began to answer the same request first: this one takes longer than until now, at least."""
        if self._placed_s is not None and self._first_s is None:
            own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
            took_s = self._backend.now_s() - self._placed_s
            self._backend.rates.prefilled(self._ahead_tokens + own_tokens, took_s)
            self.timed_out()

    def prefilled(self) -> None:
        """The prompt should be done by now: of what is not streamed no byte tells."""
        self._backend.engines.prefilled(self._key)

    def took(self, output_tokens: int, seconds: float) -> None:
        """A whole answer of so many tokens, over all sequences, came after ``seconds``. It tells how long the prompt
        took if there was no output to speak of, and the pace of the output if the prompt was no great part of it."""
        rates = self._backend.rates
        own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
        prompt_s = rates.expected_s(self._ahead_tokens + own_tokens)
        each_tokens = output_tokens // self._need.n
        if each_tokens <= 1:
            rates.prefilled(self._ahead_tokens + own_tokens, seconds)
        elif prompt_s is not None and prompt_s <= WHOLE_SHARE * seconds:
            rates.generated(each_tokens - 1, seconds - prompt_s)
        self._backend.touched()

    def first_byte(self) -> None:
        """The backend began to answer."""
        self._backend.engines.first_byte(self._key)
        if self._placed_s is not None and self._first_s is None:
            self._first_s = self._backend.now_s()
            self._backend.recent.began(self._key, self._first_s)
        self._looked_up()

    def timed_out(self) -> None:
        """The first byte was waited for in vain."""
        self._backend.recent.timed_out(self._key, self._backend.now_s())

    def finished(self, told: bool) -> None:
        """The answer came to its end; ``told``: with the cached tokens of its prompt."""
        self._looked_up()
        self._backend.tells_cached = self._backend.tells_cached or told

    def _looked_up(self) -> None:
        """The prompt was looked up in the prefix cache: it is among what the backend's counters have counted."""
        if not self._counted:
            self._counted = True
            need = self._need
            self._backend.witness.hits.answered(need.prompt_tokens, self.cached_tokens, clear=need.n == 1)

    def grow(self, tokens: int) -> None:
        """So many more tokens were generated."""
        self._grown_tokens += tokens
        self._backend.engines.grow(self._key, tokens)

    def release(self) -> None:
        """Let go of everything. Doing so again changes nothing."""
        if self._placed_s is not None and self._first_s is not None:
            own_tokens = max(0, self._need.prompt_tokens - self.cached_tokens)
            rates = self._backend.rates
            rates.prefilled(self._ahead_tokens + own_tokens, self._first_s - self._placed_s)
            rates.generated(self._grown_tokens // self._need.n - 1, self._backend.now_s() - self._first_s)
            self._backend.touched()
        if self._placed_s is not None:
            self._backend.recent.gone(self._key)
        self._placed_s = None
        self._backend.engines.release(self._key)
        self._backend.breaker.released(self._key)


class WatchedBackend:
    """A backend and the loop (``watch``) that keeps what is known of it fresh.

    ``targets`` are what placing sees of it: the server, or each of its engines where their ranks are pinned. Of an
    engine that is no more the target stays, and says so.

    ``clock`` gives seconds (the event loop's); ``on_change`` is called after every look and every change of health,
    ``on_touch`` with a target whenever its ``view`` would tell placing something new, and whether time alone will, too;
    ``on_load`` if its ``load`` tells it all. ``on_verdict`` is told what the prefix-cache counters made of guesses.
    ``certain``: as for a ``Ledger``.
    """

    def __init__(
        self,
        settings: BackendSettings,
        fleet: FleetSettings,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_touch: Callable[[Target, bool], None] = lambda target, resting: None,
        on_load: Callable[[Target], None] = lambda target: None,
        on_verdict: Callable[[WatchedBackend, Verdict], None] = lambda backend, verdict: None,
        certain: bool = False,
    ) -> None:
        self.settings = settings
        self.name = settings.label
        self.url = settings.url
        self.pinned = settings.pin_ranks
        self.engines = Engines(self._loaded, certain)
        self.targets = [Target(self, 0 if self.pinned else None)]
        self.rates = Rates()
        self.breaker = Breaker(fleet.failures_to_open, fleet.reopen_after_s)
        self.overload = Overload()
        self.recent = Recent()
        self.witness = Witness()
        self.standby_for: str | None = None  # the backend that is the same server, and is up
        self.ejected_until_s: float | None = None
        self.tells_cached = False  # its answers tell the cached tokens of their prompts
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
        self._on_verdict = on_verdict
        self._pace = Pace(fleet.scrape_fastest_s, fleet.scrape_interval_s, fleet.scrape_slowest_s)
        self._moved = False  # something happened there between the last two readings
        self._began_s = 0.0
        self._starting = False
        self._asleep = self._paused = False
        self._wakings = 0
        self._overloads = self._ejections = 0
        self._told_full_s: float | None = None
        self._probe = Probe(settings, fleet.timeout_s)
        self._wake = asyncio.Event()
        self._reachable: bool | None = None
        self._back_s: float | None = None  # when it came back, for a slow start
        self._error: str | None = None
        self.reading = Reading()
        self._read_s: float | None = None
        self._discover_at_s = 0.0
        self._discover_failures = 0
        self.restarts = 0
        self._scrapes = 0
        self._scrape_failures = 0

    def __repr__(self) -> str:
        return f"<WatchedBackend {self.name} {self.health(self._clock())} {self.engines!r}>"

    async def watch(self) -> None:
        """Look at the backend again and again until cancelled. One look at a time."""
        self._began_s = self._clock()
        while True:
            started_s = self._clock()
            self._moved = False
            try:
                await self.look()
            except Exception:
                log.exception("looking at backend %s failed; trying again", self.name)
            finally:
                self.looked.set()
            self._changed()
            pause_s = self._pace.pause_s(self._sight(), self._clock() - started_s)
            pause_s *= random.uniform(1 - JITTER, 1 + JITTER)
            least_s = min(LEAST_PAUSE_S, pause_s)
            await asyncio.sleep(least_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s - least_s):
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
        self._set_capacity(capacity.engines if capacity is not None else 1, capacity)
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
        rank: int | None = None,
        heeded: bool = True,
    ) -> Reservation:
        """Enter a request into the ledger of engine ``rank``, or of the one the server should send it to. Never fails:
        whether it fits was decided before."""
        key = next(_keys)
        self.breaker.placed(key, self._clock())
        if self._pace.leisurely and not self.witness.silent:
            self._pace.hurry()
            self._wake.set()
        chain = () if self.reading.caches is False else chain
        prompt_tokens, output_tokens = need.prompt_tokens, need.output_tokens
        ahead_tokens = self.engines.reserve(
            key, rank, prompt_tokens, output_tokens, need.n, budget_tokens, cached_tokens, chain, heeded
        )
        return Reservation(self, key, need, ahead_tokens, cached_tokens, timed)

    def touched(self) -> None:
        """Something else than its load has changed."""
        for target in self.targets:
            target.forget()
        self._touch()

    def now_s(self) -> float:
        """The clock."""
        return self._clock()

    def note_failure(self, placed_s: float | None = None) -> None:
        """A request failed for the backend's sake that was placed at ``placed_s``."""
        self.recent.ended(True, self._clock())
        if self.breaker.failed(self._clock(), placed_s):
            log.warning("backend %s: %d failures in a row, resting it", self.name, self.breaker.failures)
            self._changed()
        self.look_soon()

    def note_busy(self, placed_s: float, full: bool) -> None:
        """A request, placed at ``placed_s``, was answered 503: the backend has as much as it takes for now (``full``),
        or is not what it was."""
        now_s = self._clock()
        if not full:
            self.look_soon()
        rest_s = self.overload.refused(placed_s, now_s)
        self._overloads += 1
        if rest_s is None:
            return
        if rest_s == FIRST_REST_S and (self._told_full_s is None or now_s - self._told_full_s >= QUIET_S):
            self._told_full_s = now_s
            log.warning(
                "backend %s takes no more for now (503): it rests, and requests go elsewhere or wait", self.name
            )
        self._changed()
        # Nobody else would notice the end of so short a time.
        asyncio.get_running_loop().call_later(rest_s, self._changed)

    def eject(self, until_s: float, reason: str) -> None:
        """Let it rest until then: it is far worse than its peers."""
        self._ejections += 1
        self.ejected_until_s = until_s
        log.warning("backend %s: %s; it rests for %.0f s", self.name, reason, until_s - self._clock())
        self._changed()

    def readmit(self) -> None:
        """Its rest is over; what it did before does not count any more."""
        self.ejected_until_s = None
        self.recent.clear()
        self._back_s = self._clock()
        log.info("backend %s is back from its rest", self.name)
        self._changed()

    def stand_by(self, other: str | None) -> None:
        """It is the same server as backend ``other``, or none that is up any more."""
        if other != self.standby_for:
            self.standby_for = other
            self._changed()

    def tell(self, turns: list[Turn]) -> None:
        """Write into the log what begins and ends."""
        for turn in turns:
            detail = f" ({turn.detail})" if turn.detail else ""
            if turn.began:
                log.warning("backend %s: %s: %s%s", self.name, turn.kind, SAID[turn.kind], detail)
            else:
                log.info("backend %s: %s is over", self.name, turn.kind)

    def note_success(self) -> None:
        """The backend answered a request."""
        self.recent.ended(False, self._clock())
        if self.overload.answered(self._clock()):
            self._changed()
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
        """Down: it cannot be reached, sleeps, or its breaker is open. Unknown until the first look is over."""
        if self._reachable is None:
            return Health.UNKNOWN
        if not self._reachable or self._asleep or self.breaker.state(now_s) is BreakerState.OPEN:
            return Health.DOWN
        return Health.UP

    @property
    def reachable(self) -> bool:
        """Whether it answered the last look."""
        return self._reachable is True

    @property
    def epoch(self) -> int:
        """Another number when what it had in its cache is gone."""
        return self.restarts + self._wakings

    def rests_until_s(self, now_s: float) -> float | None:
        """Until when nothing is placed there for a moment; ``None`` if it does not rest."""
        ends = [end_s for end_s in (self.overload.until_s, self.ejected_until_s) if end_s is not None and end_s > now_s]
        return max(ends, default=None)

    def condition(self, now_s: float) -> Condition:
        """How it stands, in one word."""
        return condition(
            Signs(
                reachable=self._reachable,
                starting=self._starting,
                asleep=self._asleep,
                standby=self.standby_for is not None,
                draining=self.draining,
                breaker=self.breaker.state(now_s),
                ejected=self.ejected_until_s is not None and self.ejected_until_s > now_s,
                overloaded=self.overload.rests(now_s),
                warming=self.warmth(now_s) < 1.0,
            )
        )

    def age_s(self, now_s: float) -> float | None:
        """Age of the last reading of the metrics."""
        return None if self._read_s is None else max(0.0, now_s - self._read_s)

    def requests_at(self, rank: int, now_s: float) -> tuple[int | None, int | None]:
        """Requests that run and wait at an engine by the last reading, ``None`` while unknown."""
        reading = self.reading
        if self._stale(now_s):
            return None, None
        if len(self.engines) == 1:
            return reading.running, reading.waiting
        label = reading.labels[rank] if rank < len(reading.labels) else ""
        running, waiting = reading.running_by_engine or {}, reading.waiting_by_engine or {}
        return running.get(label), waiting.get(label)

    def warmth(self, now_s: float) -> float:
        """The part of its share, and of its cache, that it gets now: it grows to the whole while it comes back."""
        if self._back_s is None:
            return 1.0
        slow_s = self._fleet.slow_start_s
        warmth = max(LEAST_WARMTH, (now_s - self._back_s) / slow_s) if slow_s else 1.0
        if warmth >= 1.0:
            self._back_s = None
            return 1.0
        return warmth

    def share(self, now_s: float) -> float:
        """Work it is to get in comparison to others; less while it comes back."""
        return self.settings.weight * self.warmth(now_s)

    def record(self, now_s: float) -> BackendRecord:
        """All that is known, for people."""
        stale = self._stale(now_s)
        ranks = range(len(self.engines))
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
            in_flight=self.engines.in_flight,
            running=None if stale else self.reading.running,
            waiting=None if stale else self.reading.waiting,
            kv=kv_record([self.engines[rank] for rank in ranks], stale),
            age_s=self.age_s(now_s),
            restarts=self.restarts,
            scrapes=self._scrapes,
            scrape_failures=self._scrape_failures,
            prefill_tokens_per_s=_inverse(self.rates.prefill_s),
            output_tokens_per_s=_inverse(self.rates.output_s),
            loras=tuple(sorted(self.reading.loras)),
            pin_ranks=self.pinned,
            engines=tuple(self._engine_record(rank, stale, now_s) for rank in ranks),
            condition=self.condition(now_s),
            troubles=self.witness.troubles.records(now_s),
            troubles_ever=tuple(sorted(self.witness.troubles.ever)),
            overloads=self._overloads,
            ejections=self._ejections,
            prefix_hit_ratio=self.witness.hits.ratio,
        )

    def _engine_record(self, rank: int, stale: bool, now_s: float) -> EngineRecord:
        labels, ledger = self.reading.labels, self.engines[rank]
        return EngineRecord(
            labels[rank] if rank < len(labels) else str(rank),
            ledger.in_flight,
            *self.requests_at(rank, now_s),
            kv_record([ledger], stale),
        )

    def _stale(self, now_s: float) -> bool:
        age_s = self.age_s(now_s)
        return age_s is None or age_s > self._fleet.stale_after_s

    def _loaded(self, rank: int) -> None:
        self._on_load(self.targets[rank if self.pinned else 0])

    def _touch(self) -> None:
        resting = self.breaker.half_open_at_s is not None or self._back_s is not None
        resting = resting or self.overload.until_s is not None or self.ejected_until_s is not None
        for target in self.targets:
            self._on_touch(target, resting)

    def _changed(self) -> None:
        self.touched()
        self._on_change()

    async def _discover(self) -> bool:
        """Read models and version. Returns whether the backend said which models it has."""
        try:
            cards = await self._probe.cards()
            if not await self._probe.alive():
                raise ProbeFailed("its engine is dead: /health answers 503", dead=True)
        except ProbeFailed as error:
            self._discover_failures += 1
            # A server that was never there may be loading its model: vLLM listens only when it is done.
            awaited = error.refused and not self.cards and self._clock() - self._began_s < START_S
            self._starting = error.starting or awaited
            if self._error is None:
                log.log(logging.INFO if self._starting else logging.WARNING, "backend %s: %s", self.name, error)
            self._error = str(error)
            lost = error.final or self._discover_failures >= self._fleet.failures_to_open
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
            self._set_windows(self.engines.capacity)
        if self.reading.awake is None:
            self._set_asleep(self._paused or await self._probe.asleep())
        self._set_reachable(True)
        return True

    async def _scrape(self) -> None:
        """Read the metrics and bring the ledger up to date. A failure puts the models in doubt, no more."""
        self.engines.begin_scrape()
        started_s = self._clock()
        try:
            reading = await self._probe.reading()
        except ProbeFailed as error:
            self._scrape_failures += 1
            self.tell(self.witness.failed(str(error), self._clock()))
            self._error = str(error)
            self._discover_at_s = 0.0
            if error.refused:
                self._set_reachable(False)
            return
        self._scrapes += 1
        self._error = None
        heard = self.witness.read(reading, self.engines.in_flight, started_s)
        self.tell(heard.turns)
        if heard.restarted:
            self._forget()
            log.info("backend %s was restarted", self.name)
            if not await self._discover():
                return
        self.reading, self._read_s, self._moved = reading, started_s, heard.moved
        if heard.stuck or self._paused:
            self._paused = await self._probe.paused()
        if reading.awake is not None or self._paused:
            self._set_asleep(self._paused or reading.awake is False)
        if heard.verdict is not None and not self.tells_cached:
            self._on_verdict(self, heard.verdict)
        capacity = None if heard.blind else kv_capacity(reading, self._max_model_len())
        count = len(reading.labels) or len(self.engines)  # nothing said is not one
        if capacity != self.engines.capacity or count != len(self.engines):
            log.info("backend %s: KV cache %s", self.name, capacity or "unknown: placing by requests in flight")
            self._set_capacity(count, capacity)
        if capacity is not None and (used := used_blocks(reading, capacity)) is not None:
            disobeyed = self.engines.disobeyed
            self.engines.reconcile(used, requests_by_rank(reading), started_s)
            if self.engines.disobeyed > disobeyed:
                turn = self.witness.troubles.begin(Trouble.RANKS_IGNORED, "", self._clock())
                self.tell([turn] if turn is not None else [])

    def _forget(self) -> None:
        """Another process answers: what the one before did says nothing of it."""
        self.restarts += 1
        self.rates.forget()
        self.overload.forget()
        self.recent.clear()
        self._probe.forget()
        self.tells_cached = self._paused = False

    def _sight(self) -> Sight:
        """What the last look found, as far as it says when the next one is due."""
        if not self._reachable:
            return Sight(failed=True)
        if self.witness.silent:
            return Sight()
        capacity, in_flight = self.engines.capacity, self.engines.in_flight
        ratio = self.engines.reserved_blocks / capacity.blocks if capacity is not None else None
        return Sight(in_flight > 0, ratio, self.reading.waiting, self._moved)

    def _set_asleep(self, asleep: bool) -> None:
        if asleep is self._asleep:
            return
        self._asleep = asleep
        log.info("backend %s %s", self.name, "is asleep: nothing is placed there" if asleep else "is awake")
        if not asleep:
            self._wakings += 1  # its caches are empty
            self._back_s = self._clock()
        self._changed()

    def _set_reachable(self, reachable: bool) -> None:
        if reachable is self._reachable:
            return
        if self._reachable is not None or reachable:
            calm = reachable or self._starting
            word = "up" if reachable else "starting" if self._starting else "down"
            log.log(logging.INFO if calm else logging.WARNING, "backend %s is %s", self.name, word)
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
        self.touched()

    def _set_capacity(self, count: int, capacity: KvCapacity | None) -> None:
        """Take over the number of its engines and their caches."""
        self._set_windows(capacity)
        while self.pinned and len(self.targets) < count:
            self.targets.append(Target(self, len(self.targets)))
        self.engines.set_capacity(count, capacity)
        self.touched()


def requests_by_rank(reading: Reading) -> list[int] | None:
    """Requests that run or wait at each engine, as far as every engine tells both."""
    running, waiting = reading.running_by_engine, reading.waiting_by_engine
    if running is None or waiting is None:
        return None
    return [running[label] + waiting[label] for label in reading.labels]


def _inverse(seconds: float | None) -> float | None:
    return None if not seconds else 1.0 / seconds
