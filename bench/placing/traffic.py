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
foreign     none                1-3         3,000 (0.5)       400 (0.5)        5 s (0.7)           none
replay      as recorded         recorded    as recorded       as recorded      2 s after a tool    10 s
                                                                               call, else 25 s
==========  ==================  ==========  ================  ===============  ==================  ==========

Agents' sizes follow recorded coding agents (first turns of 8 to 20 thousand tokens, growing to the window); the rest
are guesses of ordinary use. An agent compacts at 85 % of the window that it believes in; with a window of its own
(``Load.windows``) its sizes go with it. Sessions arrive as a Poisson process; *bursty* ones at five times the rate for
a tenth of the time, and the rest spread over what remains. *Foreign* requests go to the first backend past every
router. ``replay`` is for conversations from a file (``replay.py``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.simulator.blocks import block_hashes

BLOCK_TOKENS = 16
START_TOKENS = {"agent": 9000, "chat": 400}


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
    "foreign": Kind("foreign", (1, 3), (3000, 0.5), (400, 0.5), (5.0, 0.7), math.inf, None, 1),
    "replay": Kind("replay", (1, 1), (0, 0), (0, 0), (25.0, 0.7), 10.0, 4096),
}
FLOOD = "flood"

# A request keeps the objective if its first token came in time and its tokens came at least this fast on average.
MEAN_GAP_LIMIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a recorded conversation, as token ids. ``tool``: the next request follows without a person."""

    new: Sequence[int]
    answer: Sequence[int]
    tool: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions a second of each kind, for ``duration_s``.

    ``flood``: beside the others one key sends, of each kind, so many times what another key of that kind does.
    ``windows``: (tokens, weight) of the windows that agents believe in; if empty, that of the laboratory.
    ``conversations``: what sessions of kind ``replay`` say.
    """

    rates: dict[str, float]
    duration_s: float
    bursty: bool = False
    flood: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    conversations: tuple[tuple[Turn, ...], ...] = ()


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
    answer_tokens: int

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
    window_tokens: int
    scale: float
    script: Sequence[Turn] = ()
    hashes: list[int] = field(default_factory=list)


class Traffic:
    """Draws sessions and their requests. ``window_tokens`` is the window that clients believe in."""

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
            "agent": [self._fresh(int(START_TOKENS["agent"] * scale)) for _ in range(4)],
            "chat": [self._fresh(START_TOKENS["chat"]) for _ in range(8)],
            "rag": [self._fresh(int(self._random.uniform(4000, 12000) * scale)) for _ in range(100)],
            "batch": [self._fresh(200)],
        }
        weights = [1 / (rank + 1) ** 1.1 for rank in range(100)]
        self._weights = {"rag": weights}
        self._replays = 0

    def arrivals(self) -> Iterator[tuple[float, Session]]:
        """Sessions in order of their first request's time. A flood changes nothing about the others."""
        found = [
            (moment_s, self._session(KINDS[name], self._random))
            for name, rate in sorted(self.load.rates.items())
            for moment_s in self._moments(rate, self._random)
        ]
        if self.load.flood:
            draw = random.Random(self._random.random())
            for name, rate in sorted(self.load.rates.items()):
                moments_s = self._moments(self.load.flood * rate / KINDS[name].keys, draw)
                found.extend((moment_s, self._session(KINDS[name], draw, FLOOD)) for moment_s in moments_s)
        found.sort(key=lambda item: (item[0], item[1].number))
        yield from found

    def request(self, session: Session, now_s: float) -> Request:
        """The session's next request."""
        draw, window_tokens = session.random, session.window_tokens
        if session.script:
            turn = session.script[-session.turns_left]
            session.tokens.extend(turn.new)
            answer = list(turn.answer)
        else:
            new = max(8, int(_lognormal(draw, session.kind.new_tokens) * session.scale))
            if session.tokens and len(session.tokens) + new > 0.85 * window_tokens:
                self.compact(session)
            new = min(new, int(0.1 * window_tokens) if session.kind.name != "batch" else new)
            session.tokens.extend(self._fresh(new))
            length = max(2, min(4000, int(_lognormal(draw, session.kind.answer_tokens))))
            answer = self._fresh(min(length, window_tokens - len(session.tokens) - 1))
        session.turns_left -= 1
        self._requests += 1
        request = Request(self._requests, session, [], [], answer, now_s, 0, len(answer))
        self.ask_again(request)
        return request

    def ask_again(self, request: Request) -> None:
        """Give the request the session's text as it is now (it may have been compacted)."""
        session = request.session
        block_hashes(session.tokens, BLOCK_TOKENS, session.hashes)
        request.prompt, request.hashes = list(session.tokens), list(session.hashes)
        request.prompt_tokens = len(request.prompt)

    def answered(self, request: Request) -> float | None:
        """Take the answer into the session; seconds until its next request, ``None`` if it has no more."""
        session = request.session
        session.tokens.extend(request.answer)
        block_hashes(session.tokens, BLOCK_TOKENS, session.hashes)
        request.prompt, request.hashes, request.answer = [], [], []
        if session.turns_left <= 0:
            session.tokens, session.hashes = [], []
            return None
        if session.script:
            tool = session.script[-session.turns_left - 1].tool
            return _lognormal(session.random, (2.0, 0.8) if tool else session.kind.pause_s)
        pause_s = _lognormal(session.random, session.kind.pause_s)
        if session.kind.name == "agent" and session.random.random() < 1 / 8:
            pause_s = _lognormal(session.random, (40.0, 0.6))
        return pause_s

    def compact(self, session: Session, to_tokens: int | None = None) -> None:
        """What a coding agent does near its limit: a summary replaces all but the start.

        ``to_tokens``: what it then says at most, where a server told it of a smaller window than it believed in.
        """
        kept = int(START_TOKENS["agent"] * min(1.0, session.scale)) if session.kind.name == "agent" else 400
        summary = int(1500 * session.scale)
        if to_tokens is not None:
            kept, summary = min(kept, to_tokens // 2), min(summary, to_tokens // 4)
        session.tokens = session.tokens[:kept] + self._fresh(summary)
        session.hashes = session.hashes[: kept // BLOCK_TOKENS]

    def _session(self, kind: Kind, draw: random.Random, key: str | None = None) -> Session:
        self._sessions += 1
        if kind.name == "replay":
            return self._replay(kind, draw, key)
        starts = self._starts.get(kind.name, [[]])
        start = draw.choices(starts, self._weights.get(kind.name))[0]
        own_key = f"{kind.name}-{draw.randrange(kind.keys)}"
        own = random.Random(draw.random())  # of its own, so that every policy meets the same conversations
        turns = draw.randint(*kind.turns)
        window_tokens, scale = self._window_tokens, self._scale
        if kind.name == "agent" and self.load.windows:
            windows, weights = zip(*self.load.windows, strict=True)
            window_tokens = draw.choices(windows, weights)[0]
            scale = min(2.0, window_tokens / 32768)
            start = start[: int(START_TOKENS["agent"] * min(1.0, scale))]
            turns = int(turns * max(1.0, scale))
        return Session(self._sessions, kind, key or own_key, turns, list(start), own, window_tokens, scale)

    def _replay(self, kind: Kind, draw: random.Random, key: str | None) -> Session:
        """A recorded conversation. One that was played before is said anew from its first answer on."""
        which = self._replays % len(self.load.conversations)
        again, self._replays = self._replays // len(self.load.conversations), self._replays + 1
        script: Sequence[Turn] = self.load.conversations[which]
        if again:
            salt = again << 64
            first, *rest = script
            script = [
                Turn(first.new, [item + salt for item in first.answer], first.tool),
                *(
                    Turn([item + salt for item in turn.new], [item + salt for item in turn.answer], turn.tool)
                    for turn in rest
                ),
            ]
        own_key = f"{kind.name}-{draw.randrange(kind.keys)}"
        own = random.Random(draw.random())
        return Session(self._sessions, kind, key or own_key, len(script), [], own, self._window_tokens, 1.0, script)

    def _moments(self, rate: float, draw: random.Random) -> Iterator[float]:
        now_s = 0.0
        while rate > 0:
            now_s += draw.expovariate(self._rate_at(rate, now_s))
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
