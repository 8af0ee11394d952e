"""What a backend says of itself over HTTP: models, version, health and metrics, bounded in time and size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx2

from gateway.config import BackendSettings
from gateway.fleet.metrics_text import FAMILIES, Oddity, Reading, parse
from gateway.fleet.unreachable import SCHEME, SERVER, SILENT, cause_of

MAX_JSON_BYTES = 4 << 20
MAX_METRICS_BYTES = 16 << 20
MAX_CARDS = 4096
MAX_WINDOW_TOKENS = 1 << 40

# prometheus_client's own application, which vLLM mounts below its route, gives only the families named: making the
# whole page costs a server 3 ms of the loop that its requests need, making these 0.1 ms.
CHOSEN_METRICS = "/metrics/?" + urlencode([("name[]", name) for name in FAMILIES.names])
ALL_METRICS = "/metrics"


class ProbeFailed(Exception):
    """A backend did not say what was asked. ``refused``: nothing listens at its address. ``starting``: it says that it
    is not ready yet. ``dead``: it says that its engine is. ``final``: asking again at once is of no use. ``silent``:
    nothing came back at all. ``check``: what its operator should look at, a sentence or none."""

    def __init__(
        self,
        message: str,
        refused: bool = False,
        starting: bool = False,
        dead: bool = False,
        check: str = "",
        silent: bool = False,
    ) -> None:
        super().__init__(message)
        self.check = check
        self.silent = silent
        self.refused = refused
        self.starting = starting
        self.final = refused or starting or dead


class _NoMetrics(Exception):
    """What comes is no metrics page, however long it may go on."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One name a backend serves. ``window_tokens`` is its ``max_model_len``, a LoRA card's that of its parent."""

    id: str
    root: str | None
    parent: str | None
    window_tokens: int | None


class Probe:
    """Asks one backend. Every question is answered or ``ProbeFailed`` within ``timeout_s``."""

    def __init__(self, settings: BackendSettings, timeout_s: float) -> None:
        # Compressing costs a server more than sending does, and a small body could become any size here.
        headers = {"user-agent": "kvgate", "accept-encoding": "identity"}
        if settings.api_key is not None:
            headers["authorization"] = f"Bearer {settings.api_key.get_secret_value()}"
        self._timeout_s = timeout_s
        self._metrics_path = CHOSEN_METRICS
        self._asks_sleep = self._asks_pause = True
        self._requests: dict[str, httpx2.Request] = {}  # making one costs a third of a look
        # No proxies or netrc from the environment: the relay goes straight to the backend, and so do we.
        self._client = httpx2.AsyncClient(
            base_url=settings.url,
            headers=headers,
            timeout=httpx2.Timeout(timeout_s),
            limits=httpx2.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=4.0),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    def forget(self) -> None:
        """Another process may answer now, and know what the one before did not."""
        self._metrics_path = CHOSEN_METRICS
        self._asks_sleep = self._asks_pause = True

    async def cards(self) -> tuple[ModelCard, ...]:
        """The models served. Raises ``ProbeFailed`` also for a list that is none."""
        status, body = await self._get("/v1/models", MAX_JSON_BYTES)
        if status in (401, 403):
            raise ProbeFailed(f"/v1/models answered {status}: set the backend's api_key")
        if status == 503:  # vLLM while it scales, and proxies before a server that loads its weights
            raise ProbeFailed("/v1/models answered 503: it is not ready", starting=True)
        if status != 200:
            raise ProbeFailed(f"/v1/models answered {status}", check=SERVER)
        cards = read_cards(body)
        if not cards:
            raise ProbeFailed("it serves no models yet", starting=True)
        return cards

    async def alive(self) -> bool:
        """False if ``/health`` says that the engine behind the server is dead; what it does not know does not count."""
        try:
            status, _ = await self._get("/health", MAX_JSON_BYTES)
        except ProbeFailed:
            return True
        return status != 503

    async def asleep(self) -> bool:
        """Whether a server without the metric for it (before 0.11) sleeps. Only one in development mode tells."""
        if self._asks_sleep:
            said = await self._said("/is_sleeping", "is_sleeping")
            self._asks_sleep = said is not None
            return said is True
        return False

    async def paused(self) -> bool:
        """Whether generation was paused (0.12+, development mode): requests wait until it is resumed."""
        if self._asks_pause:
            said = await self._said("/is_paused", "is_paused")
            self._asks_pause = said is not None
            return said is True
        return False

    async def version(self) -> str | None:
        """vLLM's version; ``None`` if the backend will not tell."""
        try:
            status, body = await self._get("/version", MAX_JSON_BYTES)
            document = json.loads(body) if status == 200 else None
        except (ProbeFailed, ValueError, RecursionError):
            return None
        version = document.get("version") if isinstance(document, dict) else None
        return version[:64] if isinstance(version, str) and version else None

    async def reading(self) -> Reading:
        """The metrics. A server that has none (404) gives an empty reading: everything unknown; so does a page that is
        none, with that oddity. Raises ``ProbeFailed``."""
        reading = await self._read(self._metrics_path)
        if reading.empty and self._metrics_path != ALL_METRICS:
            # Not all servers can choose: a proxy that knows the one path only, several API servers under one port.
            reading = await self._read(ALL_METRICS)
            self._metrics_path = ALL_METRICS
        return reading

    async def _read(self, path: str) -> Reading:
        try:
            status, body = await self._get(path, MAX_METRICS_BYTES, _refuse_pages)
        except _NoMetrics:
            return NO_PAGE
        if status in (401, 403, 404, 405):
            return Reading()
        if status != 200:
            if path != ALL_METRICS:
                return Reading()  # ask for all of them before anybody is alarmed
            raise ProbeFailed(f"/metrics answered {status}")
        reading = parse(body)
        return NO_PAGE if reading.empty and body.strip() and b"# TYPE " not in body else reading

    async def _said(self, path: str, field: str) -> bool | None:
        """A yes or no that a server may tell; ``None`` if this one does not."""
        try:
            status, body = await self._get(path, MAX_JSON_BYTES)
            document = json.loads(body) if status == 200 else None
        except (ProbeFailed, ValueError, RecursionError):
            return None
        said = document.get(field) if isinstance(document, dict) else None
        return said if isinstance(said, bool) else None

    async def _get(
        self, path: str, limit_bytes: int, check: Callable[[httpx2.Response, bytes], None] | None = None
    ) -> tuple[int, bytes]:
        """Status and body. ``check`` may refuse it at its first bytes, and is called with none if it is too large."""
        name = path.partition("?")[0]
        try:
            # httpx2's timeouts bound single reads; a backend that drips a byte a second needs a bound on the whole.
            request = self._requests.get(path)
            if request is None:
                request = self._requests[path] = self._client.build_request("GET", path)
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.send(request, stream=True)
                try:
                    body = bytearray()
                    async for part in response.aiter_bytes():
                        if check is not None and part and not body:
                            check(response, part)
                        body += part
                        if len(body) > limit_bytes:
                            if check is not None:
                                check(response, b"")
                            raise ProbeFailed(f"{name} is larger than {limit_bytes} bytes")
                    return response.status_code, bytes(body)
                finally:
                    await response.aclose()
        except (TimeoutError, httpx2.TimeoutException):
            said = f"{name} did not answer within {self._timeout_s:g} s"
            raise ProbeFailed(said, check=SILENT, silent=True) from None
        except httpx2.ConnectError as error:
            cause = cause_of(error)
            raise ProbeFailed(
                f"cannot connect: {cause.words}", refused=cause.may_come, check=cause.check, silent=cause.silent
            ) from None
        except httpx2.RemoteProtocolError as error:
            raise ProbeFailed(f"{name}: {type(error).__name__}: {error}", check=SCHEME) from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise ProbeFailed(f"{name}: {type(error).__name__}: {error}") from None


NO_PAGE = Reading(odd=frozenset({Oddity.NOT_METRICS}))


def _refuse_pages(response: httpx2.Response, head: bytes) -> None:
    """Raise ``_NoMetrics`` for an answer that cannot be metrics: markup, JSON, or more than any server has."""
    if response.status_code != 200:
        return
    kind = response.headers.get("content-type", "")
    if not head or head.lstrip()[:1] in (b"<", b"{", b"[") or kind.startswith(("text/html", "application/json")):
        raise _NoMetrics


async def cards_at(settings: BackendSettings, timeout_s: float) -> dict[str, ModelCard]:
    """The models that a backend serves, by name, for whoever asks but once. Raises ``ProbeFailed``."""
    probe = Probe(settings, timeout_s)
    try:
        return {card.id: card for card in await probe.cards()}
    finally:
        await probe.close()


def read_cards(body: bytes) -> tuple[ModelCard, ...]:
    """The cards in the body of ``/v1/models``, in its order. A LoRA card takes its parent's window.

    Cards without an id are left out; one whose window nobody states keeps ``None``. Raises ``ProbeFailed``.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise ProbeFailed("/v1/models is not JSON", check=SERVER) from None
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        raise ProbeFailed("/v1/models has no list of models", check=SERVER)
    cards: dict[str, ModelCard] = {}
    for item in data[:MAX_CARDS]:
        name = _text(item.get("id")) if isinstance(item, dict) else None
        if name is not None and name not in cards:
            window = _window(item.get("max_model_len"))
            cards[name] = ModelCard(name, _text(item.get("root")), _text(item.get("parent")), window)
    return tuple(ModelCard(card.id, card.root, card.parent, _inherited(card, cards)) for card in cards.values())


def _inherited(card: ModelCard, cards: dict[str, ModelCard]) -> int | None:
    """The card's window or its nearest ancestor's. A server of one base model may name a parent it does not list."""
    seen: set[str] = set()
    current: ModelCard | None = card
    while current is not None and current.window_tokens is None and current.id not in seen:
        seen.add(current.id)
        current = cards.get(current.parent) if current.parent is not None else None
    if current is not None and current.window_tokens is not None:
        return current.window_tokens
    bases = {other.window_tokens for other in cards.values() if other.window_tokens is not None}
    return bases.pop() if card.parent is not None and len(bases) == 1 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _window(value: Any) -> int | None:
    """A plausible ``max_model_len``. JSON's true is an int to Python, and a float may be infinite."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= MAX_WINDOW_TOKENS else None
