"""ZeroMQ sockets in an event loop: what arrived is taken at once, or waited for.

pyzmq has asyncio sockets of its own; at the rate of an engine's steps they cost several times what is done with a
message, since each becomes futures and callbacks. Here a turn of the loop takes all that has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from collections.abc import Mapping

RawSocket = zmq.Socket[bytes]
Context = zmq.Context[RawSocket]


class Inbox:
    """A socket that is read in the running loop. ``options`` are set before it is used; ``close`` it."""

    def __init__(self, socket: RawSocket, wake: asyncio.Event | None = None) -> None:
        """``wake`` is set whenever something may have arrived; several inboxes may share one."""
        self.socket = socket
        self.wake = wake or asyncio.Event()
        self._loop = asyncio.get_running_loop()
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        self._loop.add_reader(fd, self._stirred)

    @classmethod
    def of(cls, context: Context, kind: int, options: Mapping[int, int], wake: asyncio.Event | None = None) -> Inbox:
        """A new socket of that kind. What is unsent when it is closed is dropped."""
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        for option, value in options.items():
            socket.setsockopt(option, value)
        return cls(socket, wake)

    def take(self) -> list[bytes] | None:
        """The parts of the next message; ``None`` if there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def wait(self, timeout_s: float) -> bool:
        """Until something may have arrived since ``wake`` was cleared. Returns whether, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wake.wait()
        return self.wake.is_set()

    def close(self) -> None:
        """Doing so again changes nothing."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(0)

    def _stirred(self) -> None:
        if not self.socket.closed:
            self.socket.getsockopt(zmq.EVENTS)  # puts the descriptor at rest until something new happens
            self.wake.set()
