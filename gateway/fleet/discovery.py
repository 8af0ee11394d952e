"""What a backend says of itself over HTTP: ``/v1/models``, ``/version`` and ``/metrics``, bounded in time and size."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx2

from gateway.config import BackendSettings
from gateway.fleet.metrics_text import Reading, parse

MAX_JSON_BYTES = 4 << 20
MAX_METRICS_BYTES = 16 << 20
MAX_CARDS = 4096
MAX_WINDOW_TOKENS = 1 << 40


class ProbeFailed(Exception):
    """A backend did not say what was asked. ``refused``: nothing listens at its address."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


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
        headers = {"user-agent": "kvgate", "accept-encoding": "gzip"}
        if settings.api_key is not None:
            headers["authorization"] = f"Bearer {settings.api_key.get_secret_value()}"
        self._timeout_s = timeout_s
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

    async def cards(self) -> tuple[ModelCard, ...]:
        """The models served. Raises ``ProbeFailed`` also for a list that is none."""
        status, body = await self._get("/v1/models", MAX_JSON_BYTES)
        if status in (401, 403):
            raise ProbeFailed(f"/v1/models answered {status}: set the backend's api_key")
        if status != 200:
            raise ProbeFailed(f"/v1/models answered {status}")
        return read_cards(body)

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
        """The metrics. A server that has none (404) gives an empty reading: everything unknown."""
        status, body = await self._get("/metrics", MAX_METRICS_BYTES)
        if status in (401, 403, 404, 405):
            return Reading()
        if status != 200:
            raise ProbeFailed(f"/metrics answered {status}")
        return parse(body)

    async def _get(self, path: str, limit_bytes: int) -> tuple[int, bytes]:
        try:
            # httpx2's timeouts bound single reads; a backend that drips a byte a second needs a bound on the whole.
            async with asyncio.timeout(self._timeout_s), self._client.stream("GET", path) as response:
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > limit_bytes:
                        raise ProbeFailed(f"{path} is larger than {limit_bytes} bytes")
                return response.status_code, bytes(body)
        except (TimeoutError, httpx2.TimeoutException):
            raise ProbeFailed(f"{path} did not answer within {self._timeout_s:g} s") from None
        except httpx2.ConnectError as error:
            raise ProbeFailed(f"cannot connect: {error}", refused=True) from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise ProbeFailed(f"{path}: {type(error).__name__}: {error}") from None


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
        raise ProbeFailed("/v1/models is not JSON") from None
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        raise ProbeFailed("/v1/models has no list of models")
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
