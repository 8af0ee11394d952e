"""Keeps the client of a stream while its request waits in the queue: opens the stream, then sends signs of life.

Once a stream is open no status can be sent any more, so it is opened late, and only where nothing but the wait stands
between the request and its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from gateway.relay.client import Client
from gateway.relay.exchange import KEEPALIVE

# LangChain and Codex time events, not bytes: 120 and 300 s. So each fourth sign of life is an event.
EVENT_EACH = 4


class WaitingRoom:
    """Within ``async with``, a client that waits longer than ``after_s`` gets ``headers`` and a comment, and another
    each ``every_s``, each fourth time with ``event``; until the answer itself has begun. ``ending`` makes the body of
    an error the end of the stream; ``None`` where the answer is none. ``queued``: it waits now. A stream is opened then
    only, for the answer of a backend may still have a status of its own.
    """

    __slots__ = (
        "_client",
        "_event",
        "_every_s",
        "_handle",
        "_headers",
        "_loop",
        "_sending",
        "_signs",
        "queued",
    )

    def __init__(
        self,
        client: Client,
        after_s: float | None,
        every_s: float,
        headers: Sequence[tuple[str, str]],
        event: Callable[[], bytes],
        ending: Callable[[bytes], bytes] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = client
        client.ending = ending
        self._every_s = every_s
        self._headers = headers
        self._event = event
        self._signs = 0
        self.queued = True
        self._sending: asyncio.Task[None] | None = None
        self._handle = None if after_s is None else self._loop.call_later(after_s, self._tick)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _tick(self) -> None:
        client = self._client
        self._handle = None
        if client.started:
            return
        if (self.queued or client.opened) and not client.writing and (self._sending is None or self._sending.done()):
            self._sending = self._loop.create_task(self._sign())
        self._handle = self._loop.call_later(self._every_s, self._tick)

    def resume(self) -> None:
        """The answer that had begun was none after all."""
        if self._client.opened:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(self._every_s, self._tick)

    async def _sign(self) -> None:
        """Send a sign of life, on an open stream."""
        if not self._client.opened:
            await self._client.open(self._headers)
        self._signs += 1
        data = KEEPALIVE if self._signs % EVENT_EACH else KEEPALIVE + self._event()
        if not self._client.started:
            await self._client.body(data)
