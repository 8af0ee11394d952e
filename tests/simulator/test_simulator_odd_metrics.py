"""Pages of metrics made odd are what the gateway takes them for."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.fleet.identity import Identity, Sequel
from gateway.fleet.metrics_text import FAMILIES, parse
from gateway.fleet.troubles import Trouble, troubles_of
from gateway.simulator.metrics import EngineMetrics
from gateway.simulator.odd_metrics import ODD, odd_page
from gateway.simulator.options import SimulatorOptions

METRICS = EngineMetrics(SimulatorOptions(data_parallel_size=2))


@pytest.mark.parametrize(
    ("kind", "troubles"),
    [
        ("nan-metrics", {Trouble.BAD_VALUE}),
        ("high-metrics", {Trouble.BAD_VALUE}),
        ("renamed-metrics", {Trouble.NO_USAGE, Trouble.NO_CAPACITY}),
        ("doubled-metrics", {Trouble.DUPLICATE_ENGINE}),
        ("clock-jump", set()),
        ("", set()),
    ],
)
def test_a_page_made_odd_is_odd_in_that_way_only(kind: str, troubles: set[Trouble]) -> None:
    page = odd_page(kind, METRICS.render(), 0)
    assert troubles_of(parse(page)).keys() == troubles
    assert list(text_string_to_metric_families(page.decode()))  # and still metrics


def sequels(kind: str, pages: int) -> list[Sequel]:
    identity = Identity()
    METRICS._prompt.labels("simulated", "0").inc(100)
    return [identity.read(parse(odd_page(kind, METRICS.render(), number))) for number in range(pages)]


def test_pages_that_follow_each_other_are_odd_together() -> None:
    assert sequels("two-servers", 4) == [Sequel.FIRST, Sequel.RESTART, Sequel.OTHER, Sequel.OTHER]
    assert sequels("backward-metrics", 3) == [Sequel.FIRST, Sequel.COUNTER_BACK, Sequel.SAME]
    identity = Identity()
    identity.read(parse(METRICS.render()))
    assert identity.read(parse(odd_page("clock-jump", METRICS.render(), 1))) is Sequel.CLOCK_JUMP


def test_every_kind_changes_a_page() -> None:
    for kind in ODD:
        assert odd_page(kind, METRICS.render(), 1) != METRICS.render()


def test_only_the_chosen_metrics_are_made_and_they_say_the_same() -> None:
    chosen = METRICS.render(FAMILIES.names)
    assert len(chosen) < len(METRICS.render()) / 4
    assert parse(chosen) == parse(METRICS.render())


def test_a_sleeping_engine_says_so() -> None:
    assert parse(METRICS.render(awake=False)).awake is False
    assert parse(METRICS.render()).awake is True
