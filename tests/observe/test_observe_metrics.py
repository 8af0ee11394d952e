"""What Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway.observe.gauges import queue_gauges
from gateway.observe.metrics import Gauge, Metrics
from gateway.types import Count, CountKind


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_a_gauge_is_read_anew_at_every_scrape() -> None:
    metrics = Metrics()
    waiting = [3.0]
    metrics.watch(lambda: iter([Gauge("queue_requests", "Waiting.", waiting[0])]))
    assert samples(metrics)["kvgate_queue_requests", ()] == 3
    waiting[0] = 0
    assert samples(metrics)["kvgate_queue_requests", ()] == 0


def test_what_is_unknown_has_no_sample() -> None:
    metrics = Metrics()
    metrics.watch(lambda: iter([]))
    assert [name for name, _ in samples(metrics) if name.startswith("kvgate_kv")] == []


def test_readings_of_one_gauge_share_one_family() -> None:
    metrics = Metrics()
    readings = [Gauge("backend_up", "Up.", float(up), (("backend", name),)) for name, up in (("a", 1), ("b", 0))]
    metrics.watch(lambda: iter(readings))
    assert metrics.text().count(b"# TYPE kvgate_backend_up gauge") == 1
    assert samples(metrics)["kvgate_backend_up", (("backend", "b"),)] == 0


def test_a_label_may_hold_any_text() -> None:
    metrics = Metrics()
    name = 'a"b\\c\nd'
    metrics.watch(lambda: iter([Gauge("backend_up", "Up.", 1.0, (("backend", name),))]))
    assert samples(metrics)["kvgate_backend_up", (("backend", name),)] == 1


def test_count_errors_are_told_by_direction_and_size() -> None:
    metrics = Metrics()
    count = Count(10, 10, CountKind.EXACT, "local")
    for error in (0, 0, 3, -5):
        metrics.checked("m", count, error)
    found = samples(metrics)
    for result, times in (("equal", 2), ("over", 1), ("under", 1)):
        labels = (("kind", "exact"), ("model", "m"), ("result", result), ("source", "local"))
        assert found["kvgate_count_checks_total", labels] == times
    assert found["kvgate_count_error_tokens_total", (("kind", "exact"), ("model", "m"), ("source", "local"))] == 8


def test_the_queue_is_read_from_the_gates_own_numbers() -> None:
    stats = {"waiting_requests": 2, "waiting_bytes": 99, "waiting_tokens": 7, "kept_out_requests": 1}
    stats |= {"prefix_expected_tokens": 500, "prefix_confirmed_tokens": 480}
    stats |= {"reported_expected_tokens": 300, "reported_confirmed_tokens": 299}
    gauges = {gauge.name: gauge.value for gauge in queue_gauges(stats)}
    assert gauges == {
        "queue_requests": 2,
        "queue_bytes": 99,
        "queue_tokens": 7,
        "queue_kept_out": 1,
        "prefix_expected_tokens": 500,
        "prefix_confirmed_tokens": 480,
        "prefix_reported_expected_tokens": 300,
        "prefix_reported_confirmed_tokens": 299,
    }


def test_two_gateways_in_one_process_do_not_share_their_metrics() -> None:
    one, other = Metrics(), Metrics()
    one.requests.labels("chat", "m", "ok").inc()
    assert [name for name, _ in samples(other) if name == "kvgate_requests_total"] == []
