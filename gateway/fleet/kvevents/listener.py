"""All backends' KV events: who publishes any, a subscriber for each engine that does, and what came of it.

pyzmq and msgspec read them, which ``kvgate[kv-events]`` installs. Without them, and for backends that publish nothing,
prefixes are guessed from what was placed where.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx2

from gateway.config import BackendSettings
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.kvevents.sources import Source, configured, told
from gateway.routing.feeds import Feed, Knowledge
from gateway.types import Health

if TYPE_CHECKING:
    from gateway.fleet.kvevents.inbox import Context
    from gateway.fleet.kvevents.subscriber import Subscriber, Tally
    from gateway.fleet.kvevents.wire import Batch

log = logging.getLogger("kvgate.fleet.kvevents")

LOOK_S = 0.5
# A server that publishes nothing is asked again when it comes back, and after so long.
ASK_S = 60.0
ASK_TIMEOUT_S = 5.0
MOST_ANSWER_BYTES = 1 << 20
# Keys of emptied feeds taken off in one turn of the loop.
SWEEP_KEYS = 2000


class Sized(Protocol):
    """The engines of a backend."""

    @property
    def capacity(self) -> KvCapacity | None:
        """What they hold, if known."""

    def __len__(self) -> int: ...


class Watched(Protocol):
    """What is needed of a backend."""

    settings: BackendSettings
    name: str
    url: str
    restarts: int

    @property
    def engines(self) -> Sized:
        """Its engines."""

    def health(self, now_s: float) -> Health:
        """Whether it is up."""


class Feeds(Protocol):
    """Where events go."""

    def feed(self, backend: str, rank: int = 0) -> Feed:
        """The feed of an engine."""

    def sweep(self, most_keys: int) -> bool:
        """Tidy up a bit. Returns whether there is more to do."""


@dataclass(frozen=True, slots=True)
class KvEventsRecord:
    """What is known of one engine's KV events, for metrics and people. ``lag_s`` is how old the newest message was when
    it was heard, by both machines' clocks; ``age_s`` how long ago that was; both ``None`` before."""

    backend: str
    rank: int
    endpoint: str
    replay_endpoint: str | None
    connected: bool
    knowledge: Knowledge
    blocks: int
    block_size_tokens: int
    messages: int
    events: int
    ignored_events: int
    odd_events: int
    garbled_messages: int
    orphaned_blocks: int
    gaps: int
    replays: int
    lost: int
    restarts: int
    overflows: int
    lag_s: float | None
    age_s: float | None


@dataclass(slots=True)
class _Heard:
    """A backend: its sources when it was asked last, and who listens to them."""

    restarts: int = -1
    ask_at_s: float = 0.0
    sources: tuple[Source, ...] = ()
    subscribers: dict[Source, tuple[Subscriber, asyncio.Task[None]]] | None = None


class KvEvents:
    """Listens to every backend that publishes. ``start`` it in the loop in which ``feeds`` are read; ``stop`` it."""

    def __init__(self, backends: Iterable[Watched], feeds: Feeds) -> None:
        self._backends = [each for each in backends if each.settings.kv_events.enabled]
        self._feeds = feeds
        self._heard = {each.name: _Heard() for each in self._backends}
        self._tallies: dict[tuple[str, int], Tally] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._context: Context | None = None
        self._read: Callable[[bytes], Batch] | None = None
        self._missing = False
        self._client: httpx2.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"<KvEvents {sum(len(heard.subscribers or ()) for heard in self._heard.values())} engines>"

    def start(self) -> None:
        """Begin to look for publishers."""
        if self._backends and not self._tasks:
            self._tasks = [asyncio.create_task(self._tidy(), name="kv events")]
            for each in self._backends:
                self._tasks.append(asyncio.create_task(self._watch(each), name=f"kv events of {each.name}"))

    async def stop(self) -> None:
        """Listen to nobody any more."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for heard in self._heard.values():
            await self._part(heard, ())
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def records(self) -> list[KvEventsRecord]:
        """All engines that are listened to."""
        now_s = time.monotonic()
        return [
            _record(subscriber, now_s)
            for heard in self._heard.values()
            for subscriber, _ in (heard.subscribers or {}).values()
        ]

    async def _watch(self, backend: Watched) -> None:
        """Look after a backend, again and again."""
        while True:
            try:
                await self._look_after(backend, self._heard[backend.name])
            except Exception:
                log.exception("looking for KV events of backend %s failed; trying again", backend.name)
            await asyncio.sleep(LOOK_S)

    async def _tidy(self) -> None:
        """Clean up after feeds that were emptied, without holding up the loop."""
        while True:
            more = self._feeds.sweep(SWEEP_KEYS)
            await asyncio.sleep(0 if more else LOOK_S)

    async def _look_after(self, backend: Watched, heard: _Heard) -> None:
        """Listen to where it publishes now."""
        loop_s = asyncio.get_running_loop().time()
        engines = len(backend.engines)
        if backend.health(loop_s) is Health.UP:
            anew = heard.restarts != backend.restarts
            if backend.settings.kv_events.endpoint is not None:
                heard.sources = configured(backend.settings.kv_events, backend.url, engines)
            elif anew or loop_s >= heard.ask_at_s:
                sources = await self._asked(backend)
                heard.ask_at_s = loop_s + ASK_S
                if sources is not None:
                    heard.sources = sources
            heard.restarts = backend.restarts
        await self._part(heard, heard.sources)
        if heard.sources and self._is_able():
            self._join(backend, heard)
        capacity = backend.engines.capacity
        for subscriber, _ in (heard.subscribers or {}).values():
            known = capacity is not None and not capacity.virtual
            subscriber.feed.sized(capacity.engine_blocks if capacity is not None and known else None)

    async def _asked(self, backend: Watched) -> tuple[Source, ...] | None:
        """What the server says; nothing if it knows no such question (before 0.31); ``None`` if it does not answer."""
        if self._client is None:
            self._client = httpx2.AsyncClient(trust_env=False, timeout=ASK_TIMEOUT_S)
        key = backend.settings.api_key
        headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
        try:
            response = await self._client.get(f"{backend.url}/kv_event_sources", headers=headers)
            if response.status_code >= 500:
                return None
            body: Any = {}
            if response.status_code == 200 and len(response.content) <= MOST_ANSWER_BYTES:
                body = response.json()
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError):
            return None
        except (ValueError, RecursionError):
            return ()
        return told(body, backend.url)

    def _is_able(self) -> bool:
        """Whether what reads events is installed."""
        if self._context is None and not self._missing:
            try:
                import zmq

                from gateway.fleet.kvevents.wire import decoder

                self._read = decoder()
                self._context = zmq.Context()
            except ImportError as error:
                self._missing = True
                log.warning(
                    "backends publish KV events, which kvgate[kv-events] could read (%s): prefixes are guessed", error
                )
        return self._context is not None

    def _join(self, backend: Watched, heard: _Heard) -> None:
        """Listen to those sources nobody listens to yet."""
        from gateway.fleet.kvevents.subscriber import Subscriber, Tally

        assert self._context is not None and self._read is not None
        subscribers = heard.subscribers = heard.subscribers or {}
        for source in heard.sources:
            if source in subscribers and not subscribers[source][1].done():
                continue
            tally = self._tallies.setdefault((backend.name, source.rank), Tally())
            feed = self._feeds.feed(backend.name, source.rank)
            subscriber = Subscriber(self._context, source, feed, self._read, tally)
            task = asyncio.create_task(_go_on(subscriber), name=f"kv events {backend.name} {source.rank}")
            subscribers[source] = (subscriber, task)
            log.info("backend %s, engine %d: KV events from %s", backend.name, source.rank, source.endpoint)

    async def _part(self, heard: _Heard, sources: tuple[Source, ...]) -> None:
        """Listen no more to any but these."""
        subscribers = heard.subscribers or {}
        gone = [source for source in subscribers if source not in sources]
        tasks = [subscribers.pop(source)[1] for source in gone]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _go_on(subscriber: Subscriber) -> None:
    """Listen; what went wrong here is our fault, and is tried again."""
    while True:
        try:
            await subscriber.run()
        except Exception:
            log.exception("%r failed; listening anew", subscriber)
            await asyncio.sleep(LOOK_S)


def _record(subscriber: Subscriber, now_s: float) -> KvEventsRecord:
    feed, tally, source = subscriber.feed, subscriber.tally, subscriber.source
    return KvEventsRecord(
        backend=feed.backend,
        rank=source.rank,
        endpoint=source.endpoint,
        replay_endpoint=source.replay_endpoint,
        connected=subscriber.connected,
        knowledge=feed.knowledge,
        blocks=feed.blocks,
        block_size_tokens=feed.size_tokens,
        messages=tally.messages,
        events=tally.events,
        ignored_events=tally.ignored,
        odd_events=tally.odd + feed.odd,
        garbled_messages=tally.garbled,
        orphaned_blocks=feed.orphans,
        gaps=tally.gaps,
        replays=tally.replays,
        lost=tally.lost,
        restarts=tally.restarts,
        overflows=feed.overflows,
        lag_s=subscriber.lag_s,
        age_s=None if subscriber.heard_s is None else now_s - subscriber.heard_s,
    )


def summary(records: Iterable[KvEventsRecord]) -> dict[str, str]:
    """Of each backend how prefixes are known there: ``exact``, ``partial`` or ``none``, the least of its engines."""
    order = [Knowledge.NONE, Knowledge.PARTIAL, Knowledge.EXACT]
    least: dict[str, Knowledge] = {}
    for record in records:
        known = least.get(record.backend, Knowledge.EXACT)
        least[record.backend] = min(known, record.knowledge, key=order.index)
    return {backend: str(knowledge) for backend, knowledge in least.items()}
