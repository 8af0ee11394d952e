"""An event loop whose time passes only where nothing else is to be done: hours in milliseconds, the same each time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.SelectSelector):
    """Instead of waiting for a timer it lets the clock jump there."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and for nothing that will ever come")
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """``now_s`` is its time in seconds."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a scenario to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(coroutine)
