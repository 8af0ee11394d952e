"""Random loads for a scheduler, and a player that runs one step by step: the same code for vLLM's and for ours.

Needs nothing but the standard library, since it runs in vLLM's environment, too. Time is counted in steps, so a load's
outcome depends on the scheduler alone, not on the machine.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

STEPS_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler is given: vLLM's ``num_gpu_blocks``, ``block_size``, ``max_model_len`` and so on."""

    blocks: int
    block_tokens: int
    window_tokens: int
    sequences: int
    batched_tokens: int
    caching: bool = True
    whole_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: new tokens after all that was said, an answer; ``gone_after``: steps until abort."""

    new_tokens: int
    output_tokens: int
    pause_steps: int
    gone_after: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """A client. Its first prompt begins with ``shared_tokens`` of document ``document``."""

    starts_at: int
    document: int
    shared_tokens: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the scheduler, and when."""

    limits: Limits
    sessions: tuple[Session, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did: tokens computed by request in the order they were scheduled, and whom it preempted."""

    scheduled: tuple[tuple[str, int], ...]
    preempted: tuple[str, ...]
    sampled: tuple[str, ...]
    finished: tuple[str, ...]
    used_blocks: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters at the end, prefix cache in tokens, and each request's cached tokens."""

    preemptions: int
    queries_tokens: int
    hits_tokens: int
    cached_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a load. ``digest`` is over all its steps."""

    steps: int
    digest: str
    totals: Totals


class Scheduler(Protocol):
    """What is compared."""

    def add(self, request_id: str, prompt: list[int], output: list[int]) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def busy(self) -> bool: ...

    def step(self) -> Step: ...

    def totals(self) -> Totals: ...


def random_load(seed: int) -> Load:
    """Growing conversations, shared documents, single requests and clients that hang up; a cache too small for them."""
    draw = random.Random(seed)
    block = draw.choice((4, 16, 32))
    blocks = draw.randint(12, 120)
    most = (blocks - 1) * block
    window = min(draw.choice((most, most // 2, 40 * block)), most)
    limits = Limits(
        blocks=blocks,
        block_tokens=block,
        window_tokens=window,
        sequences=draw.choice((2, 4, 8, 16)),
        batched_tokens=draw.choice((max(16, block), 64, 256, 2048)),  # vLLM wants no less than sequences
        caching=draw.random() < 0.9,
        whole_prompt=draw.random() < 0.8,
    )
    every = draw.choice((1, 4, 15, 40))
    starts, sessions = 0, []
    for _ in range(draw.randint(4, 30)):
        sessions.append(_random_session(draw, limits, starts))
        starts += draw.randrange(2 * every)
    return Load(limits, tuple(sessions))


def _random_session(draw: random.Random, limits: Limits, starts: int) -> Session:
    shared = draw.choice((0, 0, draw.randint(1, limits.window_tokens // 2)))
    turns = []
    for _ in range(draw.choice((1, 1, draw.randint(2, 6)))):
        gone = draw.randint(0, 40) if draw.random() < 0.08 else None
        new = draw.randint(1, max(2, limits.window_tokens // draw.choice((2, 6, 20))))
        # A multiple of the block size now and then: that is where the rules have their edges.
        new = max(limits.block_tokens, new // limits.block_tokens * limits.block_tokens) if draw.random() < 0.3 else new
        turns.append(Turn(new, draw.choice((1, draw.randint(1, 20), draw.randint(1, 120))), draw.randrange(30), gone))
    return Session(starts, draw.randrange(3), shared, tuple(turns))


def load_of(document: dict[str, Any]) -> Load:
    """A load from ``dataclasses.asdict`` of it, as recordings hold it."""
    sessions = [
        Session(**{**session, "turns": tuple(Turn(**turn) for turn in session["turns"])})
        for session in document["sessions"]
    ]
    return Load(Limits(**document["limits"]), tuple(sessions))


def outcome_of(steps: list[Step], totals: Totals) -> Outcome:
    """Enough to tell whether two schedulers did the same."""
    digest = hashlib.sha256()
    for step in steps:
        digest.update(json.dumps((step.scheduled, step.preempted, step.sampled, step.used_blocks)).encode())
    return Outcome(len(steps), digest.hexdigest(), totals)


@dataclass(slots=True)
class _Player:
    """What the clients of a load know and wait for. Events are (step, order, what, session, turn)."""

    load: Load
    scheduler: Scheduler
    events: list[tuple[int, int, str, int, int]] = field(default_factory=list)
    spoken: dict[int, list[int]] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    numbers: int = 0

    def put(self, moment: int, what: str, session: int, turn: int) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (moment, self.numbers, what, session, turn))

    def start(self, moment: int, number: int, turn_number: int) -> None:
        """Send one turn, unless the conversation has outgrown the window."""
        session = self.load.sessions[number]
        turn = session.turns[turn_number]
        if turn_number == 0:
            self.spoken[number] = [1_000_000 * (session.document + 1) + at for at in range(session.shared_tokens)]
        name = f"{number}.{turn_number}"
        # Ids of its own for each turn's text: nothing but what is meant to be shared is equal.
        own = 10_000_000 + 100_000 * (number * 8 + turn_number)
        prompt = self.spoken[number] + [own + at for at in range(turn.new_tokens)]
        output = [own + 50_000 + at for at in range(turn.output_tokens)]
        room = self.load.limits.window_tokens - len(prompt)
        if room < 1:
            return
        output = output[:room]
        self.outputs[name] = output
        self.spoken[number] = prompt
        self.scheduler.add(name, prompt, output)
        if turn.gone_after is not None:
            self.put(moment + turn.gone_after, "abort", number, turn_number)

    def ended(self, moment: int, name: str) -> None:
        """Let the conversation go on with what was answered."""
        number, turn_number = map(int, name.split("."))
        output = self.outputs.pop(name, None)
        if output is None:
            return
        self.spoken[number] = self.spoken[number] + output
        turns = self.load.sessions[number].turns
        if turn_number + 1 < len(turns):
            self.put(moment + 1 + turns[turn_number].pause_steps, "start", number, turn_number + 1)


def play(load: Load, scheduler: Scheduler) -> Iterator[Step]:
    """Run ``load`` to its end. Raises ``RuntimeError`` if that takes absurdly many steps."""
    player = _Player(load, scheduler)
    for number, session in enumerate(load.sessions):
        player.put(session.starts_at, "start", number, 0)
    moment = 0
    for _ in range(STEPS_LIMIT):
        if not scheduler.busy():
            if not player.events:
                return
            moment = max(moment, player.events[0][0])
        while player.events and player.events[0][0] <= moment:
            _, _, what, number, turn = heapq.heappop(player.events)
            if what == "start":
                player.start(moment, number, turn)
            elif player.outputs.pop(f"{number}.{turn}", None) is not None:
                scheduler.abort(f"{number}.{turn}")
        step = scheduler.step()
        yield step
        for name in step.finished:
            player.ended(moment, name)
        moment += 1
    raise RuntimeError(f"not at an end after {STEPS_LIMIT} steps")
