"""The HTTP server: routes, the key guard, faults and life cycle. ``serve`` runs one on a free port for tests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.simulator import more_routes, openai_routes
from gateway.simulator.errors import ApiError, anthropic_envelope, envelope
from gateway.simulator.faults import GENERATION, Fault
from gateway.simulator.kv_events import sources
from gateway.simulator.model import default_folder, ensure_model
from gateway.simulator.odd_metrics import ODD, odd_page
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.rendering import open_renderer
from gateway.simulator.service import Service
from gateway.simulator.wire import TRANSPORT, ClientGone, cut, json_response, read_json, until_gone

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"
# The faults that concern the page of metrics.
METRICS = frozenset({"no-metrics", "garbage-metrics", "endless-metrics", "slow-metrics", "asleep"}) | ODD.keys()

Handler = Callable[[Service, Request, Fault | None], Awaitable[Response]]


def create_app(options: SimulatorOptions | None = None) -> Simulator:
    """An ASGI application that is one vLLM server. Its engines run while its lifespan does.

    Reads the tokenizer now (and makes the Qwen3 folder first if none is given). ``app.state.service`` is the
    ``Service`` behind it. Raises ``gateway.exceptions.GatewayError`` when there is no tokenizer.
    """
    options = options or SimulatorOptions()
    folder = options.tokenizer if options.tokenizer is not None else ensure_model(default_folder())
    return Simulator(Service(options, open_renderer(folder)))


class Simulator:
    """The application: routes within the key guard, around one ``Service``."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._in_flight = 0
        self._pages = 0  # of metrics
        version = service.version
        generating: dict[str, Handler] = {
            "/v1/chat/completions": openai_routes.chat,
            "/v1/completions": openai_routes.completions,
            "/v1/embeddings": more_routes.embeddings,
            "/v1/responses": more_routes.responses,
        }
        if version.since(0, 12):
            generating["/v1/messages"] = more_routes.messages
        plain: dict[str, Handler] = {"/tokenize": more_routes.tokenize, "/detokenize": more_routes.detokenize}
        if version.since(0, 17, 1):
            plain["/v1/messages/count_tokens"] = more_routes.count_tokens
        routes = [Route(path, self._generating(handler), methods=["POST"]) for path, handler in generating.items()]
        routes += [Route(path, self._answering(handler), methods=["POST"]) for path, handler in plain.items()]
        routes += [
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/load", self._load),
            Route("/is_sleeping", self._is_sleeping),
            Route("/metrics", self._metrics),
            Route("/metrics/", self._metrics),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            Route("/simulator/fault", self._fault, methods=["GET", "POST"]),
        ]
        if version.since(0, 31):
            routes.append(Route("/kv_event_sources", self._kv_event_sources))
        if version.since(0, 30):
            for name in ("chat/completions", "completions", "responses", "messages"):
                routes.append(Route(f"/v1/{name}/render", self._scale_out_disabled, methods=["POST"]))
        self._app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={404: _detail("Not Found"), 405: _detail("Method Not Allowed")},
        )
        self.state = self._app.state
        self.state.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scaling = scope["type"] == "http" and not str(scope["path"]).startswith("/simulator/")
        if scaling and self.service.faults.strike(("scaling",)) is not None:
            text = "The model is currently scaling. Please try again later."
            await json_response({"error": text}, 503)(scope, receive, send)
            return
        if scope["type"] == "http" and not self._admitted(scope):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admitted(self, scope: Scope) -> bool:
        """vLLM's guard: bearer keys on ``/v1`` (from 0.22 also ``/v2`` and ``/inference``), everything else open."""
        keys = self.service.options.api_keys
        guarded = ("/v1", "/v2", "/inference") if self.service.version.since(0, 22) else ("/v1",)
        if not keys or scope["method"] == "OPTIONS" or not str(scope["path"]).startswith(guarded):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and any(hmac.compare_digest(token, key.encode()) for key in keys)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.service.start()
        try:
            yield
        finally:
            await self.service.stop()

    def _answering(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await self._answer(handler, request, None)

        return endpoint

    def _generating(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            fault = self.service.faults.strike(GENERATION)
            if str(self.service.faults) == "asleep":
                await request.body()
                await until_gone(request, self._awake())
            if fault is not None and fault.kind == "overloaded":
                if self._in_flight >= fault.value:
                    return await self._answer(_too_much, request, None)
                fault = None
            if fault is not None:
                await request.body()
                early = await until_gone(request, _early_fault(request, fault))
                if early is not None:
                    return early
            self._in_flight += 1
            try:
                response = await self._answer(handler, request, fault)
            finally:
                self._in_flight -= 1
            if fault is not None and not response.headers.get("content-type", "").startswith("text/event-stream"):
                return _CutShort(response, fault) if fault.kind.endswith("-after-chunks") else response
            return response

        return endpoint

    async def _answer(self, handler: Handler, request: Request, fault: Fault | None) -> Response:
        try:
            return await handler(self.service, request, fault)
        except ApiError as error:
            if request.url.path.startswith("/v1/messages"):
                return json_response(anthropic_envelope(error), error.status)
            return json_response(envelope(self.service.version, error), error.status)
        except ClientGone:
            return Response(status_code=499)
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            # Wrong types, which vLLM's own validation refuses before anything else.
            wrong = ApiError(f"1 validation error: {error}", kind="Bad Request")
            body = anthropic_envelope(wrong) if request.url.path.startswith("/v1/messages") else None
            return json_response(body or envelope(self.service.version, wrong), 400)

    async def _awake(self) -> None:
        while str(self.service.faults) == "asleep":  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _is_sleeping(self, request: Request) -> Response:
        """Dev mode's route; here always open."""
        return json_response({"is_sleeping": self.service.faults.strike(("asleep",)) is not None})

    async def _models(self, request: Request) -> Response:
        options, now = self.service.options, int(time.time())
        root = str(self.service.renderer.folder)
        cards = [_card(name, root, None, options.max_model_len, now) for name in options.models]
        cards += [_card(name, path, options.models[0], None, now) for name, path in options.lora_modules]
        cards = [] if self.service.faults.strike(("no-models",)) is not None else cards
        return json_response({"object": "list", "data": cards})

    async def _health(self, request: Request) -> Response:
        fault = self.service.faults.strike(("unhealthy",))
        return Response(status_code=200 if fault is None else 503)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": self.service.version.text})

    async def _load(self, request: Request) -> Response:
        return json_response({"server_load": self._in_flight})

    async def _metrics(self, request: Request) -> Response:
        kind = ""
        names: list[str] = []
        if request.url.path.endswith("/"):  # the application mounted below the route; only it can choose
            names = request.query_params.getlist("name[]")
        fault = self.service.faults.strike(METRICS)
        if fault is not None:
            kind = fault.kind
            if kind == "no-metrics":
                return json_response({"detail": "Not Found"}, 404)
            if kind == "garbage-metrics":
                return Response(b"<html>this is not a metrics page {{{\n", media_type=METRICS_TYPE)
            if kind == "endless-metrics":
                return StreamingResponse(_endless(), media_type="text/html")
            if kind == "slow-metrics":
                await asyncio.sleep(fault.value)
        self._pages += 1
        page = self.service.metrics.render(names, awake=kind != "asleep")
        return Response(odd_page(kind, page, self._pages), media_type=METRICS_TYPE)

    async def _reset_prefix_cache(self, request: Request) -> Response:
        """Dev mode's route; here always open. Refused with 400 while blocks are in use."""
        done = [engine.pool.forget_all() for engine in self.service.frontend.engines]
        return Response(status_code=200 if all(done) else 400)

    async def _kv_event_sources(self, request: Request) -> Response:
        return json_response(dict(sources(self.service.publishers)))

    async def _scale_out_disabled(self, request: Request) -> Response:
        text = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        error = ApiError(text, status=403, kind="PermissionDeniedError")
        return json_response(envelope(self.service.version, error), 403)

    async def _fault(self, request: Request) -> Response:
        """GET tells the fault in force; POST ``{"fault": "status=503:2"}`` sets one, ``{"fault": null}`` ends it."""
        if request.method == "POST":
            try:
                fault = (await read_json(request, self.service.version)).get("fault")
                self.service.faults.set(None if fault is None else str(fault))
            except (ApiError, ValueError) as error:
                return json_response({"error": str(error)}, 400)
        return json_response({"fault": str(self.service.faults)})


class _CutShort(Response):
    """The start of an answer, then a dead or silent connection (faults on answers that are no streams)."""

    def __init__(self, response: Response, fault: Fault) -> None:
        super().__init__(response.body, response.status_code, dict(response.headers))
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._fault.kind == "die-after-chunks":
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            half = bytes(self.body)[: len(self.body) // 2]
            await send({"type": "http.response.body", "body": half, "more_body": True})
            await asyncio.sleep(0.01)
            cut(scope)
            return
        while (await receive())["type"] != "http.disconnect":
            pass


async def _too_much(service: Service, request: Request, fault: Fault | None) -> Response:
    """What vLLM answers beyond --max-num-queued-reqs (0.29)."""
    raise ApiError(
        "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
        "instance.",
        status=503,
        kind="Service Unavailable",
    )


async def _endless() -> AsyncIterator[bytes]:
    for _ in range(3200):
        yield b"<p>This is not a metrics page.</p>\n" * 1820


async def _early_fault(request: Request, fault: Fault) -> Response | None:
    """What strikes before the request is even looked at."""
    if fault.kind == "die-before-headers":
        cut(request.scope)
        return Response(status_code=499)
    if fault.kind == "slow-headers":
        await asyncio.sleep(fault.value)
    if fault.kind == "garbage":
        return Response(b"\x00\xff<!doctype html> not what you asked for \xfe", media_type="application/json")
    if fault.kind == "status":
        kind = "InternalServerError" if fault.value >= 500 else "BadRequestError"
        fields = {"message": "a fault was asked for", "type": kind, "param": None, "code": int(fault.value)}
        return json_response({"error": fields}, int(fault.value))
    return None


def _detail(text: str) -> Callable[[Request, Exception], Response]:
    def handler(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return json_response({"detail": text}, status)

    return handler


def _card(name: str, root: str, parent: str | None, window: int | None, now: int) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex}",
        "object": "model_permission",
        "created": now,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": window,
        "permission": [permission],
    }


def uvicorn_server(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, signals: bool = True) -> Any:
    """A uvicorn server: quiet, with the transport in reach of the faults; ``signals`` makes Ctrl-C end it."""
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Protocol(HttpToolsProtocol):
        def on_headers_complete(self) -> None:
            cast("dict[str, Any]", self.scope)[TRANSPORT] = self.transport
            super().on_headers_complete()

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            if signals:
                with super().capture_signals():
                    yield
            else:
                yield

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Protocol,
        log_level="critical",
        access_log=False,
        timeout_graceful_shutdown=1 if signals else 0,
    )
    return Server(config)


@contextlib.asynccontextmanager
async def serve(options: SimulatorOptions | None = None, *, app: ASGIApp | None = None) -> AsyncIterator[str]:
    """Serve one simulated vLLM on a free loopback port and yield its base URL, such as ``http://127.0.0.1:40123``.

    Pass ``app`` to keep hold of its ``state.service``. Connections still open at the end are closed.
    """
    served = app if app is not None else await asyncio.to_thread(create_app, options)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn_server(served, signals=False)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the simulated server ended before it began")
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()
