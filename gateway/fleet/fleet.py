"""All backends together: which models there are, what each backend looks like now, and whom to tell what happened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import SecretStr

from gateway.config import Settings
from gateway.fleet.backend import WatchedBackend
from gateway.fleet.hits import Verdict
from gateway.fleet.models import Model, Models
from gateway.fleet.peers import Peers
from gateway.fleet.pulse import Pulse
from gateway.fleet.records import BackendRecord
from gateway.fleet.reservation import Reservation
from gateway.fleet.targets import Target
from gateway.fleet.troubles import Trouble
from gateway.types import BackendView, LoadView, Need


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a request is sent: to engine ``rank`` of the server, if that is to be asked for.

    ``observation_age_s`` is the age of the last metrics read, ``None`` without any. ``priority_scheduling``: it is to
    be told each request's class.
    """

    name: str
    url: str
    api_key: SecretStr | None
    version: str | None
    observation_age_s: float | None
    priority_scheduling: bool = False
    rank: int | None = None


class _Views(Mapping[str, BackendView]):
    """Views built when they are looked at: placing a request looks at its own backends only."""

    __slots__ = ("_now_s", "_targets")

    def __init__(self, targets: Mapping[str, Target], now_s: float) -> None:
        self._targets = targets
        self._now_s = now_s

    def __getitem__(self, name: str) -> BackendView:
        return self._targets[name].view(self._now_s)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


class Fleet:
    """The configured backends, watched from ``start`` to ``stop``.

    Placing knows them by the names of their targets: a backend's own, or ``name#rank`` for each of its engines where
    their ranks are pinned. People and metrics know the backends.

    ``on_change`` is called whenever something was learned that may let a waiting request go, ``on_verdict`` when a
    backend's counters tell what was cached of prompts sent to a target. Times are seconds of the event loop's clock.
    """

    def __init__(
        self,
        settings: Settings,
        on_change: Callable[[], None],
        on_verdict: Callable[[str, Verdict], None] = lambda name, verdict: None,
    ) -> None:
        self._settings = settings
        self._on_change = on_change
        self._on_verdict = on_verdict
        self._peers = Peers(settings.fleet)
        self._tasks: list[asyncio.Task[None]] = []
        self._touched: set[Target] = set()
        self._loaded: set[Target] = set()
        self._resting: set[Target] = set()  # those whose breaker is open: time alone changes them
        self._targets: dict[str, Target] = {}
        self._placed = 0
        certain = settings.placing.reserve == "budget"
        self._backends = {
            item.label: WatchedBackend(
                item, settings.fleet, _now, self._changed, self._touch, self._load, self._judged, certain, self._rounds
            )
            for item in settings.backends
        }
        self._models = Models(self._backends.values())
        for backend in self._backends.values():
            for target in backend.targets:
                self._touch(target, False)
            if len(backend.settings.spellings) > 1:
                turn = backend.witness.troubles.begin(Trouble.LISTED_TWICE, ", ".join(backend.settings.spellings), 0.0)
                backend.tell([turn] if turn is not None else [])

    async def start(self) -> None:
        """Begin to watch every backend. Returns at once; see ``wait_until_known``."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(backend.looker.watch(), name=f"watch {name}")
                for name, backend in self._backends.items()
            ]
            self._tasks.append(asyncio.create_task(self._peers.watch(self._backends, _now), name="watch peers"))

    async def stop(self) -> None:
        """Stop watching and close the connections."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self._backends.values():
            await backend.looker.close()

    async def wait_until_known(self, timeout_s: float) -> bool:
        """Wait until every backend was looked at once, but not longer than ``timeout_s``. Returns ``ready``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for backend in self._backends.values():
                    await backend.looker.looked.wait()
        return self.ready()

    def ready(self) -> bool:
        """Whether a backend takes new requests."""
        now_s = _now()
        return any(backend.availability.takes_new(now_s) for backend in self._backends.values())

    def views(self, now_s: float) -> Mapping[str, BackendView]:
        """All backends as they look now, by target. A view may be a quarter of a second old where nothing happened."""
        return _Views(self._targets, now_s)

    def changed(self, now_s: float) -> list[BackendView | LoadView]:
        """The backends that look otherwise than at the last call, in what placing goes by; at the first call all.

        Where only its load is another one, that is told alone. For one caller: what it was told is not told again.
        """
        touched, self._touched = self._touched, set()
        loaded, self._loaded = self._loaded, set()
        for target in self._resting:
            if target.view_is_due(now_s):
                touched.add(target)
        told: list[BackendView | LoadView] = [target.view(now_s) for target in touched]
        told += [target.load(now_s) for target in loaded if target not in touched]
        return told

    def models(self) -> list[Model]:
        """Every name any backend is known to serve, sorted."""
        return sorted(self._models.current().values(), key=lambda model: model.id)

    def resolve(self, name: str) -> Model:
        """The model of that name; an empty name means the only base model, if there is one (vLLM takes it so, too).

        Raises ``UnknownModel``, or ``NoBackend`` while no backend has ever said what it serves.
        """
        return self._models.resolve(name)

    def windows(self, model: str) -> Mapping[str, int]:
        """Usable window in tokens by target of every backend that serves ``model``, down or not."""
        return {
            target.name: item.windows[model]
            for item in self._backends.values()
            if model in item.windows
            for target in item.targets
            if not target.gone
        }

    def backend(self, name: str) -> Backend:
        """How to reach a backend or a target. Raises ``KeyError`` for a name that is neither."""
        target = self._targets.get(name)
        item = self._backends[name] if target is None else target.backend
        known = item.settings
        age_s = item.age_s(_now())
        rank = None if target is None else target.rank
        return Backend(item.name, item.url, known.api_key, item.version, age_s, known.priority_scheduling, rank)

    def pulse(self, name: str) -> Pulse:
        """Whether anything is heard of a backend."""
        return self._backends[name].pulse

    def siblings(self, name: str) -> frozenset[str]:
        """The targets of the server that a target belongs to, itself included. Raises ``KeyError``."""
        return frozenset(target.name for target in self._targets[name].backend.targets)

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
        """Enter a request into a backend's ledger; the caller releases it whatever happens. ``timed``: it is a stream,
        whose chunks tell how fast the backend is. ``chain``: beginnings of its prompt, which others may share.
        ``rank``: the engine that its client asks for, where ranks are not pinned; ``heeded``: the server obeys."""
        target, asked = self._targets[name], rank if heeded else None
        self._placed += 1
        backend = target.backend
        reservation = backend.reserve(
            need, budget_tokens, cached_tokens, timed, chain, asked if target.rank is None else target.rank, heeded
        )
        if target.rank is None and len(backend.engines) > 1:
            self._on_change()  # another engine may be next, and take who waits
        return reservation

    def note_failure(self, name: str, placed_s: float | None = None) -> None:
        """A request, placed at ``placed_s``, failed for the backend's sake: no connection, hung up, or a 5xx."""
        self._backends[name].availability.note_failure(placed_s)

    def note_busy(self, name: str, placed_s: float, full: bool) -> None:
        """A request, placed at ``placed_s``, was answered 503. ``full``: since the backend takes no more for now."""
        self._backends[name].availability.note_busy(placed_s, full)

    def look_soon(self, name: str) -> None:
        """Something about a backend cannot be as it was read last."""
        self._backends[name].looker.look_soon()

    def note_success(self, name: str, erred: bool = False) -> None:
        """The backend answered a request; ``erred``: with an internal error of its own (500)."""
        self._backends[name].availability.note_success(erred)

    def drain(self, name: str) -> None:
        """Place nothing more on a backend; what runs there runs on. Raises ``KeyError``."""
        self._backends[name].availability.drain(True)

    def undrain(self, name: str) -> None:
        """Place requests on a backend again. Raises ``KeyError``."""
        self._backends[name].availability.drain(False)

    def watched(self) -> list[WatchedBackend]:
        """The backends themselves, for what else looks after them."""
        return list(self._backends.values())

    def records(self) -> list[BackendRecord]:
        """All that is known of each backend, for metrics and people."""
        now_s = _now()
        return [backend.record(now_s) for backend in self._backends.values()]

    def describe(self) -> dict[str, Any]:
        """The fleet for the status page: ``{"backends": [BackendRecord…], "models": [Model…]}`` as plain JSON."""
        return {
            "backends": [asdict(record) for record in self.records()],
            "models": [asdict(model) for model in self.models()],
        }

    def _rounds(self) -> float:
        """Requests placed so far for each backend."""
        return self._placed / max(1, len(self._backends))

    def _changed(self) -> None:
        self._on_change()

    def _judged(self, backend: WatchedBackend, verdict: Verdict) -> None:
        """A backend's prefix-cache counters tell of guesses made of it."""
        for target in backend.targets:
            self._on_verdict(target.name, verdict)

    def _load(self, target: Target) -> None:
        """Placing would see another load there now."""
        self._loaded.add(target)

    def _touch(self, target: Target, resting: bool) -> None:
        """Placing would see something else there now; ``resting``: it will again as time passes."""
        self._targets.setdefault(target.name, target)
        self._touched.add(target)
        if resting:
            self._resting.add(target)
        else:
            self._resting.discard(target)


def _now() -> float:
    return asyncio.get_running_loop().time()
