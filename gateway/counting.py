"""Endpoints that count and do nothing else, answered here wherever the count is known here: no GPU is asked.

``POST /tokenize`` (vLLM's), ``/v1/messages/count_tokens`` (Anthropic's, and vLLM's) and ``/v1/responses/input_tokens``
(OpenAI's). What cannot be counted exactly is passed on to a backend where it has the endpoint, so that its errors are
its own; where it has none, the answer is an estimate that says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from gateway.access.keys import Keys
from gateway.api import messages, responses, tokenize
from gateway.api.errors import error_response
from gateway.api.paths import dialect_of
from gateway.config import Settings
from gateway.exceptions import ClientGone, GatewayError
from gateway.fleet.fleet import Fleet
from gateway.fleet.models import Model
from gateway.observe.metrics import Metrics
from gateway.relay.client import Client, Receive, Scope, Send, header, read_body, request_id_of
from gateway.tokens.service import Counter, ServedModel
from gateway.types import Ask, ChatPrompt, Count, CountKind, Dialect, TextPrompts

log = logging.getLogger("kvgate.counting")

RESPONSES_PATH = "/v1/responses/input_tokens"
PATHS = frozenset({tokenize.PATH, messages.COUNT_PATH, RESPONSES_PATH})

# Of these vLLM has its own; it does not have OpenAI's.
PASSED_ON = frozenset({tokenize.PATH, messages.COUNT_PATH})


PassOn = Callable[[Scope, Receive, Send, Dialect], Awaitable[None]]
"""Has a backend answer a request."""


class Counting:
    """Answers the endpoints of ``PATHS``."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        counter: Counter,
        metrics: Metrics,
        served: Callable[[Model], ServedModel],
        pass_on: PassOn,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._counter = counter
        self._metrics = metrics
        self._served = served
        self._pass_on = pass_on
        self._keys = Keys(settings.api_keys)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one POST to a path of ``PATHS``."""
        started_s = time.monotonic()
        path, dialect = scope["path"], dialect_of(scope["path"])
        client = Client(receive, send)
        request_id = request_id_of(scope)
        model, outcome = "other", "ok"
        try:
            self._keys.check(scope["headers"])
            body = await read_body(scope, receive, self._settings.max_body_bytes)
            answer = await self._answer(scope, body)
            if answer is None:
                await self._pass_on(scope, _again(body, receive), send, dialect)
                return
            model, count, document = answer
            self._metrics.count_answers.labels(path, model, count.kind, count.source).inc()
            await client.answer(200, _headers(count, request_id), orjson.dumps(document))
        except ClientGone:
            outcome = "client_gone"
        except GatewayError as error:
            outcome = await self._refuse(error, client, dialect, request_id)
        except Exception:
            log.exception("a count failed inside the gateway")
            failure = GatewayError("The gateway failed; its log says why. Try again.")
            outcome = await self._refuse(failure, client, dialect, request_id)
        self._metrics.requests.labels(dialect, model, outcome).inc()
        self._metrics.duration.labels(model).observe(time.monotonic() - started_s)

    async def _refuse(self, error: GatewayError, client: Client, dialect: Dialect, request_id: str) -> str:
        self._metrics.rejections.labels(error.code).inc()
        if not client.started:
            status, headers, body = error_response(error, dialect, request_id)
            await client.answer(status, headers, body)
        return error.code

    async def _answer(self, scope: Scope, body: bytes) -> tuple[str, Count, dict[str, Any]] | None:
        """Model, count and document; ``None`` if a backend should answer. Raises ``GatewayError``."""
        path, media_type = scope["path"], header(scope, b"content-type")
        if path == tokenize.PATH:
            wish = tokenize.parse(body, media_type, path)
            model = self._fleet.resolve(wish.ask.model)
            return await self._tokenized(wish, model)
        ask = (messages if path == messages.COUNT_PATH else responses).parse(body, media_type, path)
        model = self._fleet.resolve(ask.model)
        count = await self._counter.count(ask, self._served(model))
        if count.kind is CountKind.ESTIMATE and path in PASSED_ON and not self._is_absent(model, path):
            return None
        if path == messages.COUNT_PATH:
            tokens = {"input_tokens": count.tokens, "context_management": {"original_input_tokens": count.tokens}}
            return model.id, count, tokens
        return model.id, count, {"object": "response.input_tokens", "input_tokens": count.tokens}

    def _is_absent(self, model: Model, path: str) -> bool:
        """Whether the backends are known not to have the endpoint."""
        urls = self._served(model).backends
        return not urls or all(self._counter.backend_lacks(url, path) for url in urls)

    async def _tokenized(self, wish: tokenize.Wish, model: Model) -> tuple[str, Count, dict[str, Any]] | None:
        ask: Ask = wish.ask
        if not isinstance(ask.prompt, ChatPrompt | TextPrompts):
            return None
        ids = await self._counter.token_ids(ask.prompt, len(ask.body), self._served(model))
        if ids is None:
            return None
        strings = await asyncio.to_thread(ids.strings) if wish.token_strs else None
        document: dict[str, Any] = {
            "count": len(ids.tokens),
            "max_model_len": max(self._fleet.windows(model.id).values()),
            "tokens": ids.tokens,
            "token_strs": strings,
        }
        return model.id, Count(len(ids.tokens), len(ids.tokens), CountKind.EXACT, "local"), document


def _headers(count: Count, request_id: str) -> list[tuple[str, str]]:
    said = [("x-kvgate-count-kind", count.kind.value), ("x-kvgate-count-source", count.source)]
    return [("content-type", "application/json"), ("x-request-id", request_id), *said]


def _again(body: bytes, receive: Receive) -> Receive:
    """``receive`` for somebody who has yet to read the body that was read."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
