"""One backend: what is known of it, the ledgers of its engines, and how placing and people see it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping

from gateway.config import BackendSettings, FleetSettings
from gateway.fleet.availability import Availability
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.discovery import ModelCard
from gateway.fleet.engines import Engines
from gateway.fleet.hits import Verdict
from gateway.fleet.looking import Looker
from gateway.fleet.metrics_text import Reading
from gateway.fleet.pulse import Pulse
from gateway.fleet.rates import Rates
from gateway.fleet.records import BackendRecord, EngineRecord, ModelRecord, kv_record
from gateway.fleet.reservation import Reservation
from gateway.fleet.targets import Target
from gateway.fleet.troubles import SAID, Turn
from gateway.fleet.witness import Witness
from gateway.types import Health, Need

log = logging.getLogger("kvgate.fleet")

_keys = itertools.count(1)


class WatchedBackend:
    """A backend, which its ``looker`` keeps fresh. ``availability`` says whether requests are to be sent there.

    ``targets`` are what placing sees of it: the server, or each of its engines where their ranks are pinned. Of an
    engine that is no more the target stays, and says so. ``windows``: the usable window in tokens by model. ``reading``
    is the last of its metrics, begun at ``read_s``.

    ``clock`` gives seconds (the event loop's); ``on_change`` is called after every look and every change of health,
    ``on_touch`` with a target whenever its ``view`` would tell placing something new, and whether time alone will, too;
    ``on_load`` if its ``load`` tells it all. ``on_verdict`` is told what the prefix-cache counters made of guesses.
    ``certain``: as for a ``Ledger``. ``rounds``: requests placed so far on it and its peers, by their number.
    ``hang_s``: how long it may say nothing before it is taken for lost.
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
        rounds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.settings = settings
        self.name = settings.label
        self.url = settings.url
        self.pinned = settings.pin_ranks
        self.engines = Engines(self._loaded, certain)
        self.targets = [Target(self, 0 if self.pinned else None)]
        self.rates = Rates()
        self.witness = Witness()
        # A look takes so long at most, and so many in vain take a backend out.
        self.hang_s = fleet.timeout_s * fleet.failures_to_open
        self.pulse = Pulse(fleet.failures_to_open, self.hang_s, self.changed)
        self.looker = Looker(self, settings, fleet, clock, on_verdict)
        self.availability = Availability(self.name, fleet, clock, self.changed, self.looker.look_soon)
        self.tells_cached = False  # its answers tell the cached tokens of their prompts
        self.cards: tuple[ModelCard, ...] = ()
        self.windows: Mapping[str, int] = {}
        self.version: str | None = None
        self.reading = Reading()
        self.read_s: float | None = None
        self.restarts = 0
        self._stale_after_s = fleet.stale_after_s
        self._clock = clock
        self._rounds = rounds
        self._on_change = on_change
        self._on_touch = on_touch
        self._on_load = on_load

    def __repr__(self) -> str:
        return f"<WatchedBackend {self.name} {self.health(self._clock())} {self.engines!r}>"

    def found(self, cards: tuple[ModelCard, ...], capacity: KvCapacity | None) -> None:
        """It serves these models with a cache of that size."""
        self.cards = cards
        self.set_capacity(capacity.engines if capacity is not None else 1, capacity)
        self.availability.set_reachable(True)

    def set_cards(self, cards: tuple[ModelCard, ...]) -> None:
        """It serves these models."""
        self.cards = cards
        self._set_windows(self.engines.capacity)

    def set_capacity(self, count: int, capacity: KvCapacity | None) -> None:
        """It has so many engines with caches of that size."""
        self._set_windows(capacity)
        while self.pinned and len(self.targets) < count:
            self.targets.append(Target(self, len(self.targets)))
        self.engines.set_capacity(count, capacity)
        self.touched()

    def forget(self) -> None:
        """Another process answers: what the one before did says nothing of it."""
        self.restarts += 1
        self.rates.forget()
        self.availability.forget()
        self.tells_cached = False

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
        self.availability.breaker.placed(key, self._clock())
        if self.looker.pace.leisurely and not self.witness.silent:
            self.looker.hurry()
        chain = () if self.reading.caches is False else chain
        prompt_tokens, output_tokens = need.prompt_tokens, need.output_tokens
        ahead_tokens = self.engines.reserve(
            key, rank, prompt_tokens, output_tokens, need.n, budget_tokens, cached_tokens, chain, heeded
        )
        trial = self.rates.sent(self._clock(), self._rounds())
        if trial:
            self.touched()  # one at a time
        return Reservation(self, key, need, ahead_tokens, cached_tokens, timed, trial, self.queues())

    def touched(self) -> None:
        """Something else than its load has changed."""
        resting = self.availability.resting
        for target in self.targets:
            target.forget()
        for target in self.targets:
            self._on_touch(target, resting)

    def changed(self) -> None:
        """Something was learned that may let a waiting request go."""
        self.touched()
        self._on_change()

    def tell(self, turns: list[Turn]) -> None:
        """Write into the log what begins and ends."""
        for turn in turns:
            detail = f" ({turn.detail})" if turn.detail else ""
            if turn.began:
                log.warning("backend %s: %s: %s%s", self.name, turn.kind, SAID[turn.kind], detail)
            else:
                log.info("backend %s: %s is over", self.name, turn.kind)

    @property
    def epoch(self) -> int:
        """Another number when what it had in its cache is gone."""
        return self.restarts + self.availability.wakings

    @property
    def max_model_len_tokens(self) -> int | None:
        """The largest window that any of its models states."""
        return max((card.window_tokens for card in self.cards if card.window_tokens is not None), default=None)

    def now_s(self) -> float:
        """The clock."""
        return self._clock()

    def health(self, now_s: float) -> Health:
        """Whether requests can be sent there."""
        return self.availability.health(now_s)

    def age_s(self, now_s: float) -> float | None:
        """Age of the last reading of the metrics."""
        return None if self.read_s is None else max(0.0, now_s - self.read_s)

    def is_stale(self, now_s: float) -> bool:
        """Whether that reading is too old to say what runs and waits there."""
        age_s = self.age_s(now_s)
        return age_s is None or age_s > self._stale_after_s

    def requests_at(self, rank: int, now_s: float) -> tuple[int | None, int | None]:
        """Requests that run and wait at an engine by the last reading, ``None`` while unknown."""
        reading = self.reading
        if self.is_stale(now_s):
            return None, None
        if len(self.engines) == 1:
            return reading.running, reading.waiting
        label = reading.labels[rank] if rank < len(reading.labels) else ""
        running, waiting = reading.running_by_engine or {}, reading.waiting_by_engine or {}
        return running.get(label), waiting.get(label)

    def queues(self) -> bool:
        """Whether requests wait in the server's own queue, as far as is known."""
        return bool(self.reading.waiting) and not self.is_stale(self._clock())

    def trust(self, now_s: float) -> float:
        """How much of what was learned of its pace is to be believed: others may have been preferred for long."""
        return self.rates.trust(now_s, self._rounds())

    def share(self, now_s: float) -> float:
        """Work it is to get in comparison to others; less while it comes back."""
        return self.settings.weight * self.availability.warmth(now_s)

    def record(self, now_s: float) -> BackendRecord:
        """All that is known, for people."""
        stale = self.is_stale(now_s)
        availability, looker, reading = self.availability, self.looker, self.reading
        ranks = range(len(self.engines))
        return BackendRecord(
            name=self.name,
            url=self.url,
            health=self.health(now_s),
            breaker=availability.breaker.state(now_s),
            draining=availability.draining,
            error=looker.error,
            version=self.version,
            models=tuple(
                ModelRecord(card.id, card.root, card.parent, card.window_tokens, self.windows.get(card.id))
                for card in self.cards
            ),
            in_flight=self.engines.in_flight,
            running=None if stale else reading.running,
            waiting=None if stale else reading.waiting,
            kv=kv_record([self.engines[rank] for rank in ranks], stale),
            age_s=self.age_s(now_s),
            restarts=self.restarts,
            scrapes=looker.scrapes,
            scrape_failures=looker.scrape_failures,
            prefill_tokens_per_s=_inverse(self.rates.prefill_s),
            output_tokens_per_s=_inverse(self.rates.output_s),
            first_byte_s=self.rates.base_s,
            loras=tuple(sorted(reading.loras)),
            pin_ranks=self.pinned,
            engines=tuple(self._engine_record(rank, stale, now_s) for rank in ranks),
            condition=availability.condition(now_s),
            troubles=self.witness.troubles.records(now_s),
            troubles_ever=tuple(sorted(self.witness.troubles.ever)),
            overloads=availability.overloads,
            ejections=availability.ejections,
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

    def _loaded(self, rank: int) -> None:
        self._on_load(self.targets[rank if self.pinned else 0])

    def _set_windows(self, capacity: KvCapacity | None) -> None:
        """A prompt beyond one engine's cache would never be scheduled and block all behind it: it ends the window."""
        most = capacity.engine_tokens if capacity is not None else None
        self.windows = {
            card.id: card.window_tokens if most is None else min(card.window_tokens, most)
            for card in self.cards
            if card.window_tokens is not None
        }
        self.touched()


def _inverse(seconds: float | None) -> float | None:
    return None if not seconds else 1.0 / seconds
