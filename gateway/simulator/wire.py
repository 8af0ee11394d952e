"""HTTP in and out: bodies read as FastAPI would, answers raced against the client's disconnect, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.simulator.errors import ApiError, schema_error
from gateway.simulator.options import Version

T = TypeVar("T")
TRANSPORT = "kvgate.transport"


class ClientGone(Exception):
    """The client closed the connection; nothing can be delivered."""


async def read_json(request: Request, version: Version) -> dict[str, Any]:
    """The body as an object. Raises ``ApiError`` in vLLM's words for a wrong content type, bad JSON or no object."""
    kind = request.headers.get("content-type", "").lower().split(";", 1)[0].strip()
    if kind != "application/json":
        detail = "Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(
            f"1 validation error:\n  {detail}" if version.since(0, 9) else f"[{detail!r}]", kind="Bad Request"
        )
    body = await request.body()
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise schema_error(version, "json_invalid", ("body", error.pos), "JSON decode error", {}) from error
    if not isinstance(document, dict):
        text = "Input should be a valid dictionary"
        raise schema_error(version, "dict_type", ("body",), text, document)
    return document


def json_response(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON as vLLM sends it."""
    return Response(orjson.dumps(document), status, headers, "application/json")


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """``work``, cancelled when the client disconnects (then ``ClientGone``). The body must have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for other in (task, watcher):
            other.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """A stream of server-sent events; ``events`` yields whole ``data: …`` blocks and is closed when the client goes.

    ``die_after`` cuts the connection after so many chunks and ``stall_after`` hangs there (faults).
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, die_after: int | None = None, stall_after: int | None = None
    ) -> None:
        super().__init__(headers={"content-type": "text/event-stream; charset=utf-8"})
        del self.headers["content-length"]
        self._events = events
        self._die_after = die_after
        self._stall_after = stall_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((pump, watcher), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            for task in (pump, watcher):
                task.cancel()
            await asyncio.gather(pump, watcher, return_exceptions=True)

    async def _pump(self, scope: Scope, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sent = 0
            if not await self._survives(scope, sent):
                return
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                sent += 1
                if not await self._survives(scope, sent):
                    return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _survives(self, scope: Scope, sent: int) -> bool:
        if sent == self._stall_after:
            await asyncio.Event().wait()
        if sent == self._die_after:
            await asyncio.sleep(0.01)  # let what was sent reach the wire
            cut(scope)
            return False
        return True


def cut(scope: Scope) -> None:
    """Drop the connection under a request, with no proper end."""
    transport = scope.get(TRANSPORT)
    if transport is not None:
        transport.abort()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
