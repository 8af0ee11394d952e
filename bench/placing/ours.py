"""The gateway's own placing in the laboratory: its ledger, need and assignment, with virtual time for the clock."""

from __future__ import annotations

from bench.placing.lab import Lab, Outcome
from bench.placing.traffic import Request
from gateway.config import PlacingSettings
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.ledger import Ledger
from gateway.routing.assign import assign
from gateway.routing.need import budget_tokens, groups_of
from gateway.types import BackendView, Health, Offer, Placed, Waiter

MODEL = "m"


class Gateway:
    """Places as ``relay/gate.py`` does, without its sockets and futures."""

    name = "kvgate"
    scrape_s = 1.0

    def __init__(self, lab: Lab, settings: PlacingSettings) -> None:
        self._lab = lab
        self._settings = settings
        self._ledgers = [Ledger() for _ in lab.seen]
        for ledger, seen, backend in zip(self._ledgers, lab.seen, lab.backends, strict=True):
            ledger.set_capacity(KvCapacity(1, seen.capacity_blocks, backend.engine.config.block_size_tokens))
            ledger.begin_scrape()
            ledger.reconcile(0, 0.0)
        self._queue: dict[int, tuple[Waiter, Request]] = {}
        self._grown: dict[int, int] = {}
        self._pending = 0

    def arrived(self, request: Request, now_s: float) -> None:
        length = len(request.prompt)
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
        groups = groups_of(offers, length, 1, self._settings)
        waiter = Waiter(request.number, now_s, now_s + self._settings.queue_timeout_s, groups, model=MODEL)
        self._queue[request.number] = (waiter, request)
        self._decide(now_s)

    def first_token(self, request: Request, backend: int, now_s: float) -> None:
        self._ledgers[backend].first_byte(request.number)

    def finished(self, request: Request, backend: int, outcome: Outcome, now_s: float) -> None:
        self._ledgers[backend].release(request.number)
        self._grown.pop(request.number, None)
        self._decide(now_s)

    def failed(self, request: Request, backend: int, now_s: float) -> None:
        self._ledgers[backend].release(request.number)
        self._grown.pop(request.number, None)
        self._lab.seen[backend].up = False  # its connections broke: that is seen at once
        self.arrived(request, now_s)

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
            number = int(name)
            grown = tokens - self._grown.get(number, 0)
            if grown > 0:
                ledger.grow(number, grown)
                self._grown[number] = tokens

    def _decide(self, now_s: float) -> None:
        if not self._queue:
            return
        views = {str(seen.index): self._view(seen.index, now_s) for seen in self._lab.seen}
        for decision in assign([waiter for waiter, _ in self._queue.values()], views, now_s, self._settings):
            waiter, request = self._queue.pop(decision.sequence)
            if isinstance(decision, Placed):
                offer = decision.offer
                need = waiter.need(offer.backend)
                index = int(offer.backend)
                budget = budget_tokens(offer, need.prompt_tokens)
                self._ledgers[index].reserve(request.number, need.prompt_tokens, need.output_tokens, 1, budget)
                self._lab.send(request, index, now_s)
            else:
                self._lab.refuse(request, now_s)

    def _view(self, index: int, now_s: float) -> BackendView:
        seen, ledger = self._lab.seen[index], self._ledgers[index]
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
        )
