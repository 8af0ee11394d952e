"""The page of the metrics lists what the gateway exports: names, labels, outcomes and reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from docs_metrics import every_gauge, metrics_of_the_code
from docs_pages import CODE, page, quoted, rows, section

from gateway import exceptions
from gateway.exceptions import GatewayError, NoRoute
from gateway.observe.metrics import Metrics
from gateway.types import CountKind, Dialect

PAGE = page("docs/metrics.md")


def errors(base: type[GatewayError] = GatewayError) -> Iterator[type[GatewayError]]:
    yield base
    for error in base.__subclasses__():
        if error.__module__ == exceptions.__name__:
            yield from errors(error)


@pytest.mark.parametrize(("kind", "title"), [("counter", "Counters"), ("histogram", "Histograms"), ("gauge", "Gauges")])
def test_page_lists_exactly_the_metrics_of_each_kind_with_their_labels(kind: str, title: str) -> None:
    listed = {quoted(cells[0])[0]: tuple(quoted(cells[1])) for cells in rows(section(PAGE, title))}
    assert listed == {name: labels for name, (type_, labels) in metrics_of_the_code().items() if type_ == kind}


def test_the_list_held_against_the_page_is_what_a_scrape_shows() -> None:
    metrics = Metrics()
    metrics.watch(every_gauge)
    shown = set(re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", metrics.text().decode(), re.MULTILINE))
    created = {name for name in shown if name.endswith("_created")}
    assert shown - created == set(metrics_of_the_code())


def test_alerts_ask_for_metrics_that_exist() -> None:
    for name in re.findall(r"kvgate_\w+", section(PAGE, "Worth an alert")):
        assert name.removesuffix("_bucket") in metrics_of_the_code()


def test_page_lists_every_reason_with_its_status() -> None:
    listed = {quoted(cells[0])[0]: cells[1] for cells in rows(section(PAGE, "Outcomes and reasons")) if len(cells) == 3}
    expected = {error.code: str(error.status) for error in errors() if error is not NoRoute}
    assert listed == expected
    assert f"`{NoRoute.code}`" in PAGE


def test_page_lists_every_outcome() -> None:
    listed = {
        name for cells in rows(section(PAGE, "Outcomes and reasons")) if len(cells) == 2 for name in quoted(cells[0])
    }
    code = "".join((CODE / name).read_text(encoding="utf-8") for name in ("serving.py", "answering.py", "trace.py"))
    set_in_code = set(re.findall(r'outcome(?:: str)? = f?"([^"]+)"', code))
    upstream = "upstream_{status // 100}xx"
    assert upstream in set_in_code
    assert listed == set_in_code - {upstream} | {"upstream_4xx", "upstream_5xx"}


def test_page_names_the_values_of_the_short_labels() -> None:
    for value in [*Dialect, *CountKind, "local", "backend", "given", "estimate", "equal", "over", "under"]:
        assert f"`{value}`" in section(PAGE, "Counters"), value
