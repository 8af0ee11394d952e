"""All backends together: which models there are, what each backend looks like now, and whom to tell what happened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import SecretStr

from gateway.config import Settings
from gateway.exceptions import NoBackend, UnknownModel
from gateway.fleet.backend import BackendRecord, Reservation, WatchedBackend
from gateway.types import BackendView, Health, LoadView, Need


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a request is sent. ``observation_age_s`` is the age of the last metrics read, ``None`` without any.
    ``priority_scheduling``: it is to be told each request's class."""

    name: str
    url: str
    api_key: SecretStr | None
    version: str | None
    observation_age_s: float | None
    priority_scheduling: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A served name. ``window_tokens`` is the largest usable window over its backends, ``max_model_len_tokens`` the
    largest any of their servers states. ``backends`` are names, down or not, in the order of the settings."""

    id: str
    root: str | None
    parent: str | None
    window_tokens: int
    max_model_len_tokens: int
    backends: tuple[str, ...]


class _Views(Mapping[str, BackendView]):
    """Views built when they are looked at: placing a request looks at its own backends only."""

    __slots__ = ("_backends", "_now_s")

    def __init__(self, backends: Mapping[str, WatchedBackend], now_s: float) -> None:
        self._backends = backends
        self._now_s = now_s

    def __getitem__(self, name: str) -> BackendView:
        return self._backends[name].view(self._now_s)

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends)

    def __len__(self) -> int:
        return len(self._backends)


class Fleet:
    """The configured backends, watched from ``start`` to ``stop``.

    ``on_change`` is called whenever something was learned that may let a waiting request go. Times are seconds of the
    event loop's clock.
    """

    def __init__(self, settings: Settings, on_change: Callable[[], None]) -> None:
        self._settings = settings
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._models: dict[str, Model] = {}
        self._models_of: tuple[Mapping[str, int], ...] | None = None
        self._backends = {
            item.label: WatchedBackend(item, settings.fleet, _now, self._changed, self._touch, self._load)
            for item in settings.backends
        }
        self._touched = set(self._backends)
        self._loaded: set[str] = set()
        self._resting: set[str] = set()  # those whose breaker is open: time alone changes them

    async def start(self) -> None:
        """Begin to watch every backend. Returns at once; see ``wait_until_known``."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(backend.watch(), name=f"watch {name}") for name, backend in self._backends.items()
            ]

    async def stop(self) -> None:
        """Stop watching and close the connections."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self._backends.values():
            await backend.close()

    async def wait_until_known(self, timeout_s: float) -> bool:
        """Wait until every backend was looked at once, but not longer than ``timeout_s``. Returns whether one is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for backend in self._backends.values():
                    await backend.looked.wait()
        return self.ready()

    def ready(self) -> bool:
        """Whether a backend is up."""
        now_s = _now()
        return any(backend.health(now_s) is Health.UP for backend in self._backends.values())

    def views(self, now_s: float) -> Mapping[str, BackendView]:
        """All backends as they look now. A view may be up to a quarter of a second old where nothing happened."""
        return _Views(self._backends, now_s)

    def changed(self, now_s: float) -> list[BackendView | LoadView]:
        """The backends that look otherwise than at the last call, in what placing goes by; at the first call all.

        Where only its load is another one, that is told alone. For one caller: what it was told is not told again.
        """
        touched, self._touched = self._touched, set()
        loaded, self._loaded = self._loaded, set()
        for name in self._resting:
            if self._backends[name].view_is_due(now_s):
                touched.add(name)
        told: list[BackendView | LoadView] = [self._backends[name].view(now_s) for name in touched]
        told += [self._backends[name].load(now_s) for name in loaded if name not in touched]
        return told

    def models(self) -> list[Model]:
        """Every name any backend is known to serve, sorted."""
        return sorted(self._current_models().values(), key=lambda model: model.id)

    def resolve(self, name: str) -> Model:
        """The model of that name; an empty name means the only base model, if there is one (vLLM takes it so, too).

        Raises ``UnknownModel``, or ``NoBackend`` while no backend has ever said what it serves.
        """
        models = self._current_models()
        model = models.get(name)
        if model is not None:
            return model
        if not models:
            raise NoBackend("No backend has answered yet. Try again in a few seconds.")
        if not name:
            bases = [item for item in models.values() if item.parent is None]
            if len(bases) == 1:
                return bases[0]
        raise UnknownModel(name, sorted(models))

    def windows(self, model: str) -> Mapping[str, int]:
        """Usable window in tokens by name of every backend that serves ``model``, down or not."""
        return {name: item.windows[model] for name, item in self._backends.items() if model in item.windows}

    def backend(self, name: str) -> Backend:
        """How to reach a backend. Raises ``KeyError`` for a name that is not configured."""
        item = self._backends[name]
        known = item.settings
        age_s = item.age_s(_now())
        return Backend(item.name, item.url, known.api_key, item.version, age_s, known.priority_scheduling)

    def reserve(
        self,
        name: str,
        need: Need,
        budget_tokens: int | None,
        cached_tokens: int = 0,
        timed: bool = False,
        chain: tuple[tuple[int, int], ...] = (),
    ) -> Reservation:
        """Enter a request into a backend's ledger; the caller releases it whatever happens. ``timed``: it is a stream,
        whose chunks tell how fast the backend is. ``chain``: beginnings of its prompt, which others may share."""
        return self._backends[name].reserve(need, budget_tokens, cached_tokens, timed, chain)

    def note_failure(self, name: str, placed_s: float | None = None) -> None:
        """A request, placed at ``placed_s``, failed for the backend's sake: no connection, hung up, or a 5xx."""
        self._backends[name].note_failure(placed_s)

    def note_success(self, name: str) -> None:
        """The backend answered a request."""
        self._backends[name].note_success()

    def drain(self, name: str) -> None:
        """Place nothing more on a backend; what runs there runs on. Raises ``KeyError``."""
        self._backends[name].drain(True)

    def undrain(self, name: str) -> None:
        """Place requests on a backend again. Raises ``KeyError``."""
        self._backends[name].drain(False)

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

    def _changed(self) -> None:
        self._on_change()

    def _load(self, name: str) -> None:
        """Placing would see another load of that backend now."""
        self._loaded.add(name)

    def _touch(self, name: str, resting: bool) -> None:
        """Placing would see something else of that backend now; ``resting``: it will again as time passes."""
        self._touched.add(name)
        if resting:
            self._resting.add(name)
        else:
            self._resting.discard(name)

    def _current_models(self) -> dict[str, Model]:
        """The models, put together anew when a backend's windows were."""
        state = tuple(backend.windows for backend in self._backends.values())
        if self._models_of is None or any(new is not old for new, old in zip(state, self._models_of, strict=True)):
            self._models_of = state
            self._models = self._gather()
        return self._models

    def _gather(self) -> dict[str, Model]:
        models: dict[str, Model] = {}
        for name, backend in self._backends.items():
            for card in backend.cards:
                window = backend.windows.get(card.id)
                if window is None or card.window_tokens is None:
                    continue
                known = models.get(card.id)
                if known is None:
                    models[card.id] = Model(card.id, card.root, card.parent, window, card.window_tokens, (name,))
                else:
                    models[card.id] = Model(
                        known.id,
                        known.root or card.root,
                        known.parent or card.parent,
                        max(known.window_tokens, window),
                        max(known.max_model_len_tokens, card.window_tokens),
                        (*known.backends, name),
                    )
        return models


def _now() -> float:
    return asyncio.get_running_loop().time()
