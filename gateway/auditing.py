"""A self-audit on request: bodies are sent to a backend for one token each, and its usage held against our count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from gateway.api.parsers import guessed_path, parser_of
from gateway.api.paths import normalise
from gateway.exceptions import BackendFailed, BadRequest
from gateway.relay.sse import json_usage
from gateway.types import Ask, Count, CountKind

# So many requests run at the backend at once.
AT_ONCE = 4

# Fields that ask for more than one token, or for an answer that is not one JSON document with usage.
_DROPPED = (
    "stream",
    "stream_options",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "background",
    "thinking_token_budget",
)

CountOf = Callable[[Ask], Awaitable[Count]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of an audit file. ``number`` counts from 1."""

    number: int
    path: str
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a sample. ``ours`` is ``None`` if it was not counted, ``theirs`` if it was not served.

    ``refusal``: the backend's words, cut short.
    """

    number: int
    path: str
    kind: str
    source: str
    ours: int | None
    theirs: int | None
    refusal: str = ""

    @property
    def difference(self) -> int | None:
        """Ours − theirs."""
        return None if self.ours is None or self.theirs is None else self.ours - self.theirs

    @property
    def wrong(self) -> bool:
        """Whether a count that was said to be exact is not."""
        return self.kind == CountKind.EXACT and bool(self.difference)


def samples(lines: Iterable[str]) -> Iterator[Sample]:
    """The requests of a JSONL file: bodies, or ``{"path": …, "body": …}``. Raises ``ValueError`` naming the line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
        path = None
        if isinstance(document, dict) and isinstance(document.get("body"), dict):
            path, document = document.get("path"), document["body"]
        if not isinstance(document, dict):
            raise ValueError(f"line {number} is no JSON object")
        if not isinstance(path, str):
            path = guessed_path(document)
        if path is None:
            raise ValueError(f"line {number}: no `path`, and the body has no messages, prompt or input to guess it by")
        yield Sample(number, normalise(path), document)


def for_one_token(sample: Sample, model: str) -> dict[str, Any]:
    """The body that asks ``model`` for the same prompt and one token."""
    document = {key: value for key, value in sample.document.items() if key not in _DROPPED}
    document["model"] = model
    if sample.path == "/v1/responses":
        document |= {"max_output_tokens": 1, "store": False}
    elif sample.path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        document["max_tokens"] = 1
    thinking = document.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("type") == "enabled":
        document["thinking"] = {"type": "adaptive"}  # its budget may not reach max_tokens; it renders nothing
    return document


async def audit(
    client: httpx2.AsyncClient,
    base_url: str,
    headers: Mapping[str, str],
    requests: Iterable[Sample],
    model: str,
    count: CountOf | None,
) -> AsyncIterator[Finding]:
    """Send each request and compare, in order. Raises ``BackendFailed`` if the backend cannot be reached.

    ``count`` counts here; ``None``: a gateway answers at ``base_url``, and tells its own count in headers.
    """
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(sample: Sample) -> Finding:
        async with gate:
            return await _find(client, base_url, headers, sample, model, count)

    tasks = [asyncio.create_task(one(sample)) for sample in requests]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _find(
    client: httpx2.AsyncClient,
    base_url: str,
    headers: Mapping[str, str],
    sample: Sample,
    model: str,
    count: CountOf | None,
) -> Finding:
    body = json.dumps(for_one_token(sample, model)).encode()
    known = await _known(sample, body, count) if count is not None else None
    try:
        sent = {"content-type": "application/json", **headers}
        response = await client.post(f"{base_url}{sample.path}", content=body, headers=sent)
    except httpx2.HTTPError as error:
        raise BackendFailed(f"{base_url}{sample.path} failed: {str(error) or type(error).__name__}") from None
    if count is None:
        known = _told(response.headers)
    kind, source, ours = known if known is not None else ("none", "none", None)
    if response.status_code != 200:
        words = " ".join(response.text.split())[:200]
        return Finding(sample.number, sample.path, kind, source, ours, None, f"{response.status_code} {words}")
    try:
        theirs, _ = json_usage(response.content)
    except ValueError:
        theirs = None
    return Finding(sample.number, sample.path, kind, source, ours, theirs, "" if theirs is not None else "no usage")


async def _known(sample: Sample, body: bytes, count: CountOf) -> tuple[str, str, int | None] | None:
    try:
        ask = parser_of("POST", sample.path)(body, "application/json", sample.path)
    except BadRequest:
        return None
    if not ask.counted:
        return None
    counted = await count(ask)
    return counted.kind.value, counted.source, counted.total_tokens


def _told(headers: Mapping[str, str]) -> tuple[str, str, int | None] | None:
    tokens = headers.get("x-kvgate-prompt-tokens", "")
    if not tokens.isdigit():
        return None
    return headers.get("x-kvgate-count-kind", ""), headers.get("x-kvgate-count-source", ""), int(tokens)
