"""Assembly: the rooms wired together, the routes, and the life of the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter as Counts
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import httpx2
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import __version__
from gateway.access.keys import Keys
from gateway.api import body as bodies
from gateway.api.errors import error_response
from gateway.api.models import ModelRecord, model_body, model_info_body, models_body
from gateway.api.paths import dialect_of, normalise
from gateway.config import Settings
from gateway.counting import PATHS as COUNTING_PATHS
from gateway.counting import Counting
from gateway.exceptions import GatewayError, NoRoute
from gateway.fitting import Fitter
from gateway.fleet.fleet import Fleet
from gateway.fleet.hits import Verdict
from gateway.fleet.kvevents.listener import KvEvents
from gateway.fleet.records import BackendRecord
from gateway.observe.gauges import (
    counting_gauges,
    fleet_gauges,
    gpu_gauges,
    keeping_gauges,
    kv_event_gauges,
    learned_gauges,
    queue_gauges,
)
from gateway.observe.metrics import CONTENT_TYPE, Gauge, Metrics
from gateway.relay.client import Message, Receive, Scope, Send, request_id_of
from gateway.relay.gate import Gate
from gateway.relay.upstream import Upstream
from gateway.serving import Serving
from gateway.summary import Summariser
from gateway.tokens.service import SOURCES, Counter
from gateway.trimming import Trimmer
from gateway.types import Dialect, Health

if TYPE_CHECKING:
    from gateway.planner.gpu_watch import GpuWatch

# Paths a backend answers beside /v1 (vLLM serves these without it).
RELAYED_PREFIXES = ("/v1/", "/v2/", "/tokenize", "/detokenize", "/pooling", "/score", "/rerank", "/classify")

# Start-up waits so long for the backends' first answers; one that is down joins whenever it comes up.
FIRST_LOOK_S = 3.0

WARM_INTERVAL_S = 0.5

log = logging.getLogger("kvgate")


class App:
    """The ASGI application. ``serving`` takes what a backend must answer; the rest is answered here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.fleet = Fleet(settings, lambda: self.gate.wake(), self._counted)
        self.gate = Gate(self.fleet, settings.placing)
        self.kv_events = KvEvents(self.fleet.watched(), self.gate.blocks)
        self.counter = Counter(settings.counting, settings.models, self._post, self._note_trust, self.gate.blocks.sizes)
        self.upstream = Upstream(settings.relay)
        self.summariser = Summariser(settings.overflow, self._post, self._summary_route)
        trimmer = Trimmer(settings.overflow, self.counter, self.summariser)
        self.fitter = Fitter(settings, self.fleet, self.counter, trimmer, self.metrics)
        self.serving = Serving(settings, self.fleet, self.counter, self.fitter, self.gate, self.upstream, self.metrics)
        self._gpus = _gpu_watch() if settings.gpu_metrics else None
        self.counting = Counting(
            settings, self.fleet, self.counter, self.metrics, self.fitter.served, self.serving.handle
        )
        self.metrics.watch(self._gauges)
        self._keys = Keys(settings.api_keys)
        self._admin_keys = Keys(settings.admin_keys, "admin_keys")
        self._control: httpx2.AsyncClient | None = None
        self.stopping = False  # set by the server when it is told to stop
        self._started_s = int(time.time())
        self._own = Starlette(
            routes=[
                Route("/", self._root, methods=["GET", "HEAD"]),
                Route("/health", self._health, methods=["GET", "HEAD"]),
                Route("/ready", self._ready, methods=["GET", "HEAD"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._model, methods=["GET"]),
                Route("/model/info", self._model_info, methods=["GET"]),
                Route("/v1/model/info", self._model_info, methods=["GET"]),
                Route("/kvgate/status", self._status, methods=["GET"]),
                Route("/kvgate/backends/{name}/drain", self._drain, methods=["POST"]),
                Route("/kvgate/backends/{name}/undrain", self._undrain, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _no_route, GatewayError: _gateway_error},
            lifespan=self._lifespan,
        )
        self._own_paths = {route.path for route in self._own.routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request, or the server's life span."""
        if scope["type"] == "http":
            if self.stopping:
                send = _closing_connections(send)
            path = scope["path"] = normalise(scope["path"])
            # A dot segment would be resolved on the way and reach what is not relayed (/reset_prefix_cache, /metrics).
            dotted = not {".", ".."}.isdisjoint(path.replace("\\", "/").split("/"))
            if scope["method"] == "POST" and path in COUNTING_PATHS:
                await self.counting.handle(scope, receive, send)
                return
            if not dotted and not self._is_own(path) and path.startswith(RELAYED_PREFIXES):
                await self.serving.handle(scope, receive, send, dialect_of(path))
                return
        await self._own(scope, receive, send)

    def close_queue(self) -> None:
        """Tell all who wait for a place that there will be none."""
        self.gate.close()

    def _is_own(self, path: str) -> bool:
        return path in self._own_paths or path.startswith("/v1/models/")

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.upstream, httpx2.AsyncClient(trust_env=False, follow_redirects=False) as self._control:
            await self.fleet.start()
            self.kv_events.start()
            if self._gpus is not None:
                self._gpus.start()
            warming = asyncio.create_task(self._warm())
            try:
                await self.fleet.wait_until_known(FIRST_LOOK_S)
                yield
            finally:
                warming.cancel()
                if self._gpus is not None:
                    self._gpus.stop()
                await self.summariser.close()
                self.fitter.close()
                self.counter.close()
                await self.kv_events.stop()
                await self.fleet.stop()

    async def _warm(self) -> None:
        """Load each model's tokenizer as soon as the model is known, so that no request waits for it."""
        warm: set[str] = set()
        while True:
            for model in self.fleet.models():
                if model.id not in warm:
                    warm.add(model.id)
                    served = self.fitter.served(model)
                    self.metrics.begin(model.id, SOURCES)
                    log.info("%s", await self.counter.warm(served))
                    self.serving.learn(served)
            await asyncio.sleep(WARM_INTERVAL_S)

    async def _post(
        self, url: str, body: Any, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """JSON to a backend's counting endpoint; the answer must be a JSON object (else ``ValueError``)."""
        assert self._control is not None, "the application has not been started"
        response = await self._control.post(
            url,
            content=orjson.dumps(body),
            headers={"content-type": "application/json", **headers},
            timeout=timeout_s,
        )
        document = orjson.loads(response.content)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
        return response.status_code, document

    def _summary_route(self, name: str) -> tuple[str, str | None] | None:
        """A backend that is up and serves the model that writes summaries."""
        try:
            model = self.fleet.resolve(name)
        except GatewayError:
            return None
        views = self.fleet.views(time.monotonic()).values()
        serving = (view for view in views if model.id in view.windows and not view.draining)
        up = [view for view in serving if view.health is Health.UP]
        if not up:
            return None
        backend = self.fleet.backend(min(up, key=lambda view: view.in_flight).name)
        return backend.url, backend.api_key.get_secret_value() if backend.api_key else None

    async def _root(self, request: Request) -> Response:
        return _json({"name": "kvgate", "version": __version__, "openai_base_url": f"{request.base_url}v1"})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def _ready(self, request: Request) -> Response:
        """200 while new requests can be served, else 503 and a word why: for load balancers."""
        why = "stopping" if self.stopping else "" if self.fleet.ready() else _stand(self.fleet.records())
        body = "" if request.method == "HEAD" else f"not ready: {why}\n" if why else "ready\n"
        return Response(body, status_code=503 if why else 200, media_type="text/plain")

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _models(self, request: Request) -> Response:
        self._keys.check(request.scope["headers"])
        return _json_bytes(models_body(self._records(), self._started_s, self.settings.fitting.output_floor_tokens))

    async def _model(self, request: Request) -> Response:
        self._keys.check(request.scope["headers"])
        model = self.fleet.resolve(request.path_params["model"])
        record = next(record for record in self._records() if record.id == model.id)
        return _json_bytes(model_body(record, self._started_s, self.settings.fitting.output_floor_tokens))

    async def _model_info(self, request: Request) -> Response:
        self._keys.check(request.scope["headers"])
        return _json_bytes(model_info_body(self._records(), self.settings.fitting.output_floor_tokens))

    async def _status(self, request: Request) -> Response:
        self._keys.check(request.scope["headers"])
        learned = {"expected_output_tokens": self.gate.expected_output_tokens()}
        kv_events = {"kv_events": [asdict(record) for record in self.kv_events.records()]}
        return _json({**self.fleet.describe(), **self.gate.stats(), **learned, **kv_events})

    async def _drain(self, request: Request) -> Response:
        return self._drained(request, self.fleet.drain)

    async def _undrain(self, request: Request) -> Response:
        return self._drained(request, self.fleet.undrain)

    def _drained(self, request: Request, act: Callable[[str], None]) -> Response:
        """Place nothing more on a backend, or do so again. Answers what is still there."""
        if not self.settings.admin_keys:
            raise NoRoute("Backends cannot be drained: set admin_keys, and send one of them.", 404)
        self._admin_keys.check(request.scope["headers"])
        name = request.path_params["name"]
        records = {record.name: record for record in self.fleet.records()}
        if name not in records:
            raise NoRoute(f"There is no backend {name}. There are: {', '.join(records)}.", 404)
        act(name)
        log.info("backend %s: %s by an operator", name, "drained" if act == self.fleet.drain else "undrained")
        record = next(record for record in self.fleet.records() if record.name == name)
        return _json({"backend": name, "draining": record.draining, "in_flight": record.in_flight})

    def _records(self) -> list[ModelRecord]:
        return [
            ModelRecord(model.id, model.root or model.id, model.parent, model.window_tokens)
            for model in self.fleet.models()
        ]

    def _counted(self, name: str, verdict: Verdict) -> None:
        self.gate.cache_counted(name, verdict.expected_tokens, verdict.cached_tokens, verdict.answers)

    def _note_trust(self, model: str, source: str, change: str) -> None:
        self.metrics.count_trust_changes.labels(model, source, change).inc()

    def _gauges(self) -> Iterator[Gauge]:
        yield from fleet_gauges(self.fleet.records())
        yield from queue_gauges(self.gate.stats())
        yield from keeping_gauges(self.gate.kept_blocks())
        yield from kv_event_gauges(self.kv_events.records())
        yield from learned_gauges(self.gate.expected_output_tokens())
        yield from counting_gauges(self.counter.kept_bytes() | {"bodies": bodies.kept_bytes()})
        if self._gpus is not None:
            yield from gpu_gauges(self._gpus.latest())


def create_app(settings: Settings) -> App:
    """The gateway as an ASGI application. It watches its backends from start-up to shutdown."""
    return App(settings)


def _closing_connections(send: Send) -> Send:
    """``send`` whose answers are the last of their connections."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return closing


def _stand(backends: Iterable[BackendRecord]) -> str:
    """How backends stand of which none takes new requests. Who asks shows no key, so no names."""
    counts = Counts(backend.condition.value for backend in backends)
    return "no backend takes new requests: " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))


def _gpu_watch() -> GpuWatch:
    """Imported only where asked for: most gateways run on a machine without GPUs."""
    from gateway.planner.gpu_watch import GpuWatch

    return GpuWatch()


def _json(document: Any) -> Response:
    return _json_bytes(orjson.dumps(document))


def _json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _answer(request, NoRoute(f"{request.url.path} does not take {request.method}.", 405))
    return _answer(
        request, NoRoute(f"There is no {request.url.path} here. The OpenAI base URL is {request.base_url}v1.", 404)
    )


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return _answer(request, error)


def _answer(request: Request, error: GatewayError) -> Response:
    status, headers, body = error_response(error, Dialect.CHAT, request_id_of(request.scope))
    return Response(body, status_code=status, headers=dict(headers))
