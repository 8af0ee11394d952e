"""What one request has become so far, for headers, metrics and the log."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.api.errors import ANYONE, Caller
from gateway.fitting import Fitted
from gateway.relay.exchange import Progress
from gateway.types import Count, Dialect


@dataclass(slots=True)
class Trace:
    """One request's way so far. Times are ``time.monotonic``'s: the clock
    of uvloop ticks in milliseconds."""

    request_id: str
    dialect: Dialect
    arrived_s: float
    caller: Caller = ANYONE
    model: str = "other"
    outcome: str = "ok"
    count: Count | None = None
    counted_as: str = ""
    cut_by_backend: bool = False
    repairs: tuple[str, ...] = ()
    fitted: Fitted | None = None
    hedge: str = ""
    queue_wait_s: float = 0.0
    first_wait_s: float = 0.0
    called_s: float | None = None
    progress: Progress = field(default_factory=Progress)

    def counts(self, count: Count, name: str) -> None:
        """The prompt was counted, by the tokenizer of the model ``name``."""
        self.count, self.counted_as = count, name

    def fits(self, fitted: Fitted) -> None:
        """The request can be sent, as ``fitted`` says."""
        self.fitted = fitted
        self.model = fitted.model.id
        if fitted.counted_as:
            self.counts(fitted.count, fitted.counted_as)

    def waited(self, seconds: float) -> None:
        """Another wait in the queue is over."""
        if self.called_s is None:
            self.first_wait_s = seconds
        self.queue_wait_s += seconds


def repaired(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """The header that names the repairs a request needed."""
    return [("x-kvgate-repairs", ",".join(names))] if names else []


def counted(count: Count) -> list[tuple[str, str]]:
    """The headers that tell what the prompt was counted to be, and by whom."""
    return [
        ("x-kvgate-prompt-tokens", str(count.total_tokens)),
        ("x-kvgate-count-kind", count.kind.value),
        ("x-kvgate-count-source", count.source),
    ]
