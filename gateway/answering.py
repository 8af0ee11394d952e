"""One request at one backend: send it, relay what comes back, and check what the backend says it cost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from gateway.api.errors import StreamPlace, sse_error
from gateway.api.rewrite import upstream_body
from gateway.api.upstream_errors import client_error, error_event, event_error, is_full, read_error, read_overflow
from gateway.config import Settings
from gateway.exceptions import (
    BackendBusy,
    BackendFailed,
    BackendLost,
    BackendTimeout,
    ContextOverflow,
    EngineGone,
)
from gateway.fleet.fleet import Fleet
from gateway.headers import explained, forwarded
from gateway.observe.metrics import Metrics
from gateway.relay.client import Client, Scope
from gateway.relay.events import EventStream
from gateway.relay.exchange import is_event_stream, passed_headers, relay_bytes, relay_events
from gateway.relay.lease import Lease
from gateway.relay.repair import StreamRepair
from gateway.relay.sse import cached_tokens_of, output_tokens_of, prompt_tokens_of, usage_of
from gateway.relay.told import TRUE, UsageTold
from gateway.relay.upstream import Upstream, UpstreamResponse
from gateway.tokens.service import Counter
from gateway.trace import Trace
from gateway.types import Ask, Dialect

# Answers of counted dialects are read whole, so that another backend can take over until the end and their usage can be
# checked. Only one with logprobs of a very long output comes near this; beyond it the backend is taken for broken.
READ_WHOLE_BYTES = 256 << 20

# Statuses after which another backend may do better: it is busy, restarting, or a proxy before it gave up.
RETRY_STATUSES = frozenset({502, 503, 504})
# Relayed, since it may be the request's own fault. A backend that gives it far more often than its peers is an outlier.
INTERNAL_ERROR = 500

# Characters that stand for themselves in a path (RFC 3986, pchar); "%", "?" and "#" of a decoded path do not.
UNQUOTED = "/:@!$&'()*+,;="


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request at one backend: what is asked, the place it has there, who gets the answer, what is noted of it."""

    ask: Ask
    lease: Lease
    client: Client
    trace: Trace


class Attempt:
    """One of several attempts at a stream. ``close`` gives back all it holds, however far it came."""

    __slots__ = ("first", "lease", "response", "task")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.task: asyncio.Task[None] | None = None  # which begins it
        self.response: UpstreamResponse | None = None
        self.first: bytes | None = None

    @property
    def streams(self) -> bool:
        """Whether the backend has answered, and with a stream."""
        return self.response is not None and self.response.status < 400 and is_event_stream(self.response)

    def close(self) -> None:
        """Break it off, if it still goes on, and release what it holds."""
        if self.task is not None:
            self.task.cancel()
            self.task.add_done_callback(_taken_note_of)
        if self.response is not None:
            self.response.close()
        self.lease.release()


def _taken_note_of(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


Headers = list[tuple[str, str]]


class Answering:
    """Has backends answer requests."""

    def __init__(
        self, settings: Settings, fleet: Fleet, counter: Counter, upstream: Upstream, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._counter = counter
        self._upstream = upstream
        self._metrics = metrics

    async def exchange(self, scope: Scope, ask: Ask, lease: Lease, client: Client, trace: Trace) -> None:
        """Send the request to the lease's backend and relay what comes back."""
        with self._judging(lease):
            response = await self._open(scope, ask, lease, trace)
            try:
                await self._relay(Exchange(ask, lease, client, trace), response)
            finally:
                response.close()
        self._fleet.note_success(lease.backend.name, response.status == INTERNAL_ERROR)

    async def begin(self, scope: Scope, ask: Ask, attempt: Attempt, trace: Trace) -> None:
        """The first half of ``exchange``, for one of several attempts at a stream: send it and wait for its first
        bytes. Raises ``BackendFailed``; whoever cancels it closes the attempt."""
        with self._judging(attempt.lease):
            response = attempt.response = await self._open(scope, ask, attempt.lease, trace)
            if response.status in RETRY_STATUSES:
                await self._give_up_on(response)
            if attempt.streams:
                attempt.first = await response.chunk_within(self._settings.relay.first_byte_timeout_s)
                if not attempt.first:
                    raise BackendFailed("The backend ended its answer before it began. Try again.")

    async def finish(self, ask: Ask, attempt: Attempt, client: Client, trace: Trace) -> None:
        """The second half: relay what comes back. ``first`` of the attempt may still be missing."""
        response = attempt.response
        assert response is not None, "the attempt was never begun"
        with self._judging(attempt.lease):
            await self._relay(Exchange(ask, attempt.lease, client, trace), response, attempt.first, True)
        self._fleet.note_success(attempt.lease.backend.name, response.status == INTERNAL_ERROR)

    @contextlib.contextmanager
    def _judging(self, lease: Lease) -> Iterator[None]:
        """Tell the fleet what an exchange says of its backend."""
        name = lease.backend.name
        try:
            yield
        except BackendFailed as error:
            lease.failed = True
            if isinstance(error, EngineGone):
                self._fleet.look_soon(name)
            elif isinstance(error, BackendLost):
                pass  # the looks found it out, and will find it well again
            elif isinstance(error, BackendBusy):
                self._fleet.note_busy(name, lease.placed_s, error.full)
            else:
                if isinstance(error, BackendTimeout):
                    lease.timed_out()
                self._fleet.note_failure(name, lease.placed_s)
            raise
        except ContextOverflow:  # an answer, too
            self._fleet.note_success(name)
            raise

    async def _open(self, scope: Scope, ask: Ask, lease: Lease, trace: Trace) -> UpstreamResponse:
        if trace.called_s is None:
            trace.called_s = time.monotonic()
            self._note_clamp(ask, lease, trace)
        relay = self._settings.relay
        query = scope["query_string"].decode("latin-1")
        response = await self._upstream.open(
            scope["method"],
            lease.backend.url + quote(ask.path, safe=UNQUOTED) + (f"?{query}" if query else ""),
            forwarded(scope, lease, trace),
            upstream_body(ask, lease.offer) if ask.body else None,
            relay.first_byte_timeout_s if ask.stream else relay.answer_timeout_s,
            self._fleet.pulse(lease.backend.name),
        )
        self._metrics.upstream_responses.labels(lease.backend.name, f"{response.status // 100}xx").inc()
        return response

    async def _relay(
        self, on: Exchange, response: UpstreamResponse, first: bytes | None = None, held: bool = False
    ) -> None:
        ask, lease, client, trace = on.ask, on.lease, on.client, on.trace
        # truncate_prompt_tokens −1 cuts to the window of the backend taken, which is not known when tokens are counted.
        longest_tokens = trace.count.tokens if trace.count is not None else 0
        trace.cut_by_backend = ask.truncate_prompt_tokens == -1 and longest_tokens >= lease.offer.window_tokens
        if response.status in RETRY_STATUSES:
            await self._give_up_on(response)
        told = explained(trace, ask, lease)
        headers = [*passed_headers(response), ("x-request-id", trace.request_id), *told]
        if response.status >= 400:
            await self._relay_error(on, response, told)
        elif is_event_stream(response):
            headers += [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
            await self._relay_events(on, response, headers, first, held)
        elif response.headers.get("content-type", "").startswith("application/json") and ask.counted:
            await self._relay_json(on, response, headers)
        elif ask.counted and ask.dialect is not Dialect.POOLING:  # embeddings may come as bare floats
            raise BackendFailed("The backend answered with something that is not JSON. Try again.")
        else:
            await relay_bytes(client, response, headers, lease, trace.progress, self._settings.relay)
        if response.status < 400:
            lease.finished(trace.progress.output_tokens, trace.progress.cached_tokens)
        self._check(trace)

    async def _relay_events(
        self, on: Exchange, response: UpstreamResponse, headers: Headers, first: bytes | None, held: bool
    ) -> None:
        """A stream of events, put right on the way and ended with an error where the backend fails."""
        ask, lease, client, trace = on.ask, on.lease, on.client, on.trace
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
                first,
                held,
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

    async def _relay_json(self, on: Exchange, response: UpstreamResponse, headers: Headers) -> None:
        """A whole answer: read to its end, so that until then another backend can take over, and its usage checked."""
        body = await response.read(READ_WHOLE_BYTES, self._settings.relay.idle_timeout_s)
        progress = on.trace.progress
        progress.first_byte_s = time.monotonic()
        try:
            usage = usage_of(body)
        except ValueError:
            raise BackendFailed("The backend answered with something that is not JSON. Try again.") from None
        progress.prompt_tokens, progress.output_tokens = prompt_tokens_of(usage), output_tokens_of(usage)
        progress.cached_tokens = cached_tokens_of(usage)
        response.release()
        body = self._told(on.lease, on.trace).tell_in(body)
        await on.client.answer(response.status, headers, body)

    async def _relay_error(self, on: Exchange, response: UpstreamResponse, told: Headers) -> None:
        """A backend's own refusal keeps its meaning; one that clients could misread is worded anew."""
        ask, lease, trace = on.ask, on.lease, on.trace
        body = await response.read(READ_WHOLE_BYTES, self._settings.relay.idle_timeout_s)
        response.release()
        if response.status == 400 and lease.backend.rank is not None and _names_a_rank(read_error(400, body).message):
            raise EngineGone("The backend was restarted with fewer engines. Try again.")
        if ask.counted and response.status == 400:
            overflow = read_overflow(read_error(400, body).message, ask.dialect, lease.offer.window_tokens)
            if overflow is not None:
                raise ContextOverflow(overflow)
        status, headers, body = client_error(
            response.status, body, ask.dialect, trace.request_id, lease.offer.window_tokens, trace.caller
        )
        trace.outcome = f"upstream_{status // 100}xx"
        await on.client.answer(status, headers + told, body)

    async def _give_up_on(self, response: UpstreamResponse) -> None:
        """Another backend may do better: raise what this one said."""
        said = read_error(response.status, await response.read(READ_WHOLE_BYTES, self._settings.relay.idle_timeout_s))
        response.release()
        if response.status == 503:
            raise BackendBusy(said.message, is_full(said))
        raise BackendFailed(f"The backend answered {response.status}. Try again.")

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


def _names_a_rank(message: str) -> bool:
    """Whether vLLM refuses the engine it was asked for (0.32: ``data_parallel_rank 3 is out of range [0, 2).``)."""
    return "data_parallel_rank" in message and "out of range" in message
