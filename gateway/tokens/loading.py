"""Loads local tokenizers, each once, in threads of their own, while requests wait for a bounded time or go on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from gateway.tokens.errors import CannotLoad
from gateway.tokens.local import LocalCounter, TemplateOptions

Loader = Callable[[str, TemplateOptions], LocalCounter]

# From a folder a tokenizer loads in 2 to 4 s; a slow hub must not hold requests longer than this.
WAIT_S = 8.0
# A hub may come back; a folder may be mounted late.
RETRY_AFTER_S = 300.0


@dataclass(slots=True)
class _Load:
    started_s: float
    outcome: asyncio.Future[LocalCounter | CannotLoad]


class Loading:
    """Keeps one load for each tokenizer and set of template options, shared by all models that use them."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._loads: dict[tuple[str, TemplateOptions], _Load] = {}

    async def get(self, source: str, options: TemplateOptions, wait_s: float | None = WAIT_S) -> LocalCounter:
        """The counter for ``source``. Raises ``CannotLoad`` if there is none, or none ``wait_s`` after its start."""
        loop = asyncio.get_running_loop()
        load = self._loads.get((source, options))
        if load is None or (self._failed(load) and loop.time() - load.started_s > RETRY_AFTER_S):
            if load is not None and wait_s is not None:
                wait_s = 0.0  # a second try is made beside the requests, not before them
            load = _Load(loop.time(), loop.create_future())
            self._loads[source, options] = load
            # A daemon: a hub that never answers must not keep the process from ending.
            threading.Thread(
                target=self._run, args=(loop, load, source, options), name="load-tokenizer", daemon=True
            ).start()
        if not load.outcome.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if wait_s is None else load.started_s + wait_s):
                    await asyncio.shield(load.outcome)
        if not load.outcome.done():
            raise CannotLoad("its tokenizer is still loading")
        outcome = load.outcome.result()
        if isinstance(outcome, CannotLoad):
            raise CannotLoad(str(outcome))
        return outcome

    def ready(self, source: str, options: TemplateOptions) -> LocalCounter | CannotLoad | None:
        """What is known without waiting; ``None`` while nothing is."""
        load = self._loads.get((source, options))
        return load.outcome.result() if load is not None and load.outcome.done() else None

    def loaded(self) -> list[LocalCounter]:
        """Those that are ready."""
        outcomes = [load.outcome.result() for load in self._loads.values() if load.outcome.done()]
        return [outcome for outcome in outcomes if isinstance(outcome, LocalCounter)]

    @staticmethod
    def _failed(load: _Load) -> bool:
        return load.outcome.done() and isinstance(load.outcome.result(), CannotLoad)

    def _run(self, loop: asyncio.AbstractEventLoop, load: _Load, source: str, options: TemplateOptions) -> None:
        outcome: LocalCounter | CannotLoad
        try:
            outcome = self._loader(source, options)
        except CannotLoad as error:
            outcome = error
        except Exception as error:  # a broken tokenizer must not take the gateway down
            outcome = CannotLoad(f"loading {source} failed: {str(error) or type(error).__name__}")
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._settle, load, outcome)

    @staticmethod
    def _settle(load: _Load, outcome: LocalCounter | CannotLoad) -> None:
        if not load.outcome.done():
            load.outcome.set_result(outcome)
