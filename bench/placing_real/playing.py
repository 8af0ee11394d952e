"""Clients: so many conversations at a time, each of which waits for its answer, pauses and asks again."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.placing_real.conversations import Conversation, body
from bench.placing_real.figures import Reading, Run, Seen
from bench.placing_real.fronts import Front
from bench.placing_real.servers import MODEL, Server

REQUEST_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Pace:
    """``clients`` converse at the same time; ``pause_s``: mean pause of an agent between answer and next request."""

    clients: int = 10
    pause_s: float = 0.5
    budget_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class Trace:
    """One request: moments in seconds since the run began, and what the gateway's headers said, if it was one."""

    conversation: int
    messages: int
    sent_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    headers: dict[str, str]


class _Failed(Exception):
    """The answer was an error; the message is its kind."""


class Clients:
    """Plays conversations to a front. ``end_token`` ends an answer."""

    def __init__(self, session: aiohttp.ClientSession, front: Front, pace: Pace, end_token: int, seed: int) -> None:
        self.seen = Seen()
        self.traces: list[Trace] = []
        self._started_s = 0.0
        self._session = session
        self._front = front
        self._pace = pace
        self._end_token = end_token
        self._seed = seed

    async def play(self, conversations: Sequence[Conversation]) -> None:
        """All of them; the next begins when one has ended."""
        self.seen.conversations = len(conversations)
        left = iter(list(enumerate(conversations)))
        self._started_s = time.monotonic()

        async def client(number: int) -> None:
            await asyncio.sleep(number * self._pace.pause_s / 2)
            for place, conversation in left:
                await self._converse(place, conversation)

        await asyncio.gather(*(client(number) for number in range(self._pace.clients)))
        self.seen.wall_s = time.monotonic() - self._started_s

    async def _converse(self, number: int, conversation: Conversation) -> None:
        dice = random.Random(self._seed * 10_007 + number)  # the same pauses with every front
        for ask in conversation.asks:
            document = body(conversation, ask, MODEL, self._pace.budget_tokens, self._end_token)
            self.seen.requests += 1
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await self._ask(number, self._front.url_of(number), document)
            except _Failed as error:
                self.seen.failures[str(error)] += 1
                return
            except (aiohttp.ClientError, TimeoutError) as error:
                self.seen.failures[type(error).__name__] += 1
                return
            await asyncio.sleep(dice.expovariate(1 / self._pace.pause_s))
        self.seen.finished += 1

    async def _ask(self, number: int, url: str, document: dict[str, Any]) -> None:
        sent_s = time.monotonic()
        first_s: float | None = None
        usage: dict[str, Any] = {}
        async with self._session.post(f"{url}/v1/chat/completions", json=document) as response:
            if response.status != 200:
                raise _Failed(f"{response.status} {kind_of(await response.text())}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue  # comments keep a waiting stream alive
                event = json.loads(line[6:])
                if "error" in event:
                    raise _Failed(f"200, then {kind_of(line[6:].decode())}")
                if first_s is None and any(says_something(choice) for choice in event.get("choices") or ()):
                    first_s = time.monotonic()
                usage = event.get("usage") or usage
        if first_s is None:
            raise _Failed("200 and nothing said")
        self.seen.first_token_s.append(first_s - sent_s)
        self.seen.output_tokens += usage.get("completion_tokens") or 0
        sent_s, first_s, ended_s = (
            round(moment - self._started_s, 3) for moment in (sent_s, first_s, time.monotonic())
        )
        self.traces.append(
            Trace(
                conversation=number,
                messages=len(document["messages"]),
                sent_s=sent_s,
                first_s=first_s,
                ended_s=ended_s,
                prompt_tokens=usage.get("prompt_tokens") or 0,
                cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
                output_tokens=usage.get("completion_tokens") or 0,
                headers={
                    name: value for name, value in response.headers.items() if name.lower().startswith("x-kvgate")
                },
            )
        )


def says_something(choice: dict[str, Any]) -> bool:
    """Whether a chunk has any of an answer, and not only its role."""
    delta = choice.get("delta") or {}
    return bool(
        delta.get("content") or delta.get("reasoning") or delta.get("tool_calls") or choice.get("finish_reason")
    )


def kind_of(text: str) -> str:
    """An error in few words: its code or type, and the beginning of what it says."""
    try:
        document = json.loads(text)
    except ValueError:
        return text[:60]
    error = document.get("error", document) if isinstance(document, dict) else {}
    error = error if isinstance(error, dict) else {"message": str(error)}
    return f"{error.get('type') or error.get('code')}: {str(error.get('message'))[:60]}"


async def run(
    name: str,
    front: Front,
    servers: tuple[Server, Server],
    conversations: Sequence[Conversation],
    pace: Pace,
    end_token: int,
    seed: int,
) -> tuple[Run, list[Trace]]:
    """Play the conversations to a front and read the servers' counters before and after; all answered requests."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
        before = [await _read(session, server) for server in servers]
        clients = Clients(session, front, pace, end_token, seed)
        await clients.play(conversations)
        after = [await _read(session, server) for server in servers]
    done = Run(name, clients.seen, tuple(now.since(then) for now, then in zip(after, before, strict=True)))
    return done, clients.traces


async def _read(session: aiohttp.ClientSession, server: Server) -> Reading:
    async with session.get(f"{server.url}/metrics") as response:
        return Reading.of(await response.text())
