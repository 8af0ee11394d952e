"""Every metric of the gateway, in one place. Base units, ``_total`` on counters, no label that can grow without bound.

``model`` is a served model name (or ``other`` for names no backend serves), ``backend`` a configured backend's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway import __version__
from gateway.types import Count

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

WAIT_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
OVERHEAD_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


@dataclass(frozen=True, slots=True)
class Gauge:
    """One reading: the metric's name without prefix, its help text, label values by name, and the value."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


class _Readings(Collector):
    """Gauges read from their owners at scrape time, so that none can be left behind or drift."""

    def __init__(self, read: Callable[[], Iterable[Gauge]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for gauge in self._read():
            family = families.get(gauge.name)
            if family is None:
                labels = [name for name, _ in gauge.labels]
                family = families[gauge.name] = GaugeMetricFamily(f"kvgate_{gauge.name}", gauge.help, labels=labels)
            family.add_metric([value for _, value in gauge.labels], gauge.value)
        return iter(families.values())

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before the first reading, and reading at registration would be too early."""
        return iter(())


class Metrics:
    """The counters and histograms of one gateway, with a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvgate_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"kvgate_{name}", text, labels, registry=self.registry, buckets=buckets)

        self.requests = counter("requests", "Requests by how they ended.", "dialect", "model", "outcome")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens as the backends reported them.", "model")
        self.output_tokens = counter("output_tokens", "Output tokens as the backends reported them.", "model")
        self.counts = counter(
            "counts", "Requests counted, by how far the count can be trusted.", "model", "kind", "source"
        )
        self.count_checks = counter(
            "count_checks",
            "Counts compared with the backend's usage: equal, over or under.",
            "model",
            "kind",
            "source",
            "result",
        )
        self.count_error_tokens = counter(
            "count_error_tokens", "Absolute difference between counts and usage, in tokens.", "model", "kind", "source"
        )
        self.count_trust_changes = counter(
            "count_trust_changes", "Times a source of counts lost trust or regained it.", "model", "source", "change"
        )
        self.count_answers = counter(
            "count_answers", "Answers of the counting endpoints given here.", "endpoint", "model", "kind", "source"
        )
        self.clamped_requests = counter("clamped_requests", "Requests whose output budget was lowered.", "model")
        self.clamped_tokens = counter("clamped_tokens", "Output tokens taken off budgets.", "model")
        self.overflows = counter(
            "overflows",
            "Requests that exceeded every window, by what was done: refuse, trim, larger or pass.",
            "model",
            "action",
        )
        self.trimmed_tokens = counter("trimmed_tokens", "Prompt tokens removed from conversations.", "model")
        self.trims = counter(
            "trims", "Messages dropped, texts shortened, thoughts and images removed, summaries made.", "model", "what"
        )
        self.repairs = counter("repairs", "Requests and answers that were put right, by the rule that did it.", "rule")
        self.rejections = counter("rejections", "Requests the gateway answered with an error itself.", "reason")
        self.retries = counter("retries", "Attempts that failed before the first byte and were repeated.", "backend")
        self.retries_denied = counter("retries_denied", "Attempts not repeated since there were too many retries.")
        self.hedges = counter(
            "hedges",
            "Streams sent to a second backend, too, by what became of that: won, lost, failed or abandoned.",
            "outcome",
        )
        self.hedges_denied = counter(
            "hedges_denied", "Streams without a first byte that were not: no room, or too many already.", "reason"
        )
        for outcome in ("won", "lost", "failed", "abandoned"):
            self.hedges.labels(outcome)
        for reason in ("no_room", "budget"):
            self.hedges_denied.labels(reason)
        self.upstream_responses = counter(
            "upstream_responses", "Answers of backends by class of status.", "backend", "status_class"
        )
        self.queue_wait = histogram("queue_wait_seconds", "Time a request waited for a place.", WAIT_BUCKETS_S)
        self.overhead = histogram(
            "overhead_seconds",
            "Time the gateway added before the backend was called: parse, count, fit and place, without the queue.",
            OVERHEAD_BUCKETS_S,
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "From the request's arrival to the first byte of the backend's answer.",
            FIRST_TOKEN_BUCKETS_S,
            "model",
        )
        self.duration = histogram(
            "request_duration_seconds", "From the request's arrival to its end.", REQUEST_BUCKETS_S, "model"
        )

    def watch(self, read: Callable[[], Iterable[Gauge]]) -> None:
        """Export what ``read`` returns at each scrape, and the version of the gateway."""

        def readings() -> Iterator[Gauge]:
            yield Gauge("build_info", "The version running.", 1.0, (("version", __version__),))
            yield from read()

        self.registry.register(_Readings(readings))

    def begin(self, model: str, sources: Iterable[str]) -> None:
        """Export what is rare at zero from the start, so that the first of its kind shows as a rise."""
        for action in ("refuse", "trim", "larger", "pass"):
            self.overflows.labels(model, action)
        for what in ("messages", "texts", "reasoning", "images", "summaries"):
            self.trims.labels(model, what)
        self.trimmed_tokens.labels(model)
        for source in sources:
            for change in ("lost", "regained"):
                self.count_trust_changes.labels(model, source, change)

    def checked(self, model: str, count: Count, error_tokens: int) -> None:
        """Record that ``count`` was ``error_tokens`` above (or, if negative, below) the backend's usage."""
        result = "equal" if error_tokens == 0 else "over" if error_tokens > 0 else "under"
        self.count_checks.labels(model, count.kind, count.source, result).inc()
        if error_tokens:
            self.count_error_tokens.labels(model, count.kind, count.source).inc(abs(error_tokens))

    def text(self) -> bytes:
        """The exposition for Prometheus."""
        return generate_latest(self.registry)
