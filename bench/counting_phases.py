"""Where the time of a count goes: parsing, finding and rendering, encoding and hashing, one after the other."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.api import chat
from gateway.tokens.local import LocalCounter
from gateway.types import ChatPrompt

PHASES = ("parse", "find and render", "encode and hash")


@dataclass(frozen=True, slots=True)
class Phase:
    """CPU milliseconds of one phase: the least and the median of ``samples``."""

    least_ms: float
    p50_ms: float
    samples: int


def phases(samples: Sequence[Sequence[float]]) -> dict[str, Phase]:
    """By phase, and ``all`` of them; from seconds of every phase of each request."""
    columns = [*zip(*samples, strict=True), [sum(each) for each in samples]]
    return {
        name: Phase(1000 * min(column), 1000 * statistics.median(column), len(column))
        for name, column in zip((*PHASES, "all"), columns, strict=True)
    }


def measure_phases(local: LocalCounter, bodies: Iterable[bytes], unmeasured: int = 0) -> list[list[float]]:
    """CPU seconds of every phase of each body, less the first ``unmeasured`` ones."""
    samples = []
    for number, body in enumerate(bodies):
        at = [time.thread_time()]
        prompt = chat.parse(body, "application/json").prompt
        at.append(time.thread_time())
        assert isinstance(prompt, ChatPrompt)
        encode = local.begin(prompt, {})
        at.append(time.thread_time())
        encode()
        at.append(time.thread_time())
        if number >= unmeasured:
            samples.append([after - before for before, after in itertools.pairwise(at)])
    return samples
