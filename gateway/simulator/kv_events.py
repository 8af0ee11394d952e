"""KV events as vLLM publishes them: one PUB socket an engine, numbered messages, and a ROUTER that sends them again.

Follows vLLM's ``distributed/kv_events.py``. pyzmq and msgspec are needed (``kvgate[kv-events]``).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Any

from gateway.simulator.blocks import BlockCleared, BlockPool, BlockRemoved, BlockStored

FLAG = "--kv-events-config"
KINDS = {bool: "boolean", int: "number", str: "text"}
END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """vLLM's ``--kv-events-config``, with its names and defaults. A tcp port of 0 is chosen by the system."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig:
        """From JSON. Raises ``ValueError``, which names the flag."""
        known = {field.name: type(field.default) for field in fields(cls)}
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{FLAG} is not JSON: {error}") from None
        if not isinstance(document, dict) or document.keys() - known.keys():
            raise ValueError(f"{FLAG} takes a JSON object with some of {', '.join(sorted(known))}")
        for name, value in document.items():
            expected = known[name] if known[name] is not NoneType else str
            if type(value) is not expected and not (value is None and known[name] is NoneType):
                raise ValueError(f"{FLAG}: {name} must be a {KINDS[expected]}, not {json.dumps(value)}")
        if document.get("publisher") not in (None, "null", "zmq"):
            raise ValueError(f"{FLAG}: publisher must be null or zmq, not {document['publisher']}")
        return cls(**document)

    @property
    def publishes(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


class Publisher:
    """Publishes what one engine's pool journals. ``start`` it in a running loop; ``stop`` it.

    ``lora_names`` are adapters by their number. ``since`` asks what the imitated vLLM is. Raises ``ValueError`` if an
    address cannot be had.
    """

    def __init__(self, config: KvEventsConfig, rank: int, since: Callable[..., bool], adapters: Sequence[str]) -> None:
        import msgspec
        import zmq

        self._zmq = zmq
        self._encode = msgspec.msgpack.encode
        self._rank = rank
        self._since = since
        self._adapters = list(adapters)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._router = self._context.socket(zmq.ROUTER)
        self._topic = config.topic.encode()
        replay = config.replay_endpoint
        self.config = replace(
            config,
            publisher="zmq",
            endpoint=self._bind(self._pub, config.endpoint),
            replay_endpoint=None if replay is None else self._bind(self._router, replay),
        )
        self._fd: int | None = None

    @property
    def published(self) -> int:
        """Messages so far."""
        return self._number

    def start(self) -> None:
        """Answer those who want messages again."""
        fd = self._router.getsockopt(self._zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._replay)

    def stop(self) -> None:
        """Close the sockets."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._fd = None
        self._context.destroy(linger=0)

    def publish(self, pool: BlockPool, block_size_tokens: int) -> None:
        """Send what the pool has journalled in a step, if anything."""
        self._replay()
        journal, pool.journal = pool.journal, []
        if not journal:
            return
        events = [self._event(item, block_size_tokens) for item in journal]
        payload = self._encode([time.time(), events, self._rank])
        self._pub.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._buffer.append((self._number, payload))
        self._number += 1

    def _event(self, item: BlockStored | BlockRemoved | BlockCleared, size: int) -> Any:
        """As an array up to 0.23, as a map from 0.24 on; older ones have fewer fields."""
        since = self._since
        name = "AllBlocksCleared"
        values: dict[str, Any] = {}
        if isinstance(item, BlockRemoved):
            name = "BlockRemoved"
            values["block_hashes"] = [_hash(item.value)]
            if since(0, 10, 2):
                values["medium"] = "GPU"
            if since(0, 20):
                values["group_idx"] = 0
        elif isinstance(item, BlockStored):
            name, values = "BlockStored", self._stored(item, size)
        if since(0, 24):
            return {"type": name} | {key: value for key, value in values.items() if value is not None or key in _KEPT}
        return [name, *values.values()]

    def _stored(self, item: BlockStored, size: int) -> dict[str, Any]:
        since = self._since
        salt, adapter = item.cache_key if isinstance(item.cache_key, tuple) else (None, None)
        values: dict[str, Any] = {
            "block_hashes": [_hash(value) for value in item.values],
            "parent_block_hash": None if item.parent is None else _hash(item.parent),
            "token_ids": list(item.tokens),
            "block_size": size,
            "lora_id": None if adapter is None else self._adapters.index(adapter) + 1,
        }
        if since(0, 10, 2):
            values["medium"] = "GPU"
        if since(0, 14):
            values["lora_name"] = adapter
        if since(0, 20):
            each: list[Any] = [] if adapter is None else [adapter]
            first = [*each, salt] if salt is not None and item.parent is None else each
            values["extra_keys"] = [first or None, *([each or None] * (len(item.values) - 1))]
            values["group_idx"] = 0
        if since(0, 22):
            values["kv_cache_spec_kind"] = "full_attention"
        return values

    def _replay(self) -> None:
        """Send messages again, all from the number asked for, to whoever asked."""
        zmq = self._zmq
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3:
                continue
            client, _, start = frames
            topic = (self._topic,) if self._since(0, 23) else ()
            for number, payload in self._buffer:
                if number >= int.from_bytes(start, "big"):
                    self._router.send_multipart((client, b"", *topic, number.to_bytes(8, "big"), payload))
            end = (b"", END, b"") if topic else (END, b"")
            self._router.send_multipart((client, b"", *end))

    def _bind(self, socket: Any, endpoint: str) -> str:
        """Bind the engine's address, which is one rank further on. Returns it with the port that was chosen."""
        stem, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp:") and port.isdecimal():
            endpoint = f"{stem.replace('*', '127.0.0.1')}:{int(port) + self._rank if int(port) else 0}"
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"{FLAG}: cannot publish at {endpoint}: {error.strerror}") from None
        bound: bytes = socket.getsockopt(self._zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode()


# Of these a map always has something; others are left out where they are the default.
_KEPT = frozenset({"parent_block_hash", "lora_id", "medium", "lora_name"})


def _hash(value: int) -> bytes:
    """Hashes are 32 bytes with vLLM's default algorithm."""
    return (value & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "big").rjust(32, b"\xa5")


def sources(publishers: Sequence[Publisher]) -> Mapping[str, Any]:
    """The answer of ``/kv_event_sources``."""
    return {str(rank): asdict(publisher.config) for rank, publisher in enumerate(publishers)}
