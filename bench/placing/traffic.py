"""Who asks what and when: agents, chats, questions on shared documents, batches. Everything from one seed.

A *session* is a client that sends a request, waits for the answer, pauses, and sends the next, which begins with all
that was said before. Token ids are numbers that stand for text: equal text has equal ids, so prefixes are shared where
real prompts share them (system prompts, tool lists, documents, a conversation's own past).

Figures, all lognormal unless they say otherwise (median, sigma of the logarithm):

==========  ==================  ==========  ================  ===============  ==================  ==========
kind        shared at start     turns       new a turn        answer           pause               TTFT limit
==========  ==================  ==========  ================  ===============  ==================  ==========
agent       9,000 (4 clients)   8-40        600 (1.0)         150 (0.8)        2 s (0.8); 1 of 8   15 s
                                                                               turns 40 s (0.6)
chat        400 (8 prompts)     2-8         60 (0.8)          300 (0.6)        25 s (0.7)          5 s
rag         4,000-12,000 of     1-3         120 (0.5)         200 (0.5)        15 s (0.7)          10 s
            100 (Zipf 1.1)
batch       200 (1 prompt)      1           3,000 (0.5)       400 (0.5)        none                none
==========  ==================  ==========  ================  ===============  ==================  ==========

Agents' sizes follow recorded coding agents (first turns of 8 to 20 thousand tokens, growing to the window); the rest
are guesses of ordinary use. Sessions arrive as a Poisson process; *bursty* ones at five times the rate for a tenth of
the time, and the rest spread over what remains.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.simulator.blocks import block_hashes

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of client. Medians in tokens or seconds; ``sigma`` is of the logarithm."""

    name: str
    turns: tuple[int, int]
    new_tokens: tuple[float, float]
    answer_tokens: tuple[float, float]
    pause_s: tuple[float, float]
    first_token_limit_s: float
    budget_tokens: int | None
    keys: int = 8


KINDS = {
    "agent": Kind("agent", (8, 40), (600, 1.0), (150, 0.8), (2.0, 0.8), 15.0, 8192),
    "chat": Kind("chat", (2, 8), (60, 0.8), (300, 0.6), (25.0, 0.7), 5.0, None),
    "rag": Kind("rag", (1, 3), (120, 0.5), (200, 0.5), (15.0, 0.7), 10.0, 1024),
    "batch": Kind("batch", (1, 1), (3000, 0.5), (400, 0.5), (0.0, 0.0), math.inf, 1024),
}

# A request keeps the objective if its first token came in time and its tokens came at least this fast on average.
MEAN_GAP_LIMIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions a second of each kind, for ``duration_s``. ``flood``: one key sends half of all sessions."""

    rates: dict[str, float]
    duration_s: float
    bursty: bool = False
    flood: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One request of a session. ``answer`` is what the model will say.

    The three lists are empty once it is over: an hour has tens of thousands of requests.
    """

    number: int
    session: Session
    prompt: list[int]
    hashes: list[int]
    answer: list[int]
    sent_s: float
    prompt_tokens: int

    @property
    def id(self) -> str:
        return str(self.number)


@dataclass(slots=True, eq=False)
class Session:
    """A client: ``turns_left`` more requests, each after the answer to the one before and a pause."""

    number: int
    kind: Kind
    key: str
    turns_left: int
    tokens: list[int]
    random: random.Random
    hashes: list[int] = field(default_factory=list)


class Traffic:
    """Draws sessions and their requests. ``window_tokens`` is where an agent compacts, as clients do at 85 %."""

    def __init__(self, load: Load, seed: int, window_tokens: int) -> None:
        self.load = load
        self._random = random.Random(seed)
        self._next_id = 1
        self._requests = 0
        self._sessions = 0
        self._window_tokens = window_tokens
        scale = min(1.0, window_tokens / 32768)
        self._scale = scale
        self._starts = {
            "agent": [self._fresh(int(9000 * scale)) for _ in range(4)],
            "chat": [self._fresh(400) for _ in range(8)],
            "rag": [self._fresh(int(self._random.uniform(4000, 12000) * scale)) for _ in range(100)],
            "batch": [self._fresh(200)],
        }
        weights = [1 / (rank + 1) ** 1.1 for rank in range(100)]
        self._weights = {"rag": weights}

    def arrivals(self) -> Iterator[tuple[float, Session]]:
        """Sessions in order of their first request's time."""
        found = [
            (moment_s, self._session(KINDS[name]))
            for name, rate in sorted(self.load.rates.items())
            for moment_s in self._moments(rate)
        ]
        found.sort(key=lambda item: (item[0], item[1].number))
        yield from found

    def request(self, session: Session, now_s: float) -> Request:
        """The session's next request."""
        draw = session.random
        new = max(8, int(_lognormal(draw, session.kind.new_tokens) * self._scale))
        if session.tokens and len(session.tokens) + new > 0.85 * self._window_tokens:
            self._compact(session)
        new = min(new, int(0.1 * self._window_tokens) if session.kind.name != "batch" else new)
        session.tokens.extend(self._fresh(new))
        block_hashes(session.tokens, BLOCK_TOKENS, session.hashes)
        session.turns_left -= 1
        self._requests += 1
        answer = max(2, min(4000, int(_lognormal(draw, session.kind.answer_tokens))))
        answer = min(answer, self._window_tokens - len(session.tokens) - 1)
        return Request(
            self._requests,
            session,
            list(session.tokens),
            list(session.hashes),
            self._fresh(answer),
            now_s,
            len(session.tokens),
        )

    def answered(self, request: Request) -> float | None:
        """Take the answer into the session; seconds until its next request, ``None`` if it has no more."""
        session = request.session
        session.tokens.extend(request.answer)
        block_hashes(session.tokens, BLOCK_TOKENS, session.hashes)
        request.prompt, request.hashes, request.answer = [], [], []
        if session.turns_left <= 0:
            session.tokens, session.hashes = [], []
            return None
        pause_s = _lognormal(session.random, session.kind.pause_s)
        if session.kind.name == "agent" and session.random.random() < 1 / 8:
            pause_s = _lognormal(session.random, (40.0, 0.6))
        return pause_s

    def _compact(self, session: Session) -> None:
        """What a coding agent does near its limit: a summary replaces all but the start."""
        kept = int(9000 * self._scale) if session.kind.name == "agent" else 400
        session.tokens = session.tokens[:kept] + self._fresh(int(1500 * self._scale))
        session.hashes = session.hashes[: kept // BLOCK_TOKENS]

    def _session(self, kind: Kind) -> Session:
        self._sessions += 1
        starts = self._starts[kind.name]
        start = self._random.choices(starts, self._weights.get(kind.name))[0]
        key = f"{kind.name}-{self._random.randrange(kind.keys)}"
        if self.load.flood and self._random.random() < 0.5:
            key = "flood"
        own = random.Random(self._random.random())  # of its own, so that every policy meets the same conversations
        return Session(self._sessions, kind, key, self._random.randint(*kind.turns), list(start), own)

    def _moments(self, rate: float) -> Iterator[float]:
        now_s = 0.0
        while rate > 0:
            now_s += self._random.expovariate(self._rate_at(rate, now_s))
            if now_s >= self.load.duration_s:
                return
            yield now_s

    def _rate_at(self, rate: float, now_s: float) -> float:
        if not self.load.bursty:
            return rate
        return 5 * rate if now_s % 300 < 30 else rate * 5 / 9

    def _fresh(self, count: int) -> list[int]:
        """Ids of text that was never seen before: one new id, again and again, which costs little to keep."""
        self._next_id += 1
        return [self._next_id] * count


def _lognormal(source: random.Random, shape: tuple[float, float]) -> float:
    median, sigma = shape
    return source.lognormvariate(math.log(median), sigma) if median > 0 else 0.0
