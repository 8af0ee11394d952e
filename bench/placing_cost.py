"""What one placement decision costs in CPU, by the number of backends and of requests that wait.

``python -m bench.placing_cost`` runs the gateway's own gate, placer and ledgers, without sockets: what is timed is all
that happens between "this request fits these windows" and "it holds a place there" (or waits).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

from gateway.config import BackendSettings, FleetSettings, PlacingSettings
from gateway.fleet.backend import WatchedBackend
from gateway.fleet.capacity import KvCapacity
from gateway.fleet.discovery import ModelCard
from gateway.fleet.fleet import Backend
from gateway.fleet.reservation import Reservation
from gateway.fleet.targets import Target
from gateway.relay.gate import Gate
from gateway.relay.lease import Lease
from gateway.types import BackendView, LoadView, Need, Offer, Wish

BLOCKS, BLOCK_TOKENS, WINDOW = 2100, 16, 32768
PROMPT_TOKENS = 4000
ROUNDS = 2
BATCH = 4
BACKENDS = (2, 8, 32, 64, 128)
WAITING = (100, 1000)
# Conversations: how many each backend has in its cache, links of their prompts, and those of the beginning that all of
# them share. A link is so many tokens; the cache has room for all of them.
CONVERSATIONS, LINKS, SHARED_LINKS, LINK_TOKENS = 20, 60, 20, 250
CONVERSATION_BLOCKS = 20_000


class Stand:
    """A fleet of watched backends that nobody watches: real ledgers, breakers and views, no network. Each has so many
    ``engines``, and is placed on as a whole, or by engine if they are ``pinned``."""

    def __init__(self, count: int, engines: int = 1, pinned: bool = False, blocks: int = BLOCKS) -> None:
        self.touched: set[str] = set()
        self.loaded: set[str] = set()
        self.at: dict[str, Target] = {}
        loop = asyncio.get_running_loop()
        for number in range(count):
            settings = BackendSettings(url=f"http://10.0.0.{number}:8000", pin_ranks=pinned)
            item = WatchedBackend(settings, FleetSettings(), loop.time, lambda: None, self.touch, self.load)
            item.found((ModelCard("m", None, None, WINDOW),), KvCapacity(engines, blocks, BLOCK_TOKENS))
            item.engines.begin_scrape()
            item.engines.reconcile([0] * engines, [0] * engines, loop.time())
            for target in item.targets:
                self.at[target.name] = target
        self.touched.update(self.at)

    def touch(self, target: Target, resting: bool) -> None:
        self.touched.add(target.name)

    def load(self, target: Target) -> None:
        self.loaded.add(target.name)

    def views(self, now_s: float) -> Mapping[str, BackendView]:
        return {name: item.view(now_s) for name, item in self.at.items()}

    def changed(self, now_s: float) -> list[BackendView | LoadView]:
        touched, self.touched = self.touched, set()
        loaded, self.loaded = self.loaded, set()
        told: list[BackendView | LoadView] = [self.at[name].view(now_s) for name in touched]
        return told + [self.at[name].load(now_s) for name in loaded if name not in touched]

    def reserve(
        self,
        name: str,
        need: Need,
        budget_tokens: int | None,
        cached_tokens: int = 0,
        timed: bool = False,
        chain: tuple[tuple[int, int], ...] = (),
        rank: int | None = None,
        heeded: bool = True,
    ) -> Reservation:
        target = self.at[name]
        return target.backend.reserve(need, budget_tokens, cached_tokens, timed, chain, target.rank)

    def backend(self, name: str) -> Backend:
        return Backend(name, self.at[name].backend.url, None, None, 0.0)

    def offers(self) -> tuple[Offer, ...]:
        return tuple(Offer(name, WINDOW, 1000, False) for name in self.at)


async def at_once(stand: Stand, requests: int = 400) -> float:
    """A request that finds room: from its offers to its lease. Microseconds, the median of many."""
    stand.touched.update(stand.at)
    gate = Gate(stand, PlacingSettings())
    offers = stand.offers()
    leases: list[Lease] = []
    took_ns: list[int] = []
    for _ in range(requests // BATCH):
        started = time.process_time_ns()
        leases += [await gate.enter(offers, PROMPT_TOKENS, model="m") for _ in range(BATCH)]
        took_ns.append(time.process_time_ns() - started)
        for lease in leases:
            lease.first_byte()
        while len(leases) > 4 * len(stand.at):
            leases.pop(0).release()
    for lease in leases:
        lease.release()
    return statistics.median(took_ns) / BATCH / 1000


async def with_a_queue(stand: Stand, waiting: int, requests: int = 200) -> tuple[float, float]:
    """Microseconds of an arrival that has to wait, and of a release that lets the first of the queue go."""
    stand.touched.update(stand.at)
    gate = Gate(stand, PlacingSettings(queue_max_requests=waiting + requests + 1))
    offers = stand.offers()
    holders = []
    while gate.stats()["waiting_requests"] == 0:
        task = asyncio.create_task(gate.enter(offers, PROMPT_TOKENS, model="m"))
        await asyncio.sleep(0)
        gate.decide()
        if task.done():
            holders.append(task.result())
    queue = [task] + [asyncio.create_task(gate.enter(offers, PROMPT_TOKENS, model="m")) for _ in range(waiting - 1)]
    await asyncio.sleep(0)
    arrivals_us: list[float] = []
    for _ in range(requests):
        coroutine = gate.enter(offers, PROMPT_TOKENS, model="m")
        started = time.process_time_ns()
        coroutine.send(None)
        arrivals_us.append((time.process_time_ns() - started) / 1000)
        coroutine.close()
    await asyncio.sleep(0)
    releases_us: list[float] = []
    for task in queue[: min(requests, waiting)]:
        holder = holders.pop(0)
        started = time.process_time_ns()
        holder.release()
        gate.decide()
        releases_us.append((time.process_time_ns() - started) / 1000)
        holders.append(await task)
    for task in queue:
        task.cancel()
    for lease in holders:
        lease.release()
    await asyncio.sleep(0)
    return statistics.median(arrivals_us), statistics.median(releases_us)


def prompt(conversation: int) -> tuple[tuple[int, int], ...]:
    """The chain of a conversation's prompt; the first links are those of every other."""
    links = [link if link <= SHARED_LINKS else conversation << 32 | link for link in range(1, LINKS + 1)]
    return tuple((hash((link, "link")) & (1 << 63) - 1, number * LINK_TOKENS) for number, link in enumerate(links, 1))


async def conversations(stand: Stand, requests: int = 400) -> float:
    """The next turns of conversations that all have begun, each on a backend of its own, while others are answered.
    From its offers to its lease. Microseconds, the median of many."""
    stand.touched.update(stand.at)
    gate = Gate(stand, PlacingSettings())
    offers = stand.offers()
    prompts = [prompt(number) for number in range(1, CONVERSATIONS * len(offers) + 1)]
    for number, chain in enumerate(prompts):
        wish = Wish(chain=chain, streamed=True)
        lease = await gate.enter((offers[number % len(offers)],), chain[-1][1] + 40, model="m", wish=wish)
        lease.first_byte()
        lease.release()
    random.Random(7).shuffle(prompts)
    turns = [Wish(chain=(*chain, (chain[-1][0] ^ 1, (LINKS + 1) * LINK_TOKENS)), streamed=True) for chain in prompts]
    leases: list[Lease] = []
    took_ns: list[int] = []
    for first in range(0, requests, BATCH):
        batch = [turns[number % len(turns)] for number in range(first, first + BATCH)]
        started = time.process_time_ns()
        leases += [await gate.enter(offers, wish.chain[-1][1] + 40, model="m", wish=wish) for wish in batch]
        took_ns.append(time.process_time_ns() - started)
        for lease in leases[-BATCH:]:
            lease.first_byte()
        while len(leases) > 4 * len(stand.at):
            leases.pop(0).release()
    for lease in leases:
        lease.release()
    return statistics.median(took_ns) / BATCH / 1000


async def measure_one(backends: int, engines: int, pinned: bool) -> dict[str, Any]:
    """The best of some rounds: other processes can only add to it."""
    stand = Stand(backends, engines, pinned)
    row: dict[str, Any] = {"backends": backends}
    row["at_once_us"] = min([await at_once(stand) for _ in range(ROUNDS)])
    talks = Stand(backends, engines, pinned, CONVERSATION_BLOCKS)
    row["conversation_us"] = min([await conversations(talks) for _ in range(ROUNDS)])
    for waiting in WAITING:
        pairs = [await with_a_queue(stand, waiting) for _ in range(ROUNDS)]
        row[f"arrival_behind_{waiting}_us"] = min(pair[0] for pair in pairs)
        row[f"release_of_{waiting}_us"] = min(pair[1] for pair in pairs)
    return row


def main() -> None:
    """Print a table, row by row, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--engines", type=int, default=1, help="engines of each backend (default %(default)s)")
    parser.add_argument("--backends", type=int, action="append", help="only with so many backends (repeatable)")
    parser.add_argument("--pin-ranks", action="store_true", help="place on engines instead of backends")
    options = parser.parse_args()
    as_json = options.json
    rows: list[dict[str, Any]] = []
    for backends in options.backends or BACKENDS:
        row = asyncio.run(measure_one(backends, options.engines, options.pin_ranks))
        if not as_json:
            if not rows:
                print("CPU microseconds of one decision (medians, best of rounds)")
                print("  ".join(f"{name.removesuffix('_us'):>20}" for name in row))
            print("  ".join(f"{value:>20.1f}" if name != "backends" else f"{value:>20}" for name, value in row.items()))
        rows.append(row)
    if as_json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
