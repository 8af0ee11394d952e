"""A load for a real vLLM server, what became of it there, and what becomes of it in the simulated engine.

Conversations of a fixed seed grow turn by turn in a cache that is too small for them. They are of token ids, so that
nothing depends on a tokenizer, and what the server answers is part of the next prompt. They are played twice:

- in *waves*: the server is paused, one turn of every conversation is queued, it is resumed and runs until all have
  ended. What happens then depends on its scheduler alone, so the simulated engine must do exactly the same;
- *freely*: each conversation goes on by itself, after pauses. The simulated engine gets the same requests at the same
  moments, at the rates that fit best, and must come to nearly the same totals.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from e2e_metrics import Page
from scheduler_loads import Limits

from gateway.simulator.clock import play
from gateway.simulator.engine import Engine, EngineConfig, EngineRequest

# A prime below the vocabulary's size: pieces of different numbers differ, and no id is a special token.
VOCABULARY = 149_993
LIMITS = Limits(blocks=97, block_tokens=32, window_tokens=2560, sequences=16, batched_tokens=512)

# Rates that a fit chooses from: CPUs differ, and so does what else they have to do.
PREFILL_TRIED = (4_000.0, 8_000.0, 16_000.0, 32_000.0, 64_000.0)
DECODE_TRIED = tuple(round(20 * 1.15**power, 1) for power in range(20))

# Between two requests of a wave, so that the server queues them in this order.
APART_S = 0.03


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: tokens new to the conversation, tokens of the answer, and the pause before it."""

    new_tokens: int
    output_tokens: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, which begins with ``shared_tokens`` of a document."""

    document: int
    shared_tokens: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """One request as the server answered it. Times in seconds since the load began."""

    talk: int
    turn: int
    sent_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """The server's counters, as differences. Prefix cache in tokens."""

    preemptions: int
    queries_tokens: int
    hits_tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What the server does in a second: tokens of prompts, and steps that only decode."""

    prefill_tokens_per_s: float
    decode_steps_per_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """One way of playing the load. Requests in the order in which they were sent."""

    served: tuple[Served, ...]
    totals: Totals


@dataclass(frozen=True, slots=True)
class Recording:
    """Both ways, of one server."""

    vllm_version: str
    limits: Limits
    talks: tuple[Talk, ...]
    rates: Rates
    waves: Part
    free: Part


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the simulated engine made of a part. ``first_step``: number of the step with the first token."""

    totals: Totals
    cached_tokens: tuple[int, ...]
    first_step: tuple[int, ...]


def conversations(seed: int, talks: int = 16) -> tuple[Talk, ...]:
    """Agents on two shared beginnings that grow for several turns, chats of few turns, and long questions."""
    draw = random.Random(seed)
    found = []
    for number in range(talks):
        kind = ("agent", "agent", "chat", "question")[number % 4]
        if kind == "agent":
            shared, turns = 260 + 130 * (number % 2), draw.randint(4, 6)
            sizes = [(draw.randint(40, 220), draw.randint(20, 160)) for _ in range(turns)]
        elif kind == "chat":
            shared, turns = 64, draw.randint(2, 4)
            sizes = [(draw.randint(15, 60), draw.randint(120, 280)) for _ in range(turns)]
        else:
            shared, sizes = 0, [(draw.randint(most // 2, most), draw.randint(20, 80)) for most in (1100, 300, 300)]
        pauses = [round(draw.uniform(0.0, 0.5), 3) for _ in sizes]
        found.append(
            Talk(number % 2, shared, tuple(Turn(*size, pause) for size, pause in zip(sizes, pauses, strict=True)))
        )
    return tuple(found)


def prompt_of(talks: Sequence[Talk], talk: int, answers: Sequence[Sequence[int]]) -> list[int]:
    """The prompt of the turn after ``answers``."""
    prompt = _piece(talks[talk].document, talks[talk].shared_tokens)
    for turn in range(len(answers) + 1):
        prompt += _piece(100 + 10 * talk + turn, talks[talk].turns[turn].new_tokens)
        prompt += list(answers[turn]) if turn < len(answers) else []
    return prompt


def _piece(number: int, tokens: int) -> list[int]:
    start = number * 15_485_863
    return [(start + at * 32_452_843) % VOCABULARY for at in range(tokens)]


# ------------------------------------------------------------------------------------------------ against a server


class Player:
    """Plays conversations to one server that was started with ``VLLM_SERVER_DEV_MODE=1``."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, talks: tuple[Talk, ...]) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._talks = talks
        self._started_s = 0.0

    async def waves(self) -> Part:
        """One turn of every conversation at a time."""
        answers: list[list[tuple[int, ...]]] = [[] for _ in self._talks]
        served: list[Served] = []
        before = await self._begin()
        while True:
            pending = [number for number, talk in enumerate(self._talks) if len(answers[number]) < len(talk.turns)]
            if not pending:
                break
            await self._post("/pause?mode=keep&clear_cache=false")
            tasks = []
            for number in pending:
                turn = len(answers[number])
                prompt = prompt_of(self._talks, number, answers[number])
                wanted = self._talks[number].turns[turn].output_tokens
                tasks.append(asyncio.create_task(self._ask(prompt, wanted, number, turn)))
                await asyncio.sleep(APART_S)
            await self._post("/resume")
            for one in await asyncio.gather(*tasks):
                answers[one.talk].append(one.output)
                served.append(one)
        return Part(tuple(served), await self._since(before))

    async def free(self) -> Part:
        """Every conversation at its own pace."""
        before = await self._begin()
        found = await asyncio.gather(*(self._talk(number) for number in range(len(self._talks))))
        served = sorted((one for ones in found for one in ones), key=lambda one: one.sent_s)
        return Part(tuple(served), await self._since(before))

    async def _talk(self, number: int) -> list[Served]:
        served: list[Served] = []
        for turn, wish in enumerate(self._talks[number].turns):
            await asyncio.sleep(wish.pause_s)
            prompt = prompt_of(self._talks, number, [one.output for one in served])
            served.append(await self._ask(prompt, wish.output_tokens, number, turn))
        return served

    async def _ask(self, prompt: list[int], output_tokens: int, talk: int, turn: int) -> Served:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        sent_s = time.monotonic()
        first_s: float | None = None
        output: list[int] = []
        usage: dict[str, Any] = {}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                tokens = [token for choice in event["choices"] for token in choice.get("token_ids") or []]
                if tokens and first_s is None:
                    first_s = time.monotonic()
                output += tokens
        ended_s = time.monotonic()
        if len(output) != output_tokens:
            raise RuntimeError(f"{len(output)} tokens of {output_tokens}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        moments = (round(moment - self._started_s, 4) for moment in (sent_s, first_s or ended_s, ended_s))
        return Served(talk, turn, *moments, usage["prompt_tokens"], cached, tuple(output))

    async def _begin(self) -> Totals:
        await self._post("/reset_prefix_cache")
        self._started_s = time.monotonic()
        return await self._totals()

    async def _since(self, before: Totals) -> Totals:
        after = await self._totals()
        return Totals(
            after.preemptions - before.preemptions,
            after.queries_tokens - before.queries_tokens,
            after.hits_tokens - before.hits_tokens,
        )

    async def _totals(self) -> Totals:
        async with self._session.get(f"{self._url}/metrics") as response:
            page = Page(await response.text())
        names = ("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
        return Totals(*(int(page.sum(f"vllm:{name}")) for name in names))

    async def _post(self, path: str) -> None:
        async with self._session.post(self._url + path) as response:
            response.raise_for_status()
            await response.read()


async def record(url: str, model: str, talks: tuple[Talk, ...], limits: Limits = LIMITS) -> Recording:
    """Play ``talks`` to the server both ways."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
        player = Player(session, url, model, talks)
        async with session.get(f"{url}/version") as response:
            version = (await response.json())["version"]
        waves, free = await player.waves(), await player.free()
        return fitted(Recording(version, limits, talks, Rates(20_000.0, 100.0), waves, free))


# ---------------------------------------------------------------------------------------- in the simulated engine


def _engine(recording: Recording) -> Engine:
    limits = recording.limits
    return Engine(
        EngineConfig(
            num_gpu_blocks=limits.blocks,
            block_size_tokens=limits.block_tokens,
            max_model_len_tokens=limits.window_tokens,
            max_num_seqs=limits.sequences,
            max_num_batched_tokens=limits.batched_tokens,
            prefill_tokens_per_s=recording.rates.prefill_tokens_per_s,
            decode_tokens_per_s=recording.rates.decode_steps_per_s,
        )
    )


def _requests(recording: Recording, part: Part) -> list[EngineRequest]:
    said = {(one.talk, one.turn): one.output for one in part.served}
    return [
        EngineRequest(
            str(number),
            prompt_of(recording.talks, one.talk, [said[one.talk, turn] for turn in range(one.turn)]),
            one.output,
        )
        for number, one in enumerate(part.served)
    ]


def replay_waves(recording: Recording) -> Replayed:
    """The waves in the simulated engine. Requests of a wave have the same turn."""
    engine = _engine(recording)
    requests = _requests(recording, recording.waves)
    notes = _Notes(len(requests))
    for turn in range(max(one.turn for one in recording.waves.served) + 1):
        for one, request in zip(recording.waves.served, requests, strict=True):
            if one.turn == turn:
                engine.add(request, notes.steps)
        while engine.has_work:
            notes.take(engine.step(notes.steps).outputs)
    return notes.replayed(engine)


def replay_free(recording: Recording) -> Replayed:
    """The free part in the simulated engine, each request at the moment at which it was sent."""
    engine = _engine(recording)
    requests = _requests(recording, recording.free)
    notes = _Notes(len(requests))
    moments = [one.sent_s for one in recording.free.served]
    for step in play(engine, zip(moments, requests, strict=True)):
        notes.take(step.outputs)
    return notes.replayed(engine)


def fitted(recording: Recording) -> Recording:
    """With the rates at which the free part's requests end in the simulated engine when they ended at the server."""

    def error_s(rates: Rates) -> float:
        tried = replace(recording, rates=rates)
        engine = _engine(tried)
        ended = {}
        requests = _requests(tried, recording.free)
        for step in play(engine, zip((one.sent_s for one in recording.free.served), requests, strict=True)):
            ended.update({int(done.request_id): done.finished_s for done in step.finished})
        return sum(abs(ended[number] - one.ended_s) for number, one in enumerate(recording.free.served))

    tried = [Rates(prefill, decode) for prefill in PREFILL_TRIED for decode in DECODE_TRIED]
    return replace(recording, rates=min(tried, key=error_s))


class _Notes:
    """What is kept of each step."""

    def __init__(self, requests: int) -> None:
        self.steps = 0
        self._cached = [0] * requests
        self._first: dict[int, int] = {}

    def take(self, outputs: Sequence[Any]) -> None:
        self.steps += 1
        for output in outputs:
            number = int(output.request_id)
            self._first.setdefault(number, self.steps)
            self._cached[number] = output.cached_tokens

    def replayed(self, engine: Engine) -> Replayed:
        counters = engine.counters
        totals = Totals(counters.preemptions, counters.prefix_queries_tokens, counters.prefix_hits_tokens)
        return Replayed(totals, tuple(self._cached), tuple(self._first[number] for number in range(len(self._cached))))


def swapped(part: Part, replayed: Replayed) -> tuple[int, int]:
    """Pairs of requests whose first tokens came in one order there and in the other here, and all pairs."""
    pairs = wrong = 0
    for one in range(len(part.served)):
        for other in range(one):
            gap = replayed.first_step[one] - replayed.first_step[other]
            if gap:
                pairs += 1
                wrong += gap * (part.served[one].first_s - part.served[other].first_s) < 0
    return wrong, pairs


# ------------------------------------------------------------------------------------------------------- on disk


def save(recording: Recording, path: Path) -> None:
    """One line for the load and the totals, one for each request."""
    document = asdict(recording)
    lines: list[Any] = []
    for name in ("waves", "free"):
        lines += [{"part": name, **one} for one in document[name].pop("served")]
    text = [json.dumps(line, separators=(",", ":")) for line in (document, *lines)]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def load(path: Path) -> Recording:
    """What ``save`` wrote."""
    head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    served: dict[str, list[Served]] = {"waves": [], "free": []}
    for line in lines:
        served[line.pop("part")].append(Served(**{**line, "output": tuple(line["output"])}))
    parts = {name: Part(tuple(served[name]), Totals(**head[name]["totals"])) for name in served}
    talks = tuple(Talk(**{**talk, "turns": tuple(Turn(**turn) for turn in talk["turns"])}) for talk in head["talks"])
    return Recording(
        head["vllm_version"], Limits(**head["limits"]), talks, Rates(**head["rates"]), parts["waves"], parts["free"]
    )
