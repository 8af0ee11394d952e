"""The way of a request, top to bottom: parse, count, fit, place, relay; and whatever happens, release.

Nothing is decided here that a pure room can decide, and nothing is held that is not let go in a ``finally``.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import quote

from gateway.access.keys import Keys, shown_key
from gateway.api.errors import ANYONE, Caller, StreamPlace, error_response, is_codex, sse_error
from gateway.api.parsers import parser_of
from gateway.api.rewrite import upstream_body
from gateway.api.upstream_errors import client_error, error_event, event_error, read_error, read_overflow
from gateway.api.waiting import OPENED_EARLY, ending_events, idle_event
from gateway.api.wish import wish_of
from gateway.config import Settings, key_fingerprint
from gateway.exceptions import (
    BackendBusy,
    BackendFailed,
    ClientGone,
    ContextOverflow,
    GatewayError,
    ShuttingDown,
)
from gateway.fitting import Fitted, Fitter, Signs, trim_headers
from gateway.fleet.fleet import Fleet
from gateway.guard.policy import HEADER as OVERFLOW_HEADER
from gateway.observe.metrics import Metrics
from gateway.relay.client import Client, Receive, Scope, Send, header, read_body
from gateway.relay.events import EventStream
from gateway.relay.exchange import HOP_BY_HOP, Progress, is_event_stream, passed_headers, relay_bytes, relay_events
from gateway.relay.gate import Gate, Lease
from gateway.relay.repair import StreamRepair
from gateway.relay.retries import RetryBudget
from gateway.relay.sse import cached_tokens_of, output_tokens_of, prompt_tokens_of, usage_of
from gateway.relay.told import TRUE, UsageTold
from gateway.relay.upstream import Upstream, UpstreamResponse
from gateway.relay.waiting import WaitingRoom
from gateway.repairing import Repairer
from gateway.tokens.service import Counter, ServedModel
from gateway.types import Ask, Count, CountKind, Dialect

log = logging.getLogger("kvgate.serving")

# What a client says to us and not to the backend. Its credentials are ours to check; bodies are relayed uncompressed.
NOT_FORWARDED = HOP_BY_HOP | {
    "host",
    "content-length",
    "authorization",
    "x-api-key",
    "cookie",
    "accept-encoding",
    "expect",
}

# Answers of counted dialects are read whole, so that another backend can take over until the end and their usage can be
# checked. Only one with logprobs of a very long output comes near this; beyond it the backend is taken for broken.
READ_WHOLE_BYTES = 256 << 20

# vLLM refuses more sequences than this (VLLM_MAX_N_SEQUENCES). What it will refuse must not wait for room for them.
MOST_SEQUENCES = 16384

# Statuses after which another backend may do better: it is busy, restarting, or a proxy before it gave up.
RETRY_STATUSES = frozenset({502, 503, 504})

# Characters that stand for themselves in a path (RFC 3986, pchar); "%", "?" and "#" of a decoded path do not.
UNQUOTED = "/:@!$&'()*+,;="


@dataclass(slots=True)
class Trace:
    """What one request has become so far, for headers, metrics and the log. Times are ``time.monotonic``'s: the clock
    of uvloop ticks in milliseconds."""

    request_id: str
    dialect: Dialect
    arrived_s: float
    caller: Caller = ANYONE
    model: str = "other"
    outcome: str = "ok"
    count: Count | None = None
    counted_as: str = ""
    cut_by_backend: bool = False
    repairs: tuple[str, ...] = ()
    fitted: Fitted | None = None
    queue_wait_s: float = 0.0
    first_wait_s: float = 0.0
    called_s: float | None = None
    progress: Progress = field(default_factory=Progress)

    def counts(self, count: Count, name: str) -> None:
        """The prompt was counted, by the tokenizer of the model ``name``."""
        self.count, self.counted_as = count, name

    def fits(self, fitted: Fitted) -> None:
        """The request can be sent, as ``fitted`` says."""
        self.fitted = fitted
        self.model = fitted.model.id
        if fitted.counted_as:
            self.counts(fitted.count, fitted.counted_as)

    def waited(self, seconds: float) -> None:
        """Another wait in the queue is over."""
        if self.called_s is None:
            self.first_wait_s = seconds
        self.queue_wait_s += seconds


class Serving:
    """Answers every request that a backend must work for."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        counter: Counter,
        fitter: Fitter,
        gate: Gate,
        upstream: Upstream,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._counter = counter
        self._fitter = fitter
        self._gate = gate
        self._upstream = upstream
        self._metrics = metrics
        self._retries = RetryBudget(settings.relay.retry_share)
        self._keys = Keys(settings.api_keys)
        self._repairer = Repairer(settings.repairs, settings.models, counter, metrics)

    async def handle(self, scope: Scope, receive: Receive, send: Send, dialect: Dialect) -> None:
        """Serve one HTTP request of ``dialect`` from its first to its last byte."""
        trace = Trace(request_id_of(scope), dialect, time.monotonic())
        client = Client(receive, send)
        try:
            if scope["method"] != "OPTIONS":  # a browser's preflight shows no key; vLLM asks it for none, either
                self._keys.check(scope["headers"])
            body = await read_body(scope, receive, self._settings.max_body_bytes)
            async with client:
                try:
                    await self._serve(scope, body, client, trace)
                except GatewayError as error:
                    await self._refuse(error, client, trace)
        except ClientGone:
            trace.outcome = "client_gone"
        except asyncio.CancelledError:
            # The server's shutdown has waited long enough. It asks for no more than that we end, and so we do: raised
            # on, it would log each request as an error.
            await self._refuse(ShuttingDown("The gateway is shutting down. Try again."), client, trace)
        except GatewayError as error:
            await self._refuse(error, client, trace)
        except Exception:
            log.exception("request %s failed inside the gateway", trace.request_id)
            await self._refuse(GatewayError("The gateway failed; its log says why. Try again."), client, trace)
        finally:
            self._record(trace)

    def learn(self, model: ServedModel) -> None:
        """Find out what the model's template takes, so that no request waits for it."""
        self._repairer.facts(model)

    async def _serve(self, scope: Scope, body: bytes, client: Client, trace: Trace) -> None:
        parse = parser_of(scope["method"], scope["path"])
        ask, trace.repairs = self._repairer.read(
            parse, body, header(scope, b"content-type"), scope["path"], trace.dialect, self._served_as
        )
        codex = is_codex(header(scope, b"user-agent"), header(scope, b"originator"))
        trace.caller = Caller(ask.stream, codex, ask.model)
        model = self._fleet.resolve(ask.model)
        trace.model = model.id
        signs = signs_of(scope)
        fitted = await self._fitter.fit(ask, model, signs, trace.counts)
        while True:
            trace.fits(fitted)
            try:
                await self._place(scope, fitted, len(body), client, trace)
                return
            except ContextOverflow as error:
                # A backend says so, or the size of its cache: the count was an estimate.
                again = None
                if ask.counted and not client.started:
                    again = await self._fitter.contradicted(fitted, error.overflow, signs)
                if again is None:
                    raise
                fitted = again

    async def _place(self, scope: Scope, fitted: Fitted, body_bytes: int, client: Client, trace: Trace) -> None:
        """Send the request to one backend after another until one begins to answer, and relay that answer."""
        ask, offers = fitted.ask, fitted.offers
        # Estimates, and sums over several prompts, may exceed what one request can ever hold; they must not refuse it.
        prompt_tokens = min(fitted.count.total_tokens, max(offer.window_tokens for offer in offers))
        sequences = ask.n if ask.n <= MOST_SEQUENCES else 1
        adapter, key = fitted.model.parent is not None, shown_key(scope["headers"])
        wish = wish_of(ask, scope["headers"], key, fitted.count, adapter, self._settings.placing)
        self._retries.earn()
        lease: Lease | None = None
        tried: set[str] = set()
        async with self._waiting_room(ask, fitted.count, client, trace) as waiting:
            for attempt in range(self._settings.relay.retries + 1):
                waiting.queued = True
                lease = await self._gate.enter(
                    offers, prompt_tokens, sequences, body_bytes, frozenset(tried), fitted.model.id, wish, lease
                )
                waiting.queued = False
                try:
                    trace.waited(lease.waited_s)
                    await self._exchange(scope, ask, lease, client, trace)
                    return
                except BackendFailed as error:
                    backend = lease.backend.name
                    tried.add(backend)
                    if client.started or attempt == self._settings.relay.retries or len(tried) == len(offers):
                        raise
                    if not self._retries.spend():
                        self._metrics.retries_denied.inc()
                        raise
                    said = error.message
                    log.warning("request %s: %s failed before its first byte: %s", trace.request_id, backend, said)
                    self._metrics.retries.labels(backend).inc()
                finally:
                    lease.release()

    def _waiting_room(self, ask: Ask, count: Count, client: Client, trace: Trace) -> WaitingRoom:
        """Keeps the client of a stream while it waits in the queue, if its size leaves no doubt: after that no status
        can tell of an overflow."""
        after_s = self._settings.placing.keepalive_after_s
        if not ask.stream or count.kind is not CountKind.EXACT or ask.dialect not in OPENED_EARLY:
            after_s = None
        headers = [
            ("content-type", "text/event-stream; charset=utf-8"),
            ("cache-control", "no-cache"),
            ("x-accel-buffering", "no"),
            ("x-request-id", trace.request_id),
            *_counted(count),
        ]
        every_s = self._settings.relay.keepalive_s

        def ending(body: bytes) -> bytes:
            return ending_events(ask.dialect, body, trace.request_id, ask.model)

        return WaitingRoom(client, after_s, every_s, headers, lambda: idle_event(ask.dialect, ask.model), ending)

    def _served_as(self, name: str) -> ServedModel | None:
        """What is served by ``name``, if anything is."""
        try:
            return self._fitter.served(self._fleet.resolve(name))
        except GatewayError:
            return None

    async def _exchange(self, scope: Scope, ask: Ask, lease: Lease, client: Client, trace: Trace) -> None:
        """Send the request to the lease's backend and relay what comes back."""
        backend = lease.backend
        if trace.called_s is None:
            trace.called_s = time.monotonic()
            self._note_clamp(ask, lease, trace)
        # truncate_prompt_tokens −1 cuts to the window of the backend taken, which is not known when tokens are counted.
        longest_tokens = trace.count.tokens if trace.count is not None else 0
        trace.cut_by_backend = ask.truncate_prompt_tokens == -1 and longest_tokens >= lease.offer.window_tokens
        try:
            response = await self._open(scope, ask, lease, trace)
            try:
                self._metrics.upstream_responses.labels(backend.name, f"{response.status // 100}xx").inc()
                await self._relay(ask, lease, response, client, trace)
            finally:
                response.close()
        except BackendBusy:
            raise
        except BackendFailed:
            self._fleet.note_failure(backend.name)
            raise
        self._fleet.note_success(backend.name)

    async def _open(self, scope: Scope, ask: Ask, lease: Lease, trace: Trace) -> UpstreamResponse:
        relay = self._settings.relay
        query = scope["query_string"].decode("latin-1")
        return await self._upstream.open(
            scope["method"],
            lease.backend.url + quote(ask.path, safe=UNQUOTED) + (f"?{query}" if query else ""),
            self._forwarded(scope, lease, trace),
            upstream_body(ask, lease.offer) if ask.body else None,
            relay.first_byte_timeout_s if ask.stream else relay.answer_timeout_s,
        )

    async def _relay(self, ask: Ask, lease: Lease, response: UpstreamResponse, client: Client, trace: Trace) -> None:
        if response.status in RETRY_STATUSES:
            await self._give_up_on(response)
        explained = self._explained(trace, ask, lease)
        headers = [*passed_headers(response), ("x-request-id", trace.request_id), *explained]
        if response.status >= 400:
            await self._relay_error(ask, lease, response, client, trace, explained)
        elif is_event_stream(response):
            headers += [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
            await self._relay_events(ask, lease, response, client, trace, headers)
        elif response.headers.get("content-type", "").startswith("application/json") and ask.counted:
            await self._relay_json(lease, response, client, trace, headers)
        elif ask.counted and ask.dialect is not Dialect.POOLING:  # embeddings may come as bare floats
            raise BackendFailed("The backend answered with something that is not JSON. Try again.")
        else:
            await relay_bytes(client, response, headers, lease, trace.progress, self._settings.relay)
        if response.status < 400:
            lease.finished(trace.progress.output_tokens, trace.progress.cached_tokens)
        self._check(trace)

    async def _relay_events(
        self,
        ask: Ask,
        lease: Lease,
        response: UpstreamResponse,
        client: Client,
        trace: Trace,
        headers: list[tuple[str, str]],
    ) -> None:
        """A stream of events, put right on the way and ended with an error where the backend fails."""
        window = lease.offer.window_tokens
        repair = StreamRepair(
            ask.dialect,
            lease.offer.output_tokens,
            self._told(lease, trace),
            self._settings.repairs.disable,
            lambda data: event_error(data, ask.dialect, window),
            lambda error: error_event(error, ask.dialect, StreamPlace(*repair.place(), ask.model)),
        )
        try:
            await relay_events(
                client,
                response,
                headers,
                EventStream(ask, repair),
                lease,
                trace.progress,
                self._settings.relay,
                lambda error: sse_error(error, ask.dialect, StreamPlace(*repair.place(), ask.model)),
            )
        finally:
            for name in repair.names:
                self._metrics.repairs.labels(name).inc()

    def _told(self, lease: Lease, trace: Trace) -> UsageTold:
        """How usage is told to the client: as it is, unless the operator wants it otherwise."""
        override = self._settings.models.get(trace.model)
        believed_tokens = override.client_window_tokens if override else None
        untrimmed = self._settings.fitting.report_usage == "untrimmed"
        added = trace.fitted.trimmed_tokens if untrimmed and trace.fitted is not None else 0
        if not added and not believed_tokens:
            return TRUE
        return UsageTold(added, believed_tokens / lease.offer.window_tokens if believed_tokens else 1.0)

    async def _relay_json(
        self,
        lease: Lease,
        response: UpstreamResponse,
        client: Client,
        trace: Trace,
        headers: list[tuple[str, str]],
    ) -> None:
        """A whole answer: read to its end, so that until then another backend can take over, and its usage checked."""
        body = await response.read(READ_WHOLE_BYTES, self._settings.relay.idle_timeout_s)
        progress = trace.progress
        progress.first_byte_s = time.monotonic()
        try:
            usage = usage_of(body)
        except ValueError:
            raise BackendFailed("The backend answered with something that is not JSON. Try again.") from None
        progress.prompt_tokens, progress.output_tokens = prompt_tokens_of(usage), output_tokens_of(usage)
        progress.cached_tokens = cached_tokens_of(usage)
        response.release()
        body = self._told(lease, trace).tell_in(body)
        await client.answer(response.status, headers, body)

    async def _relay_error(
        self,
        ask: Ask,
        lease: Lease,
        response: UpstreamResponse,
        client: Client,
        trace: Trace,
        explained: list[tuple[str, str]],
    ) -> None:
        """A backend's own refusal keeps its meaning; one that clients could misread is worded anew."""
        body = await response.read(READ_WHOLE_BYTES, self._settings.relay.idle_timeout_s)
        response.release()
        if ask.counted and response.status == 400:
            overflow = read_overflow(read_error(400, body).message, ask.dialect, lease.offer.window_tokens)
            if overflow is not None:
                raise ContextOverflow(overflow)
        status, headers, body = client_error(
            response.status, body, ask.dialect, trace.request_id, lease.offer.window_tokens, trace.caller
        )
        trace.outcome = f"upstream_{status // 100}xx"
        await client.answer(status, headers + explained, body)

    async def _give_up_on(self, response: UpstreamResponse) -> None:
        """Another backend may do better: raise what this one said."""
        said = read_error(
            response.status, await response.read(READ_WHOLE_BYTES, self._settings.relay.idle_timeout_s)
        ).message
        response.release()
        if response.status == 503:
            raise BackendBusy(said)
        raise BackendFailed(f"The backend answered {response.status}. Try again.")

    def _forwarded(self, scope: Scope, lease: Lease, trace: Trace) -> dict[str, str]:
        """The client's headers as the backend gets them, with the backend's own credentials."""
        headers = {
            name: _text(value)
            for name, value in ((raw.decode("latin-1"), value) for raw, value in scope["headers"])
            if name not in NOT_FORWARDED and not name.startswith("x-kvgate-")
        }
        headers["x-request-id"] = trace.request_id
        headers["accept-encoding"] = "identity"
        if lease.backend.priority_scheduling:
            headers["x-vllm-priority"] = str(lease.rank - 1)  # 0.32; lower is sooner, as with us
        if lease.backend.api_key:
            headers["authorization"] = f"Bearer {lease.backend.api_key.get_secret_value()}"
        return headers

    def _explained(self, trace: Trace, ask: Ask, lease: Lease) -> list[tuple[str, str]]:
        """The headers that tell the client what was done. Documented in docs/headers.md."""
        offer = lease.offer
        headers = [
            ("x-kvgate-backend", lease.backend.name),
            ("x-kvgate-queue-wait-ms", str(round(trace.queue_wait_s * 1000))),
        ]
        if trace.count is not None:
            headers += _counted(trace.count)
            headers.append(("x-kvgate-window", str(offer.window_tokens)))
            if offer.output_tokens:
                headers.append(("x-kvgate-output-tokens", str(offer.output_tokens)))
            if offer.clamped and ask.output_tokens is not None:
                headers.append(("x-kvgate-clamped-from", str(ask.output_tokens)))
        if trace.fitted is not None:
            headers += trim_headers(trace.fitted)
        return headers + _repaired(trace.repairs)

    def _note_clamp(self, ask: Ask, lease: Lease, trace: Trace) -> None:
        given_tokens = lease.offer.output_tokens
        if lease.offer.clamped and given_tokens is not None:
            self._metrics.clamped_requests.labels(trace.model).inc()
            self._metrics.clamped_tokens.labels(trace.model).inc(max(0, (ask.output_tokens or 0) - given_tokens))

    def _check(self, trace: Trace) -> None:
        """Hold our count against the backend's usage, and record both."""
        progress, count = trace.progress, trace.count
        if progress.output_tokens is not None:
            self._metrics.output_tokens.labels(trace.model).inc(progress.output_tokens)
        if progress.prompt_tokens is None:
            return
        self._metrics.prompt_tokens.labels(trace.model).inc(progress.prompt_tokens)
        if count is not None and not trace.cut_by_backend:
            error_tokens = self._counter.observe(trace.counted_as, count, progress.prompt_tokens)
            if error_tokens is not None:
                self._metrics.checked(trace.model, count, error_tokens)

    async def _refuse(self, error: GatewayError, client: Client, trace: Trace) -> None:
        """Answer with an error in the caller's dialect, if it can still be answered."""
        trace.outcome = error.code
        self._metrics.rejections.labels(error.code).inc()
        if not client.started:
            status, headers, body = error_response(error, trace.dialect, trace.request_id, trace.caller)
            if trace.count is not None:
                headers += _counted(trace.count)
            await client.answer(status, headers + _repaired(trace.repairs), body)

    def _record(self, trace: Trace) -> None:
        now_s = time.monotonic()
        metrics = self._metrics
        metrics.requests.labels(trace.dialect, trace.model, trace.outcome).inc()
        metrics.duration.labels(trace.model).observe(now_s - trace.arrived_s)
        if trace.called_s is not None:
            metrics.queue_wait.observe(trace.queue_wait_s)
            metrics.overhead.observe(max(0.0, trace.called_s - trace.arrived_s - trace.first_wait_s))
        if trace.progress.first_byte_s is not None:
            metrics.first_token.labels(trace.model).observe(trace.progress.first_byte_s - trace.arrived_s)
        log.debug("request %s to %s: %s", trace.request_id, trace.model, trace.outcome)


def request_id_of(scope: Scope) -> str:
    """The client's ``x-request-id`` if it is printable ASCII, cut to 128 characters; else a new one.

    Anything else would come back garbled: backends put it into their answers' ids.
    """
    given = (header(scope, b"x-request-id") or "")[:128]
    return given if given and given.isascii() and given.isprintable() else uuid.uuid4().hex


def signs_of(scope: Scope) -> Signs:
    """What the headers of a request show of its sender."""
    return Signs(
        overflow=header(scope, OVERFLOW_HEADER.encode()),
        session=header(scope, b"x-session-id") or header(scope, b"x-session-affinity") or "",
        user_agent=header(scope, b"user-agent") or "",
        key=key_fingerprint(shown_key(scope["headers"])),
    )


def _text(value: bytes) -> str:
    """A header's value such that aiohttp, which writes UTF-8, sends the same bytes again if they are UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _repaired(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """The header that names the repairs a request needed."""
    return [("x-kvgate-repairs", ",".join(names))] if names else []


def _counted(count: Count) -> list[tuple[str, str]]:
    """The headers that tell what the prompt was counted to be, and by whom."""
    return [
        ("x-kvgate-prompt-tokens", str(count.total_tokens)),
        ("x-kvgate-count-kind", count.kind.value),
        ("x-kvgate-count-source", count.source),
    ]
