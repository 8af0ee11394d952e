"""Who waits for a place: the requests by arrival, what they weigh, and how fast the queue drains. Decides nothing."""

from __future__ import annotations

import asyncio

from gateway.config import PlacingSettings
from gateway.exceptions import GatewayError
from gateway.relay.lease import Lease
from gateway.types import Waiter

LEAST_RETRY_S = 1.0
MOST_RETRY_S = 59.0  # clients ignore hints of a minute and more
UNMEASURED_RETRY_S = 10.0
# Weight of the newest gap between two placements out of the queue in the drain rate.
DRAIN_WEIGHT = 0.1


class Queued:
    """One request: what the placer sees of it, and the future it waits on."""

    __slots__ = ("body_bytes", "error", "future", "lease", "tokens", "waiter")

    def __init__(self, waiter: Waiter, body_bytes: int) -> None:
        self.waiter = waiter
        self.body_bytes = body_bytes
        self.tokens = waiter.groups[0].need.prompt_tokens if waiter.groups else 0
        self.future: asyncio.Future[None] | None = None
        self.lease: Lease | None = None
        self.error: GatewayError | None = None

    @property
    def settled(self) -> bool:
        """Whether it was placed or refused."""
        return self.lease is not None or self.error is not None

    def tell(self) -> None:
        """Wake who waits; a fresh arrival has nobody waiting yet."""
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class Queue:
    """The requests that were neither placed nor refused yet, by sequence, which is the order of arrival."""

    def __init__(self, settings: PlacingSettings) -> None:
        self._settings = settings
        self._requests: dict[int, Queued] = {}
        self.bytes = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, sequence: int) -> Queued:
        return self._requests[sequence]

    def get(self, sequence: int) -> Queued | None:
        """The request of that number, if it is still here."""
        return self._requests.get(sequence)

    def all(self) -> list[Queued]:
        """Everybody, in the order of arrival."""
        return list(self._requests.values())

    def add(self, entry: Queued) -> None:
        """A request arrives."""
        self._requests[entry.waiter.sequence] = entry
        self.bytes += entry.body_bytes
        self.tokens += entry.tokens

    def pop(self, entry: Queued) -> bool:
        """A request leaves. Whether it was here."""
        if self._requests.pop(entry.waiter.sequence, None) is None:
            return False
        self.bytes -= entry.body_bytes
        self.tokens -= entry.tokens
        return True

    def is_overfull(self) -> bool:
        """Whether more waits than may: in requests, bytes or prompt tokens."""
        settings = self._settings
        return (
            len(self._requests) > settings.queue_max_requests
            or self.bytes > settings.queue_max_bytes
            or self.tokens > settings.queue_max_tokens
        )

    def surplus(self, entry: Queued) -> list[Queued]:
        """Who has to go of a queue that is overfull since ``entry`` came: the newest of the flow that has most of what
        is too much, as long as that has more of it than the newcomer's; else the newcomer, alone. So one flow may fill
        the queue, but not keep others out of it. Who was placed before stays."""
        settings, weigh = self._settings, _tokens
        if len(self._requests) > settings.queue_max_requests:
            weigh = _one
        elif self.bytes > settings.queue_max_bytes:
            weigh = _bytes
        too_much = (
            len(self._requests) - settings.queue_max_requests,
            self.bytes - settings.queue_max_bytes,
            self.tokens - settings.queue_max_tokens,
        )
        shares: dict[str, int] = {}
        waiting: dict[str, list[Queued]] = {}
        for each in self._requests.values():
            flow = each.waiter.flow
            shares[flow] = shares.get(flow, 0) + weigh(each)
            if each.waiter.tag is None:
                waiting.setdefault(flow, []).append(each)
        own = shares[entry.waiter.flow]
        gone: list[Queued] = []
        while max(left - freed for left, freed in zip(too_much, _sums(gone), strict=True)) > 0:
            largest = max(waiting, key=shares.__getitem__, default=entry.waiter.flow)
            if shares[largest] <= own or not waiting[largest]:
                return [entry]
            gone.append(waiting[largest].pop())
            shares[largest] -= weigh(gone[-1])
        return gone

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the first to come has waited; 0 if nobody waits."""
        first = next(iter(self._requests.values()), None)
        return 0.0 if first is None else now_s - first.waiter.arrived_s


def _one(entry: Queued) -> int:
    return 1


def _bytes(entry: Queued) -> int:
    return entry.body_bytes


def _tokens(entry: Queued) -> int:
    return entry.tokens


def _sums(entries: list[Queued]) -> tuple[int, int, int]:
    """Requests, bytes and tokens of all of them."""
    return len(entries), sum(map(_bytes, entries)), sum(map(_tokens, entries))


class DrainRate:
    """The mean gap between two placements while requests wait: what a hint when to come back is made of."""

    __slots__ = ("_gap_s", "_last_s")

    def __init__(self) -> None:
        self._gap_s: float | None = None
        self._last_s: float | None = None

    @property
    def per_s(self) -> float:
        """Placements a second; 0 before there were two."""
        return 1.0 / self._gap_s if self._gap_s else 0.0

    def note(self, now_s: float) -> None:
        """A request that waited was placed."""
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            known_s = gap_s if self._gap_s is None else self._gap_s
            self._gap_s = known_s + DRAIN_WEIGHT * (gap_s - known_s)
        self._last_s = now_s

    def rest(self) -> None:
        """Nobody waits: the time until somebody does tells nothing."""
        self._last_s = None

    def retry_after_s(self, ahead: int) -> float:
        """Seconds until ``ahead`` requests will be through."""
        if self._gap_s is None:
            return UNMEASURED_RETRY_S
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, ahead * self._gap_s))
