"""How a baseline's policy is run: sending on at once, or, as llm-d's flow control does, holding back at times."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.placing.policies import Overlap, Policy, Seen, able
from bench.placing.traffic import Request

if TYPE_CHECKING:
    from bench.placing.lab import Lab
    from bench.placing.terms import Outcome


class AtOnce:
    """A placer around a policy that never holds a request back."""

    lazy = True

    def __init__(self, lab: Lab, policy: Policy, told: bool = False) -> None:
        self.name = policy.name
        self.scrape_s = policy.scrape_s
        self.retries = policy.retries
        self._lab = lab
        self._policy = policy
        self._told = told
        self._seen: Sequence[Seen] = lab.seen

    def arrived(self, request: Request, now_s: float) -> None:
        self._lab.observe(now_s)
        backends = able(request, self._seen, self._told) if self.retries else self._seen
        index = self._policy.place(request, backends, now_s)
        self._policy.placed(request, index)
        self._seen[index].in_flight += 1
        self._lab.send(request, index, now_s)

    def first_token(self, request: Request, backend: int, now_s: float) -> None:
        if isinstance(self._policy, Overlap):
            self._policy.began(request, backend)

    def finished(self, request: Request, backend: int, outcome: Outcome, now_s: float) -> None:
        self._forget(request, backend)

    def returned(self, request: Request, backend: int, now_s: float) -> None:
        self._forget(request, backend)

    def failed(self, request: Request, backend: int, now_s: float) -> None:
        self._forget(request, backend)
        if self.retries:
            self._seen[backend].up = False  # as generous to all: out of rotation at the first failed connection

    def scraped(self, now_s: float) -> None:
        return

    def _forget(self, request: Request, backend: int) -> None:
        self._seen[backend].in_flight -= 1
        self._policy.ended(request, backend)


class FlowControl(AtOnce):
    """llm-d's flow control before a policy: nothing is sent on while the pool is saturated.

    Saturation is the average over the backends of max(waiting ÷ 5, KV use ÷ 0.8), as of the last scrape; at 1 and
    above requests wait, in turn between the keys, first come first served within each. A queue here has no bound in
    bytes, and no deadline: its defaults (1 GB, no TTL) are never met.
    """

    lazy = False

    def __init__(self, lab: Lab, policy: Policy, told: bool = False) -> None:
        super().__init__(lab, policy, told)
        self.name = f"{policy.name}, flow control"
        self._flows: OrderedDict[str, deque[Request]] = OrderedDict()

    def arrived(self, request: Request, now_s: float) -> None:
        self._flows.setdefault(request.session.key, deque()).append(request)
        self._dispatch(now_s)

    def finished(self, request: Request, backend: int, outcome: Outcome, now_s: float) -> None:
        super().finished(request, backend, outcome, now_s)
        self._dispatch(now_s)

    def scraped(self, now_s: float) -> None:
        self._dispatch(now_s)

    def _dispatch(self, now_s: float) -> None:
        while self._flows and self._saturation() < 1.0:
            key, waiting = self._flows.popitem(last=False)
            request = waiting.popleft()
            if waiting:
                self._flows[key] = waiting
            super().arrived(request, now_s)

    def _saturation(self) -> float:
        up = [seen for seen in self._seen if seen.up] or list(self._seen)
        return sum(max(seen.waiting / 5, seen.kv_usage / 0.8) for seen in up) / len(up)
