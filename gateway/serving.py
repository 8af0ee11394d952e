"""The way of a request, top to bottom: parse, count, fit, place, relay; and whatever happens, release.

Nothing is decided here that a pure room can decide, and nothing is held that is not let go in a ``finally``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from gateway.access.keys import Keys, shown_key
from gateway.answering import Answering
from gateway.api.errors import Caller, error_response, is_codex
from gateway.api.parsers import parser_of
from gateway.api.waiting import OPENED_EARLY, ending_events, idle_event
from gateway.api.wish import wish_of
from gateway.config import Settings, key_fingerprint
from gateway.exceptions import (
    BackendBusy,
    BackendFailed,
    ClientGone,
    ContextOverflow,
    EngineGone,
    GatewayError,
    ShuttingDown,
)
from gateway.fitting import Fitted, Fitter, Signs
from gateway.fleet.fleet import Fleet
from gateway.guard.policy import HEADER as OVERFLOW_HEADER
from gateway.hedging import Hedger, Race
from gateway.observe.metrics import Metrics
from gateway.relay.client import Client, Receive, Scope, Send, header, read_body, request_id_of
from gateway.relay.gate import Gate
from gateway.relay.lease import Lease
from gateway.relay.retries import RetryBudget
from gateway.relay.upstream import Upstream
from gateway.relay.waiting import WaitingRoom
from gateway.repairing import Repairer
from gateway.tokens.service import Counter, ServedModel
from gateway.trace import Trace, counted, repaired
from gateway.types import Ask, Count, CountKind, Dialect, Wish

log = logging.getLogger("kvgate.serving")

# vLLM refuses more sequences than this (VLLM_MAX_N_SEQUENCES). What it will refuse must not wait for room for them.
MOST_SEQUENCES = 16384


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
        self._fitter = fitter
        self._gate = gate
        self._answering = Answering(settings, fleet, counter, upstream, metrics)
        self._hedger = Hedger(settings.relay, self._answering, metrics)
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
        leases: list[Lease] = []
        if self._hedger.policy.on:
            self._hedger.policy.budget.earn()
        names, tried = {offer.backend for offer in offers}, set[str]()
        async with self._waiting_room(ask, fitted.count, client, trace) as waiting:
            retries = self._settings.relay.retries
            while True:
                waiting.queued = True
                lease = await self._gate.enter(
                    offers, prompt_tokens, sequences, body_bytes, frozenset(tried), fitted.model.id, wish, lease
                )
                waiting.queued = False
                leases = [lease]
                try:
                    trace.waited(lease.waited_s)
                    if self._hedger.policy.on:
                        race = Race(
                            scope,
                            ask,
                            client,
                            trace,
                            leases,
                            waiting,
                            partial(self._second_place, fitted, prompt_tokens, wish, leases, tried),
                        )
                        await self._hedger.exchange(race)
                    else:
                        await self._answering.exchange(scope, ask, lease, client, trace)
                    return
                except BackendFailed as error:
                    backend = lease.backend.name
                    full = isinstance(error, BackendBusy) and error.full
                    for failed in leases:
                        if failed.failed and not full:
                            # Where the process failed, none of its engines is tried again.
                            gone = isinstance(error, EngineGone)
                            name = failed.offer.backend
                            tried |= {name} if gone else self._fleet.siblings(name)
                    if full and not client.started:
                        # The backend is well and rests a moment: back into the queue, where it or another may be next.
                        self._metrics.retries.labels(backend).inc()
                        waiting.resume()
                        continue
                    if client.started or not retries or tried.issuperset(names):
                        raise
                    retries -= 1
                    if not self._retries.spend():
                        self._metrics.retries_denied.inc()
                        raise
                    said = error.message
                    log.warning("request %s: %s failed before its first byte: %s", trace.request_id, backend, said)
                    self._metrics.retries.labels(backend).inc()
                    waiting.resume()
                finally:
                    for held in leases:
                        held.release()

    def _second_place(
        self, fitted: Fitted, prompt_tokens: int, wish: Wish, leases: list[Lease], tried: set[str]
    ) -> Lease | None:
        """A lease on another backend than those the request has or had, if one is free at once."""
        taken = frozenset(tried).union(*(self._fleet.siblings(lease.offer.backend) for lease in leases))
        return self._gate.enter_now(fitted.offers, prompt_tokens, taken, fitted.model.id, wish)

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
            *counted(count),
        ]
        every_s = self._settings.relay.keepalive_s

        def ending(body: bytes) -> bytes:
            return ending_events(ask.dialect, body, trace.request_id, ask.model)

        ends = ending if ask.stream and ask.dialect in OPENED_EARLY else None
        return WaitingRoom(client, after_s, every_s, headers, lambda: idle_event(ask.dialect, ask.model), ends)

    def _served_as(self, name: str) -> ServedModel | None:
        """What is served by ``name``, if anything is."""
        try:
            return self._fitter.served(self._fleet.resolve(name))
        except GatewayError:
            return None

    async def _refuse(self, error: GatewayError, client: Client, trace: Trace) -> None:
        """Answer with an error in the caller's dialect, if it can still be answered."""
        trace.outcome = error.code
        self._metrics.rejections.labels(error.code).inc()
        if not client.started:
            status, headers, body = error_response(error, trace.dialect, trace.request_id, trace.caller)
            if trace.count is not None:
                headers += counted(trace.count)
            await client.answer(status, headers + repaired(trace.repairs), body)

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


def signs_of(scope: Scope) -> Signs:
    """What the headers of a request show of its sender."""
    return Signs(
        overflow=header(scope, OVERFLOW_HEADER.encode()),
        session=header(scope, b"x-session-id") or header(scope, b"x-session-affinity") or "",
        user_agent=header(scope, b"user-agent") or "",
        key=key_fingerprint(shown_key(scope["headers"])),
    )
