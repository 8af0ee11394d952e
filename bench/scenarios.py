"""What is sent to each target, and the samples that come of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.accounting import cpu_s, percentile, rss_bytes
from bench.bodies import Conversation, CountTokens, small
from bench.load import Connection, Request, Tally, connections, repeated, replay, request_head
from bench.targets import Target

STREAM_LANES = 32
SMALL_LANES = 8
LARGE_LANES = 3
LARGE_TOKENS = 60_000
GROWTH_BYTES = 2400

# Turns of a large conversation by use; each is sent once to each target.
COLD, WARM, STREAMED, ALONE = 0, range(1, 9), range(9, 11), range(11, 19)
TURNS = 18


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything. Seconds are those of one sample."""

    rounds: int
    small_s: float
    chunk_counts: tuple[int, ...]
    body_tokens: tuple[int, ...]
    single_requests: int
    idle_streams: int
    idle_s: float
    limit_s: float  # no further round begins that would not end before


FULL = Plan(3, 1.5, (20, 200, 400), (4_000, 16_000), 150, 500, 1.0, 230.0)
QUICK = Plan(1, 0.5, (20, 200), (16_000,), 60, 200, 0.3, 55.0)


@dataclass(slots=True)
class Samples:
    """By metric, then target: one value a sample. Names end in their unit."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)

    def add(self, metric: str, target: Target, value: float) -> None:
        """One more sample."""
        self.values.setdefault(metric, {}).setdefault(target.name, []).append(value)


class Scenarios:
    """Runs every scenario once a round against one target after another."""

    def __init__(self, plan: Plan, count_tokens: CountTokens) -> None:
        self._plan = plan
        self._count_tokens = count_tokens
        self.samples = Samples()
        self._small = small(count_tokens)
        self._streams = {chunks: small(count_tokens, chunks=chunks) for chunks in plan.chunk_counts}
        self._held = small(count_tokens, chunks=2, hold=True)
        self._seeds = itertools.count(1)

    @property
    def probe(self) -> Request:
        """A request every target must be able to answer."""
        return self._small

    async def round(self, targets: list[Target]) -> None:
        """Every scenario, the targets in turn within each, so that they meet the machine in the same moods."""
        plan = self._plan
        for target in targets:
            await self._idle(target)
        for target in targets:
            await self._small_requests(target)
        for chunks, request in self._streams.items():
            for target in targets:
                await self._streaming(target, chunks, request)
        for target in targets:
            await self._alone(target, "small", [self._small] * plan.single_requests)
        for tokens in plan.body_tokens:
            talks = self._conversations(tokens, len(WARM))
            for target in targets:
                await self._body_size(target, f"{tokens // 1000}k", talks)
        talks = self._conversations(LARGE_TOKENS, TURNS)
        self.samples.shapes["60k"] = (
            f"{talks[0].tokens[0]} to {talks[0].tokens[-1]} tokens, "
            f"{len(talks[0].request(0).body) // 1000} to {len(talks[0].request(TURNS).body) // 1000} kB"
        )
        for target in targets:
            await self._large(target, talks)

    async def memory_at_first(self, targets: list[Target]) -> None:
        """Memory of fresh processes, and of open streams, which later would fill what a load has left free."""
        self._memory("memory at the start, MB", targets)
        for target in targets:
            await self._open_streams(target)

    def memory_at_last(self, targets: list[Target]) -> None:
        """Memory after everything."""
        self._memory("memory after the load, MB", targets)

    def _memory(self, metric: str, targets: list[Target]) -> None:
        for target in targets:
            if target.pids:
                self.samples.add(metric, target, rss_bytes(target.pids) / 1e6)

    def _conversations(self, tokens: int, turns: int) -> list[Conversation]:
        return [
            Conversation(next(self._seeds), tokens, turns, GROWTH_BYTES, self._count_tokens) for _ in range(LARGE_LANES)
        ]

    async def _measured(self, target: Target, lanes: Sequence[Iterable[Request]], opened: list[Connection]) -> Tally:
        """Replay and return what was done, with the CPU it took the target."""
        tally = Tally()
        before_s = sum(cpu_s(pid) for pid in target.pids)
        await replay(target.port, lanes, tally, opened, target.count_source)
        tally.cpu_s = sum(cpu_s(pid) for pid in target.pids) - before_s
        return tally

    def _cpu(self, metric: str, target: Target, tally: Tally) -> float:
        cost_us = tally.cpu_s / tally.requests * 1e6
        if target.pids:
            self.samples.add(metric, target, cost_us)
        return cost_us

    async def _idle(self, target: Target) -> None:
        before_s = sum(cpu_s(pid) for pid in target.pids)
        await asyncio.sleep(self._plan.idle_s)
        if target.pids:
            used_s = sum(cpu_s(pid) for pid in target.pids) - before_s
            self.samples.add("idle, CPU ms per s", target, used_s / self._plan.idle_s * 1e3)

    async def _small_requests(self, target: Target) -> None:
        async with connections(target.port, SMALL_LANES) as opened:
            await replay(target.port, [[self._small] * 5] * SMALL_LANES, Tally(), opened)
            lanes: list[Iterable[Request]] = [repeated(self._small, self._plan.small_s)() for _ in opened]
            tally = await self._measured(target, lanes, opened)
        self._cpu("small, CPU us per request", target, tally)
        self.samples.add("small, requests/s seen", target, tally.requests / tally.wall_s)

    async def _streaming(self, target: Target, chunks: int, request: Request) -> None:
        repeats = max(1, 100 // chunks)
        async with connections(target.port, STREAM_LANES) as opened:
            warm = self._streams[min(self._streams)]
            await replay(target.port, [[warm]] * STREAM_LANES, Tally(), opened)
            tally = await self._measured(target, [[request] * repeats] * STREAM_LANES, opened)
        cost_us = self._cpu(f"stream of {chunks}, CPU us per stream", target, tally)
        if target.pids:
            self.samples.add(f"stream of {chunks}, CPU us per chunk", target, cost_us / chunks)
        self.samples.add(f"stream of {chunks}, chunks per read", target, tally.events / tally.reads)

    async def _alone(self, target: Target, name: str, requests: Iterable[Request]) -> None:
        async with connections(target.port, 1) as opened:
            await replay(target.port, [[self._small] * 5], Tally(), opened)
            tally = await self._measured(target, [requests], opened)
        self._latencies(target, name, tally)

    def _latencies(self, target: Target, name: str, tally: Tally) -> None:
        self.samples.add(f"{name} alone, p50 us", target, percentile(tally.latencies_s, 0.5) * 1e6)
        self.samples.add(f"{name} alone, p99 us", target, percentile(tally.latencies_s, 0.99) * 1e6)

    async def _body_size(self, target: Target, name: str, talks: list[Conversation]) -> None:
        async with connections(target.port, len(talks)) as opened:
            await replay(target.port, [[talk.request(COLD)] for talk in talks], Tally(), opened)
            tally = await self._measured(target, [_turns(talk, WARM) for talk in talks], opened)
        self._cpu(f"{name} turn, CPU us per request", target, tally)

    async def _large(self, target: Target, talks: list[Conversation]) -> None:
        async with connections(target.port, len(talks)) as opened:
            first = await self._measured(target, [[talk.request(COLD)] for talk in talks], opened)
            self._cpu("60k first turn, CPU us per request", target, first)
            tally = await self._measured(target, [_turns(talk, WARM) for talk in talks], opened)
            self._cpu("60k turn, CPU us per request", target, tally)
            self.samples.add("60k turn, requests/s seen", target, tally.requests / tally.wall_s)
            streamed = await self._measured(target, [_turns(talk, STREAMED, 200) for talk in talks], opened)
            self._cpu("60k stream of 200, CPU us per stream", target, streamed)
        requests = (talk.request(turn) for turn in ALONE for talk in talks)
        await self._alone(target, "60k turn", requests)

    async def _open_streams(self, target: Target) -> None:
        """Memory for each stream that is open and silent.

        Not of a gateway with a tokenizer: loading it leaves free memory that the streams fill before any shows.
        """
        if not target.pids or target.count_source == "local":
            return
        head = request_head(target.port, len(self._held.body))
        before = rss_bytes(target.pids)
        async with connections(target.port, self._plan.idle_streams) as opened:
            for some in _batches(opened, 50):
                await asyncio.gather(*(connection.open_stream(head, self._held.body) for connection in some))
            await asyncio.sleep(0.3)
            grown = rss_bytes(target.pids) - before
        self.samples.add("open silent stream, kB", target, grown / self._plan.idle_streams / 1e3)


def _turns(talk: Conversation, turns: Iterable[int], chunks: int = 0) -> Iterator[Request]:
    return (talk.request(turn, chunks=chunks) for turn in turns)


def _batches(items: list[Connection], size: int) -> Iterator[list[Connection]]:
    return (items[start : start + size] for start in range(0, len(items), size))
