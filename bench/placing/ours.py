"""The gateway's own placing in the laboratory: its placer, ledgers and what it learns, with virtual time for the clock.

Places as ``relay/gate.py`` and ``fleet/backend.py`` do, without their sockets and futures.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.placing.lab import Lab
from bench.placing.terms import Outcome
from bench.placing.traffic import BLOCK_TOKENS, Request
from gateway.config import PRIORITIES, PlacingSettings
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.ledger import Ledger
from gateway.fleet.rates import Rates
from gateway.routing.lengths import OutputLengths
from gateway.routing.need import budget_tokens, groups_of
from gateway.routing.placer import Placer
from gateway.types import BackendView, Decision, Health, Offer, Placed, Waiter

MODEL = "m"
# As counting does it: an entry of the chain at least so many tokens after the last.
CHAIN_TOKENS = 256
NORMAL, LOW = 1, 2


@dataclass(slots=True)
class _Sent:
    """A request at a backend, and what its end will teach."""

    placed: Placed
    waiter: Waiter
    sent_s: float
    ahead_tokens: int
    queued: bool
    trial: bool
    first_s: float | None = None
    grown_tokens: int = 0


class Gateway:
    """Holds requests back until there is room, in turn between keys."""

    scrape_s = 1.0
    lazy = False
    retries = True

    def __init__(self, lab: Lab, settings: PlacingSettings, name: str = "kvgate") -> None:
        self.name = name
        self._lab = lab
        self._settings = settings
        self._timeouts_s = [settings.class_timeouts_s.get(rank, settings.queue_timeout_s) for rank in PRIORITIES]
        self._placer = Placer(settings)
        self._lengths = OutputLengths()
        self._ledgers = [Ledger() for _ in lab.seen]
        self._rates = [Rates() for _ in lab.seen]
        for ledger, seen, backend in zip(self._ledgers, lab.seen, lab.backends, strict=True):
            ledger.set_capacity(KvCapacity(1, seen.capacity_blocks, backend.engine.config.block_size_tokens))
            ledger.begin_scrape()
            ledger.reconcile(0, 0.0)
        self._epochs = [0 for _ in lab.seen]
        self._placed = 0
        self._waiting: dict[int, tuple[Waiter, Request]] = {}
        self._sent: dict[int, _Sent] = {}

    def arrived(self, request: Request, now_s: float) -> None:
        length = request.prompt_tokens
        offers = []
        for seen in sorted(self._lab.seen, key=lambda item: (item.window_tokens, item.index)):
            left = seen.window_tokens - length
            if left > 0:
                budget = request.session.kind.budget_tokens
                given = None if budget is None else min(budget, left)
                offers.append(Offer(str(seen.index), seen.window_tokens, given, False))
        if not offers:
            self._lab.refuse(request, now_s)
            return
        flow = request.session.key
        rank = LOW if request.session.kind.name == "batch" else NORMAL
        expected_tokens = self._lengths.expected(MODEL, flow, self._settings.output_quantile)
        waiter = Waiter(
            sequence=request.number,
            arrived_s=now_s,
            deadline_s=now_s + self._timeouts_s[rank],
            groups=groups_of(offers, length, 1, self._settings, expected_tokens),
            model=MODEL,
            rank=rank,
            flow=flow,
            session=str(request.session.number),
            chain=_chain(request),
            streamed=True,
        )
        self._waiting[request.number] = (waiter, request)
        self._look(now_s)
        self._carry_out(self._placer.add(waiter, now_s), now_s)

    def first_token(self, request: Request, backend: int, now_s: float) -> None:
        self._ledgers[backend].first_byte(request.number)
        sent = self._sent[request.number]
        sent.first_s, sent.queued = now_s, sent.queued or bool(self._lab.seen[backend].waiting)

    def finished(self, request: Request, backend: int, outcome: Outcome, now_s: float) -> None:
        sent = self._sent.pop(request.number)
        self._ledgers[backend].release(request.number)
        if sent.first_s is not None:
            own_tokens = request.prompt_tokens - outcome.cached_tokens
            tokens, took_s = sent.ahead_tokens + own_tokens, sent.first_s - sent.sent_s
            self._rates[backend].prefilled(tokens, took_s, sent.queued, sent.trial)
            self._rates[backend].generated(outcome.output_tokens - 1, now_s - sent.first_s, sent.trial)
        matched = sent.placed.matched_tokens
        self._placer.answered(str(backend), outcome.output_tokens, matched, outcome.cached_tokens)
        self._placer.left(str(backend), sent.placed.own_tokens + outcome.output_tokens, now_s)
        budget = budget_tokens(sent.placed.offer, sent.placed.need.prompt_tokens)
        self._lengths.note(MODEL, sent.waiter.flow, outcome.output_tokens, outcome.output_tokens < budget)
        self._decide(now_s)

    def failed(self, request: Request, backend: int, now_s: float) -> None:
        self._ledgers[backend].release(request.number)
        sent = self._sent.pop(request.number)
        if sent.first_s is None:
            chain, matched_tokens = sent.waiter.chain, sent.placed.matched_tokens
            self._placer.unanswered(str(backend), chain, MODEL, matched_tokens)
        if self._lab.seen[backend].up:
            self._lab.seen[backend].up = False  # its connections broke: that is seen at once
            self._epochs[backend] += 1  # and when it is back its metrics tell that it is another process

    def returned(self, request: Request, backend: int, now_s: float) -> None:
        raise AssertionError("it was sent to a backend whose window it does not fit")

    def scraped(self, now_s: float) -> None:
        for ledger, seen in zip(self._ledgers, self._lab.seen, strict=True):
            self._sync(seen.index)
            ledger.begin_scrape()
            ledger.reconcile(round(seen.kv_usage * seen.capacity_blocks), now_s)
        self._decide(now_s)

    def _sync(self, index: int) -> None:
        """Let the ledger grow by the tokens that have streamed past."""
        ledger = self._ledgers[index]
        for name, tokens in self._lab.produced(index).items():
            sent = self._sent.get(int(name))
            if sent is not None and tokens > sent.grown_tokens:
                ledger.grow(int(name), tokens - sent.grown_tokens)
                sent.grown_tokens = tokens

    def _look(self, now_s: float) -> None:
        self._placer.see([self._view(seen.index, now_s) for seen in self._lab.seen])

    def _decide(self, now_s: float) -> None:
        if self._waiting:
            self._look(now_s)
            self._carry_out(self._placer.decide(now_s), now_s)

    def _carry_out(self, decisions: list[Decision], now_s: float) -> None:
        for decision in decisions:
            waiter, request = self._waiting.pop(decision.sequence)
            self._placer.remove(decision.sequence)
            if not isinstance(decision, Placed):
                self._lab.refuse(request, now_s)
                continue
            index, need = int(decision.offer.backend), decision.need
            ledger = self._ledgers[index]
            self._placed += 1
            trial, queued = self._rates[index].sent(now_s, self._rounds), bool(self._lab.seen[index].waiting)
            self._sent[request.number] = _Sent(decision, waiter, now_s, ledger.pending_prompt_tokens, queued, trial)
            budget = budget_tokens(decision.offer, need.prompt_tokens)
            ledger.reserve(
                request.number,
                need.prompt_tokens,
                need.output_tokens,
                1,
                budget,
                decision.matched_tokens,
                decision.chain,
            )
            self._lab.send(request, index, now_s)

    @property
    def _rounds(self) -> float:
        return self._placed / len(self._rates)

    def _view(self, index: int, now_s: float) -> BackendView:
        seen, ledger, rates = self._lab.seen[index], self._ledgers[index], self._rates[index]
        return BackendView(
            name=str(index),
            url="",
            health=Health.UP if seen.up else Health.DOWN,
            windows={MODEL: seen.window_tokens},
            in_flight=ledger.in_flight,
            kv=ledger.view(now_s),
            running=seen.running,
            waiting=seen.waiting,
            pending_prompt_tokens=ledger.pending_prompt_tokens,
            prefill_s=rates.prefill_s,
            output_s=rates.output_s,
            epoch=self._epochs[index],
            first_s=rates.first_s,
            first_tokens=rates.first_tokens,
            trust=rates.trust(now_s, self._rounds),
        )


def _chain(request: Request) -> tuple[tuple[int, int], ...]:
    """The prompt's hashes as counting would give them: one at most every ``CHAIN_TOKENS``."""
    step = CHAIN_TOKENS // BLOCK_TOKENS
    return tuple(
        (request.hashes[place], (place + 1) * BLOCK_TOKENS) for place in range(step - 1, len(request.hashes), step)
    )
