"""A backend that answers like vLLM and costs almost nothing: what is measured in front of it is the proxy.

One raw asyncio protocol, no framework, fixed bytes. A chat request says in its ``user`` field what it wants back:
``kvbench;tokens=61234;chunks=200;stream=1;hold=0``, where tokens is the ``usage.prompt_tokens`` to report, chunks the
number of events of a stream, and hold=1 a stream that stands still after its first event. Streams advance together,
one event each every step, like the sequences of an engine's batch: events arrive apart and cannot be merged on the way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import Any, cast

MODEL = "canned"
WINDOW_TOKENS = 131072
VERSION = "0.32.0"
BLOCK_SIZE_TOKENS = 16
BLOCKS = 4_000_000
MARK = b"kvbench;"
_USAGE_ASKED = re.compile(rb'"include_usage":\s*true')

_EVENT_HEAD = b'data: {"id":"chatcmpl-canned","object":"chat.completion.chunk","created":1767225600,"model":"canned",'
FIRST_EVENT = (
    _EVENT_HEAD + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
EVENT = (
    _EVENT_HEAD + b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,'
    b'"token_ids":null}]}\n\n'
)
LAST_EVENT = (
    _EVENT_HEAD + b'"choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop",'
    b'"stop_reason":null,"token_ids":null}]}\n\n'
)
DONE_EVENT = b"data: [DONE]\n\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    """``data`` as one chunk of HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole_event_count(chunks: int) -> int:
    """Events a client that did not ask for usage sees of a stream of ``chunks``: they and ``[DONE]``."""
    return chunks + 1


_FIRST, _NEXT, _LAST, _DONE = (chunked(event) for event in (FIRST_EVENT, EVENT, LAST_EVENT, DONE_EVENT))


def wish(body: bytes) -> dict[str, int]:
    """What the ``user`` field of a request asks for; empty without the mark."""
    start = body.rfind(MARK)
    if start < 0:
        return {}
    text = body[start + len(MARK) : body.index(b'"', start)].decode("ascii")
    return {key: int(value) for key, value in (item.split("=") for item in text.split(";"))}


class Engine:
    """The streams that are open, advanced together every ``step_s`` seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: dict[Connection, int] = {}
        self._usage: dict[Connection, bytes] = {}
        self._held: set[Connection] = set()
        self._due_s = 0.0
        self._ticking = False

    @property
    def running(self) -> int:
        """Streams that are open."""
        return len(self._streams) + len(self._held)

    def start(self, connection: Connection, chunks: int, usage: bytes, hold: bool) -> None:
        """Begin a stream of ``chunks`` events and the ``usage`` event, if any; ``hold``: only the first event."""
        connection.write(_STREAM_HEAD + _FIRST)
        if hold:
            self._held.add(connection)
            return
        self._streams[connection] = chunks - 1
        self._usage[connection] = usage
        if not self._ticking:
            self._ticking = True
            self._due_s = asyncio.get_running_loop().time() + self._step_s
            asyncio.get_running_loop().call_at(self._due_s, self._step)

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""
        self._streams.pop(connection, None)
        self._usage.pop(connection, None)
        self._held.discard(connection)

    def _step(self) -> None:
        for connection, left in list(self._streams.items()):
            if left > 1:
                connection.write(_NEXT)
                self._streams[connection] = left - 1
            else:
                usage = self._usage.pop(connection)
                del self._streams[connection]
                connection.write(_LAST + usage + _DONE + _END)
                connection.answered()
        if not self._streams:
            self._ticking = False
            return
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s + self._step_s, loop.time())
        loop.call_at(self._due_s, self._step)


class Connection(asyncio.Protocol):
    """One client connection: HTTP/1.1 requests with a content-length, one after the other."""

    def __init__(self, server: CannedBackend) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._need_bytes = 0
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.engine.forget(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def write(self, data: bytes) -> None:
        """Send, if the client is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def answered(self) -> None:
        """The answer is complete: take the next request."""
        self._busy = False
        self._next()

    def _next(self) -> None:
        buffer = self._buffer
        if self._busy or len(buffer) < self._need_bytes:
            return
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(buffer[:end])
        lowered = head.lower()
        at = lowered.find(b"\r\ncontent-length:")
        length = int(lowered[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        self._need_bytes = end + 4 + length
        if len(buffer) < self._need_bytes:
            if b"\r\nexpect: 100-continue" in lowered:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        body = bytes(buffer[end + 4 : self._need_bytes])
        del buffer[: self._need_bytes]
        self._need_bytes = 0
        self._busy = True
        method, target, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if b"\r\ntransfer-encoding:" in lowered:
            self.answer(411, b'{"error":{"message":"length required"}}')
        else:
            self._server.serve(self, method, target.split(b"?", 1)[0], body)

    def answer(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send a whole answer."""
        head = b"HTTP/1.1 %d %b\r\nserver: uvicorn\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self.write(head % (status, b"OK" if status == 200 else b"Error", content_type, len(body)) + body)
        self.answered()


class CannedBackend:
    """Routes. ``root`` is the folder in the model card.

    There is no ``/tokenize``: a count that is not the tokenizer's own would rightly cost a local counter its trust.
    """

    def __init__(self, root: str, step_s: float) -> None:
        self.engine = Engine(step_s)
        card: dict[str, Any] = {
            "id": MODEL,
            "object": "model",
            "created": 1767225600,
            "owned_by": "vllm",
            "root": root,
            "parent": None,
            "max_model_len": WINDOW_TOKENS,
        }
        self._models = json.dumps({"object": "list", "data": [card]}).encode()
        self._routes: dict[tuple[bytes, bytes], Callable[[Connection, bytes], None]] = {
            (b"GET", b"/v1/models"): lambda connection, _: connection.answer(200, self._models),
            (b"GET", b"/version"): lambda connection, _: connection.answer(200, b'{"version":"%b"}' % VERSION.encode()),
            (b"GET", b"/health"): lambda connection, _: connection.answer(200, b""),
            (b"GET", b"/metrics"): lambda connection, _: connection.answer(200, self._metrics(), b"text/plain"),
            (b"POST", b"/v1/chat/completions"): self._chat,
        }

    def serve(self, connection: Connection, method: bytes, path: bytes, body: bytes) -> None:
        """Answer one request."""
        route = self._routes.get((method, path))
        if route is None:
            connection.answer(404, b'{"detail":"Not Found"}')
        else:
            route(connection, body)

    def _chat(self, connection: Connection, body: bytes) -> None:
        wanted = wish(body)
        tokens, chunks = wanted.get("tokens", 1), wanted.get("chunks", 1)
        usage = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null}'
        usage %= (tokens, tokens + chunks, chunks)
        if wanted.get("stream"):
            event = b""
            if _USAGE_ASKED.search(body):
                event = chunked(_EVENT_HEAD + b'"choices":[],"usage":' + usage + b"}\n\n")
            self.engine.start(connection, chunks, event, bool(wanted.get("hold")))
            return
        connection.answer(
            200,
            b'{"id":"chatcmpl-canned","object":"chat.completion","created":1767225600,"model":"canned","choices":[{'
            b'"index":0,"message":{"role":"assistant","content":"' + b" token" * 64 + b'","refusal":null,'
            b'"annotations":null,"audio":null,"function_call":null,"tool_calls":[],"reasoning":null},"logprobs":null,'
            b'"finish_reason":"stop","stop_reason":null,"token_ids":null}],"service_tier":null,'
            b'"system_fingerprint":null,"usage":' + usage + b',"prompt_logprobs":null,"kv_transfer_params":null}',
        )

    def _metrics(self) -> bytes:
        labels = f'engine="0",model_name="{MODEL}"'
        return (
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE_TOKENS}",engine="0",num_gpu_blocks="{BLOCKS}"}} 1.0\n'
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.0\n"
            f"vllm:num_requests_running{{{labels}}} {float(self.engine.running)}\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
        ).encode()


async def serve(root: str, port: int, step_s: float) -> None:
    """Listen on 127.0.0.1 until cancelled; prints ``listening PORT`` when it does."""
    backend = CannedBackend(root, step_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(backend), "127.0.0.1", port, backlog=2048)
    print(f"listening {server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", required=True, help="folder of the tokenizer, for the model card")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=5.0, help="between two events of a stream")
    options = parser.parse_args()
    import uvloop

    try:
        uvloop.run(serve(options.root, options.port, options.step_ms / 1000))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
