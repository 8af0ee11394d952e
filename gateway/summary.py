"""Summaries of dropped messages by a model that the operator names. Bounded in time; a failure is a plain note."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any

from gateway.config import OverflowSettings
from gateway.guard.shorten import shortened
from gateway.tokens.backend import Post
from gateway.tokens.lru import Lru

log = logging.getLogger("kvgate.summary")

# The base URL that serves a model and its bearer token, or ``None`` if none does now.
Route = Callable[[str], tuple[str, str | None] | None]

_CACHE_BYTES = 8 << 20
_ORDER = (
    "Summarise the part of a conversation given by the user, for the assistant who goes on with it and no longer sees "
    "that part. Keep what was asked, decided, found and done, names of files, commands, errors and open tasks. Be "
    "brief and write plain text."
)
_HEAD = "[Summary of {count} earlier messages, written by the gateway to fit the context window]"


class Summariser:
    """Sums up spans of text and remembers them by their hash, failures too: since the cut stands still, one summary
    serves many turns, and a note that turned into a summary later would change the prefix."""

    def __init__(self, settings: OverflowSettings, post: Post, route: Route) -> None:
        self._settings = settings
        self._post = post
        self._route = route
        self._known: Lru[bytes, str] = Lru(_CACHE_BYTES)
        self._running: dict[bytes, asyncio.Task[str]] = {}

    async def summary(self, span: str, messages: int) -> str | None:
        """The words that stand for ``span``, or ``None``: the plain note is used. Never raises but to be cancelled."""
        if self._settings.summary_model is None or not span.strip():
            return None
        key = hashlib.blake2b(span.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        text = self._known.get(key)
        if text is None:
            # One call for all who wait, which goes on if one of them hangs up.
            task = self._running.get(key)
            if task is None:
                task = self._running[key] = asyncio.create_task(self._made(span, key))
            text = await asyncio.shield(task)
        return f"{_HEAD.format(count=messages)}\n{text}" if text else None

    async def close(self) -> None:
        """End what still runs."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _made(self, span: str, key: bytes) -> str:
        """The summary, empty if it failed; remembered either way."""
        text = ""
        try:
            async with asyncio.timeout(self._settings.summary_timeout_s):
                text = await self._asked(span)
        except Exception as error:  # whatever the other side does, the plain note does it, too
            log.warning("no summary by %s: %s", self._settings.summary_model, str(error) or type(error).__name__)
        finally:
            self._known.put(key, text, len(text.encode("utf-8", "surrogatepass")) + 64)
            del self._running[key]
        return text

    async def _asked(self, span: str) -> str:
        settings = self._settings
        model = settings.summary_model or ""
        if settings.summary_url is not None:
            key = settings.summary_api_key.get_secret_value() if settings.summary_api_key else None
            url: str = settings.summary_url
        else:
            route = self._route(model)
            if route is None:
                raise LookupError("no backend serves it")
            url, key = route
        headers = {"authorization": f"Bearer {key}"} if key else {}
        status, answer = await self._post(
            f"{url}/v1/chat/completions", request(settings, span), headers, settings.summary_timeout_s
        )
        if status != 200:
            raise ValueError(f"it answered {status}")
        text = answer["choices"][0]["message"]["content"]
        if not isinstance(text, str) or not text.strip():
            raise ValueError("it said nothing")
        return shortened(text.strip(), settings.summary_tokens, _by_bytes)[0]


def request(settings: OverflowSettings, span: str) -> dict[str, Any]:
    """The body that asks for a summary of ``span``, whose middle is cut out if it is too long."""
    span = shortened(span, settings.summary_input_tokens, _by_bytes)[0]
    return {
        "model": settings.summary_model,
        "messages": [{"role": "system", "content": _ORDER}, {"role": "user", "content": span}],
        "max_tokens": settings.summary_tokens,
        "temperature": 0,
    }


def _by_bytes(text: str) -> int:
    """About three bytes a token: the other model's tokenizer is not known here."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // 3)
