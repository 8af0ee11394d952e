"""Which models the backends serve, and which of them a name means."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.exceptions import NoBackend, UnknownModel
from gateway.types import Condition

if TYPE_CHECKING:
    from gateway.fleet.backend import WatchedBackend


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


class Models:
    """The models of ``backends``, put together anew when a backend's windows were."""

    def __init__(self, backends: Collection[WatchedBackend]) -> None:
        self._backends = backends
        self._models: dict[str, Model] = {}
        self._models_of: tuple[Mapping[str, int], ...] | None = None

    def __repr__(self) -> str:
        return f"<Models {', '.join(sorted(self.current()))}>"

    def resolve(self, name: str) -> Model:
        """The model of that name; an empty name means the only base model, if there is one (vLLM takes it so, too).

        Raises ``UnknownModel``, or ``NoBackend`` while no backend has ever said what it serves, or one that may be
        loading has not.
        """
        models = self.current()
        model = models.get(name)
        if model is not None:
            return model
        silent = [backend for backend in self._backends if not backend.windows]
        if not models:
            raise NoBackend(f"No backend has said yet what it serves: {_told(silent)}. Try again in a few seconds.")
        if not name:
            bases = [item for item in models.values() if item.parent is None]
            if len(bases) == 1:
                return bases[0]
        coming = [backend for backend in silent if backend.availability.condition(backend.now_s()) in _COMING]
        if coming:
            raise NoBackend(
                f"The model `{name}` is not among those served now ({', '.join(sorted(models))}). Not heard from yet: "
                f"{_told(coming)}. Try again in a few seconds.",
                10.0,
            )
        raise UnknownModel(name, sorted(models), _told(silent) if silent else "")

    def current(self) -> Mapping[str, Model]:
        """All of them by name."""
        state = tuple(backend.windows for backend in self._backends)
        if self._models_of is None or any(new is not old for new, old in zip(state, self._models_of, strict=True)):
            self._models_of = state
            self._models = self._gather()
        return self._models

    def _gather(self) -> dict[str, Model]:
        models: dict[str, Model] = {}
        for backend in self._backends:
            for card in backend.cards:
                window = backend.windows.get(card.id)
                if window is None or card.window_tokens is None:
                    continue
                known = models.get(card.id)
                if known is None:
                    models[card.id] = Model(
                        card.id, card.root, card.parent, window, card.window_tokens, (backend.name,)
                    )
                else:
                    models[card.id] = Model(
                        known.id,
                        known.root or card.root,
                        known.parent or card.parent,
                        max(known.window_tokens, window),
                        max(known.max_model_len_tokens, card.window_tokens),
                        (*known.backends, backend.name),
                    )
        return models


# How those stand that may yet say what they serve.
_COMING = frozenset({Condition.UNKNOWN, Condition.STARTING})
_MOST_NAMED = 4


def _told(silent: Sequence[WatchedBackend]) -> str:
    """Backends of which no model is known, and why."""
    told = [f"{backend.name} ({_why(backend)})" for backend in silent[:_MOST_NAMED]]
    rest = len(silent) - len(told)
    return ", ".join([*told, f"{rest} more"] if rest else told)


def _why(backend: WatchedBackend) -> str:
    if backend.looker.error is not None:
        return backend.looker.error
    if backend.cards:
        return "its /v1/models states no max_model_len"
    return "not looked at yet"
