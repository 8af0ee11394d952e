"""A publisher of KV events for tests: vLLM's protocol, with messages that can be dropped, garbled or sent again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, ClassVar

import msgspec
import zmq

from gateway.block_keys import PromptBlocks, block_keys, id_bytes, root_key
from gateway.fleet.kvevents.sources import Source
from gateway.fleet.kvevents.subscriber import Subscriber
from gateway.fleet.kvevents.wire import decoder
from gateway.routing.blocks import BlockIndex
from gateway.routing.feeds import Knowledge

SIZE = 4
END = (-1).to_bytes(8, "big", signed=True)


def stored(number: int) -> dict[str, Any]:
    """A block that begins a prompt: four times ``number``."""
    return {
        "type": "BlockStored",
        "block_hashes": [number.to_bytes(32, "big")],
        "parent_block_hash": None,
        "token_ids": [number] * SIZE,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(number: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [number.to_bytes(32, "big")], "medium": "GPU"}


class Publisher:
    """Binds free ports; ``restart`` begins anew at the same ones, as another process would.

    ``subscriptions`` have arrived: whoever made them hears what is sent from then on.
    """

    at: ClassVar[dict[str, Publisher]] = {}

    def __init__(self, replays: bool = True, keep: int = 10_000) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.keep = keep
        self.mute = False  # answers no replays
        self.skip: set[int] = set()  # numbers dropped from the next replay
        self.asked: list[int] = []
        self.number = 0
        self.buffer: list[tuple[int, bytes]] = []
        self.subscriptions = 0
        self.pub = self.context.socket(zmq.XPUB)  # a PUB socket that tells of subscriptions
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.pub.bind("tcp://127.0.0.1:0")
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:0")
        replay = self._address(self.router) if replays else None
        self.source = Source(0, self._address(self.pub), replay)
        self.at[self.source.endpoint] = self
        self._task = asyncio.create_task(self._serve())

    def send(self, *events: Any, heard: bool = True, payload: bytes | None = None, sent_s: float | None = None) -> int:
        """A message; ``heard``: it is published, not only kept."""
        number = self.number
        if payload is None:
            payload = msgspec.msgpack.encode([time.time() if sent_s is None else sent_s, list(events), 0])
        if heard:
            self.raw([b"", number.to_bytes(8, "big"), payload])
        self.buffer = [*self.buffer, (number, payload)][-self.keep :]
        self.number += 1
        return number

    def raw(self, frames: Iterable[bytes]) -> None:
        self.pub.send_multipart(list(frames))

    def restart(self) -> None:
        self.number, self.buffer = 0, []

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            with contextlib.suppress(zmq.ZMQError):
                self.subscriptions += self.pub.recv(zmq.NOBLOCK).startswith(b"\x01")
            with contextlib.suppress(zmq.Again):
                client, _, start = self.router.recv_multipart(zmq.NOBLOCK)
                first = int.from_bytes(start, "big")
                self.asked.append(first)
                if self.mute:
                    continue
                skip, self.skip = self.skip, set()
                for number, payload in self.buffer:
                    if number >= first and number not in skip:
                        self.router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
                self.router.send_multipart((client, b"", b"", END, b""))

    @staticmethod
    def _address(socket: zmq.Socket[bytes]) -> str:
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()


class Listener:
    """A subscriber and the index it feeds."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: Source) -> None:
        self.index = BlockIndex()
        self.index.room("b", 1)
        self.feed = self.index.feed("b")
        self.subscriber = Subscriber(context, source, self.feed, decoder())

    @property
    def tally(self) -> Any:
        return self.subscriber.tally

    def has(self, *numbers: int) -> bool:
        """Whether exactly these blocks are there, of the first hundred."""
        found = set()
        for number in range(100):
            ids = [number] * SIZE + [0]
            keys = block_keys(id_bytes(ids), SIZE, root_key())
            if self.index.match(PromptBlocks(len(ids), {SIZE: keys}), 1)[0]:
                found.add(number)
        return found == set(numbers)

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            for _ in range(10_000):
                if happened():
                    return
                await asyncio.sleep(0.005)
        raise TimeoutError


@contextlib.asynccontextmanager
async def publishing(replays: bool = True, keep: int = 10_000) -> AsyncIterator[Publisher]:
    publisher = Publisher(replays, keep)
    try:
        yield publisher
    finally:
        await publisher.close()


@contextlib.asynccontextmanager
async def listening(source: Source, connected: bool = True) -> AsyncIterator[Listener]:
    """To what ``source`` publishes; ``connected``: once it does, and what was kept is known."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = Listener(context, source)
    publisher = Publisher.at[source.endpoint]
    before = publisher.subscriptions
    task = asyncio.create_task(listener.subscriber.run())
    try:
        if connected:
            await listener.until(lambda: listener.subscriber.connected and publisher.subscriptions > before)
            if source.replay_endpoint is not None:
                await listener.until(lambda: listener.feed.knowledge is not Knowledge.NONE)
                await listener.until(lambda: listener.tally.replays > 1)  # one before the connection, one after it
                await asyncio.sleep(0.1)
        yield listener
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)
