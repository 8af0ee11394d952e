"""Faults a test can ask a simulated server for: written ``KIND``, ``KIND=VALUE`` or ``KIND=VALUE:TIMES``."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from gateway.simulator.odd_metrics import ODD

GENERATION = {
    "die-before-headers": "close the connection without a byte of answer",
    "die-after-chunks": "close the connection after N chunks of a stream, or half a plain answer",
    "stall-after-chunks": "send N chunks of a stream, or nothing of a plain answer, then hang",
    "garbage": "answer 200 with bytes that are neither JSON nor events",
    "status": "answer with this HTTP status",
    "slow-headers": "wait S seconds before answering",
    "overloaded": "answer 503 while N requests are worked on, as with --max-num-queued-reqs",
}
WATCHING = {
    "no-metrics": "404 for /metrics, as with a proxy that hides it",
    "garbage-metrics": "/metrics answers 200 with text that is no metrics page",
    "unhealthy": "/health answers 503, as with a dead engine",
    "endless-metrics": "/metrics answers 200 MB of HTML",
    "slow-metrics": "wait S seconds before answering /metrics",
    "asleep": "the engine sleeps, as after POST /sleep: requests wait until it wakes up",
    "scaling": "every path answers 503, as while vLLM scales",
    "no-models": "/v1/models lists none",
}
KINDS = GENERATION | WATCHING | ODD
_WITH_VALUE = frozenset(
    {"die-after-chunks", "stall-after-chunks", "status", "slow-headers", "overloaded", "slow-metrics"}
)


@dataclass(slots=True)
class Fault:
    """One fault. ``value`` is its number if it has one; ``left`` how often it still strikes, ``None`` for ever."""

    kind: str
    value: float = 0.0
    left: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> Fault | None:
        """Raises ``ValueError`` with the kinds there are. Empty text and ``none`` mean no fault."""
        if not text or text == "none":
            return None
        head, colon, times = text.partition(":")
        kind, equals, value = head.partition("=")
        if kind not in KINDS:
            raise ValueError(f"unknown fault {kind!r}; there are {', '.join(KINDS)}")
        if bool(equals) != (kind in _WITH_VALUE):
            raise ValueError(f"fault {kind} {'needs' if kind in _WITH_VALUE else 'takes no'} value")
        try:
            number = float(value) if equals else 0.0
            left = int(times) if colon else None
        except ValueError:
            raise ValueError(f"fault {text!r}: value and times must be numbers") from None
        if number < 0 or (left is not None and left < 1) or (kind == "status" and not 400 <= number <= 599):
            raise ValueError(f"fault {text!r} is out of range")
        return cls(kind, number, left)


class Faults:
    """The fault in force, if any."""

    def __init__(self, text: str | None = None) -> None:
        self._fault = Fault.parse(text)

    def set(self, text: str | None) -> None:
        """Replace the fault. Raises ``ValueError`` and keeps the old one if ``text`` names none."""
        self._fault = Fault.parse(text)

    def __str__(self) -> str:
        fault = self._fault
        if fault is None:
            return "none"
        value = f"={fault.value:g}" if fault.kind in _WITH_VALUE else ""
        return f"{fault.kind}{value}" + ("" if fault.left is None else f":{fault.left}")

    def strike(self, kinds: Container[str]) -> Fault | None:
        """The fault if it is one of ``kinds``; a fault that strikes a limited number of times is used up by this."""
        fault = self._fault
        if fault is None or fault.kind not in kinds:
            return None
        if fault.left is not None:
            fault.left -= 1
            if not fault.left:
                self._fault = None
        return fault
