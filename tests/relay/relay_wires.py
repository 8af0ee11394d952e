"""Both ends of a relay in memory or on loopback: an ASGI client, and a server that answers with bytes as they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from gateway.relay.client import Client, Message

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """``data`` as one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    """A chat event with ``text``, as a chunk."""
    return chunk(b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode())


LAST = chunk(b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n')
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Wire:
    """The server's side of one ASGI exchange. ``hang_up`` is what the client does; ``sent`` is what it got."""

    def __init__(self, *messages: Message) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        for message in messages:
            self._messages.put_nowait(message)
        self.sent: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Message:
        return await self._messages.get()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message)

    def client(self) -> Client:
        return Client(self.receive, self.send)

    @property
    def status(self) -> int | None:
        return next((item["status"] for item in self.sent if item["type"] == "http.response.start"), None)

    @property
    def body(self) -> bytes:
        return b"".join(item.get("body", b"") for item in self.sent)

    @property
    def complete(self) -> bool:
        """Whether the answer was ended in form."""
        return bool(self.sent) and self.sent[-1].get("more_body") is False


class Server:
    """A loopback server. ``requests`` are the request heads and bodies it got; ``closed`` is set when a client left."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answer(reader, writer)
        writer.close()

    async def take(self, reader: asyncio.StreamReader) -> bytes:
        """The next request of a connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
        )
        request = head + await reader.readexactly(length)
        self.requests.append(request)
        return request

    async def wait_closed(self, reader: asyncio.StreamReader) -> None:
        """Wait until the other side closes, and say so."""
        while await reader.read(1024):
            pass
        self.closed.set()


@contextlib.asynccontextmanager
async def serving(make: Callable[[Server], Answer]) -> AsyncIterator[Server]:
    """A server on a free port whose connections are answered by what ``make`` returns."""
    server: Server

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await make(server)(reader, writer)

    server = Server(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()


def sends(*parts: bytes | float | asyncio.Event | Callable[[], object] | None) -> Callable[[Server], Answer]:
    """Answer each connection's first request with ``parts``: bytes are written, numbers are seconds to wait, events are
    waited for, functions called, ``None`` waits until the other side closes. Then close.
    """

    def make(server: Server) -> Answer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.take(reader)
            for part in parts:
                if part is None:
                    await server.wait_closed(reader)
                elif isinstance(part, asyncio.Event):
                    await part.wait()
                elif callable(part):
                    part()
                elif isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(part)

        return answer

    return make


def scope(**more: Any) -> dict[str, Any]:
    """A request's ASGI scope."""
    return {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], **more}
