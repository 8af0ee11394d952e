"""The server's life: it serves until it is told to stop, and then stops in an order that breaks nobody's answer.

1. At the first signal ``/ready`` answers 503 at once, so that load balancers turn away, and each answer closes its
   connection. For ``shutdown.notice_s`` all is served as before, new connections too: those who look at ``/ready``
   need a while to notice.
2. Then no new connections are taken, idle ones are closed, and who waits in the queue is told to go elsewhere: what
   has not begun would hardly end in time. What runs, runs on.
3. After ``shutdown.grace_s``, or at a second signal, what still runs is cut off: a stream ends with an error event.

A third signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from types import FrameType

import uvicorn

from gateway.app import App
from gateway.config import Settings

# What is cut off may still say so to its client. Who does not take it in this time has its connection reset.
LAST_WORDS_S = 3.0

log = logging.getLogger("kvgate.server")


class Server(uvicorn.Server):
    """uvicorn, stopped as described above."""

    def __init__(self, app: App, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,  # longer than the pools of clients and of proxies in front keep a connection
                backlog=2048,
            )
        )
        self._app = app
        self._shutdown = settings.shutdown
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurried = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop came. Being told to is no failure, so it is not raised again when all is closed."""
        if not self.should_exit:
            self.should_exit = self._app.stopping = True
        elif self._loop is not None and not self._hurried.is_set():
            self._loop.call_soon_threadsafe(self._hurried.set)
        else:
            self.force_exit = True

    async def main_loop(self) -> None:
        """Serve until told to stop and for the notice after that."""
        self._loop = asyncio.get_running_loop()
        await super().main_loop()
        log.info("stopping: not ready any more, %d requests under way", len(self.server_state.tasks))
        await self._unless_hurried(self._shutdown.notice_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing more, let what runs end, and close."""
        self._app.close_queue()
        cutting_off = asyncio.create_task(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cutting_off.cancel()

    async def _cut_off(self) -> None:
        """End by force what has not ended within its grace."""
        await self._unless_hurried(self._shutdown.grace_s)
        tasks = list(self.server_state.tasks)
        if tasks:
            log.warning("cutting off %d requests that are still under way", len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if isinstance(transport, asyncio.Transport):
                transport.abort()

    async def _unless_hurried(self, seconds: float) -> None:
        """Wait so long, or until a second signal comes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurried.wait()
