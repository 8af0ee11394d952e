"""The client's side of an exchange: reading its body, answering it, and noticing that it left."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any, Self

from gateway.exceptions import BodyTooLarge, ClientGone

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that (lower-case) name, decoded; ``None`` if absent."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def request_id_of(scope: Scope) -> str:
    """The client's ``x-request-id`` if it is printable ASCII, cut to 128 characters; else a new one.

    Anything else would come back garbled: backends put it into their answers' ids.
    """
    given = (header(scope, b"x-request-id") or "")[:128]
    return given if given and given.isascii() and given.isprintable() else uuid.uuid4().hex


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The whole request body. Raises ``BodyTooLarge`` beyond ``limit_bytes`` and ``ClientGone`` if it breaks off."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if part:
            size += len(part)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class Client:
    """Answers one request. Within ``async with``, the running task is cancelled as soon as the client hangs up, and the
    cancellation leaves the block as ``ClientGone``.

    ``started`` tells whether the answer has begun: after that no other can be. ``opened``: a stream was opened before
    it, so that the answer has no status of its own; a whole one then becomes the end of that stream, which ``ending``
    makes of it where there may be one. ``writing`` is the number of messages that wait for the client to read.
    """

    __slots__ = (
        "_ended",
        "_gone",
        "_receive",
        "_send",
        "_task",
        "_watcher",
        "ending",
        "opened",
        "started",
        "writing",
    )

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._gone = False
        self._ended = False
        self.ending: Callable[[bytes], bytes] | None = None
        self.opened = False
        self.started = False
        self.writing = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watcher is not None
        assert self._task is not None
        self._watcher.cancel()
        if self._gone:
            remaining = self._task.uncancel()
            if remaining == 0:  # else the server is shutting down, and its own cancellation goes on
                raise ClientGone from None

    @property
    def gone(self) -> bool:
        """Whether the client hung up, or was dropped."""
        return self._gone

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Send the status line and headers, if no stream was opened before."""
        self.started = True
        if not self.opened:
            await self._head(status, headers)

    async def open(self, headers: Iterable[tuple[str, str]]) -> None:
        """Open a stream of events before there is an answer."""
        self.opened = True
        await self._head(200, headers)

    def take_back(self) -> bool:
        """Of the answer that was started, a stream, nothing came but its status: let another be its events. Returns
        whether that can be."""
        if self.ending is None:
            return False
        self.opened, self.started = True, False
        return True

    async def _head(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        await self._write({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, data: bytes) -> None:
        """Send a part of the body; waits while the client reads too slowly."""
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last part of the body."""
        # Once the answer is complete the server reports a disconnect; it must not be taken for a hang-up.
        self._ended = True
        await self._write({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        """Send a whole answer."""
        if self.opened and self.ending is not None:
            self.started = True
            await self.end(self.ending(body))
            return
        await self.start(status, [*headers, ("content-length", str(len(body)))])
        await self.end(body)

    async def _write(self, message: Message) -> None:
        self.writing += 1
        try:
            await self._send(message)
        finally:
            self.writing -= 1

    def drop(self) -> None:
        """Treat the client as gone: it has not read for too long."""
        if self._task is not None and not self._gone:
            self._gone = True
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:
            self.drop()


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body is larger than {limit_bytes} bytes. Send less, or raise max_body_bytes of the gateway."
    )
