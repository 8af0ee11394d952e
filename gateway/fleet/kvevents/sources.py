"""Where a server publishes its KV events, by engine: as it says itself, or as the settings do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gateway.config import KvEventSettings

MOST_RANKS = 1024
_ANY = ("*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class Source:
    """One engine's publisher: addresses to connect to, and what its topics begin with."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


def told(document: Any, url: str) -> tuple[Source, ...]:
    """What ``GET /kv_event_sources`` (vLLM 0.31) answers, of the server at ``url``. What makes no sense is left out."""
    sources: list[Source] = []
    for key, each in document.items() if isinstance(document, dict) else ():
        if not isinstance(each, Mapping) or not str(key).isdecimal() or int(key) >= MOST_RANKS:
            continue
        if each.get("enable_kv_cache_events") is False or each.get("publisher") not in (None, "zmq"):
            continue
        endpoint = reachable(each.get("endpoint"), url)
        topic = each.get("topic")
        if endpoint is not None:
            replay = reachable(each.get("replay_endpoint"), url)
            sources.append(Source(int(key), endpoint, replay, topic if isinstance(topic, str) else ""))
    return tuple(sorted(sources, key=lambda source: source.rank))


def configured(settings: KvEventSettings, url: str, ranks: int) -> tuple[Source, ...]:
    """What the settings say: each engine publishes at a port higher by its rank."""
    sources: list[Source] = []
    for rank in range(min(ranks, MOST_RANKS)):
        endpoint = reachable(_shifted(settings.endpoint, rank), url)
        if endpoint is not None:
            replay = reachable(_shifted(settings.replay_endpoint, rank), url)
            sources.append(Source(rank, endpoint, replay, settings.topic))
    return tuple(sources)


def reachable(endpoint: Any, url: str) -> str | None:
    """The address at which a publisher can be reached that was told to bind ``endpoint``: any address of its machine is
    the host of ``url``. ``None`` for what is no address of another process."""
    if not isinstance(endpoint, str):
        return None
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return endpoint
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdecimal() or not 0 < int(port) < 65536 or not host:
        return None
    if host in _ANY:
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{port}" if host else None


def _shifted(endpoint: str | None, rank: int) -> str | None:
    """As vLLM shifts it for a data-parallel rank."""
    if endpoint is None or not rank:
        return endpoint
    stem, _, port = endpoint.rpartition(":")
    return f"{stem}:{int(port) + rank}" if port.isdecimal() else endpoint
