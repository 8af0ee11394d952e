"""The dashboard: every query is PromQL, asks for metrics and labels that exist, and every metric is on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import promql_parser
import pytest
import yaml
from deploy_files import ROOT, Query, dashboard, queries
from docs_metrics import metrics_of_the_code

ALL = list(queries())

# Said in tokens on the dashboard, or the rest of what is.
ELSEWHERE = {"kvgate_kv_used_blocks", "kvgate_kv_free_tokens"}


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Metric and labels matched, for every selector in ``expr``."""
    found: list[promql_parser.Expr] = []
    promql_parser.walk(promql_parser.parse(expr), found.append)
    for node in found:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None, expr
            yield node.name, {matcher.name for matcher in node.matchers.matchers}


def family(name: str) -> str:
    """The metric a series belongs to."""
    known = metrics_of_the_code()
    stem = next((name.removesuffix(end) for end in ("_bucket", "_sum", "_count") if name.endswith(end)), name)
    return stem if known.get(stem, ("", ()))[0] == "histogram" else name


def named(query: Query) -> str:
    return f"{query.panel} {query.ref}"


@pytest.mark.parametrize("query", ALL, ids=named)
def test_query_asks_for_metrics_and_labels_that_exist(query: Query) -> None:
    known = metrics_of_the_code()
    asked = list(selectors(query.expr))
    assert asked
    for name, labels in asked:
        assert family(name) in known
        kind, has = known[family(name)]
        assert (kind == "histogram") == name.endswith("_bucket")
        assert labels <= set(has)


def test_a_metric_that_does_not_exist_would_be_found() -> None:
    assert dict(selectors('sum(rate(kvgate_nothing_total{x="1"}[1m]))')) == {"kvgate_nothing_total": {"x"}}
    assert family("kvgate_nothing_total") not in metrics_of_the_code()


def test_every_metric_is_shown() -> None:
    shown = {family(name) for query in ALL for name, _ in selectors(query.expr)}
    assert shown == metrics_of_the_code().keys() - ELSEWHERE


def test_counters_are_shown_as_rates() -> None:
    for query in ALL:
        for name, _ in selectors(query.expr):
            if name.endswith("_total"):
                assert f"rate({name}" in query.expr or f"increase({name}" in query.expr, query


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(refs)) == len(refs)
        assert panel["type"] == "row" or (refs and panel["description"])
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
        assert one["x"] + one["w"] <= 24


def test_data_sources_are_the_variable_whose_default_is_provisioned() -> None:
    document = dashboard()
    assert document["uid"] == "kvgate"
    used = {target["datasource"]["uid"] for panel in document["panels"] for target in panel.get("targets", [])}
    used |= {panel["datasource"]["uid"] for panel in document["panels"] if panel["type"] != "row"}
    assert used == {"${datasource}"}
    variables = {item["name"]: item for item in document["templating"]["list"]}
    assert set(variables) == {"datasource", "backend", "model"}
    provisioned = yaml.safe_load((ROOT / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert variables["datasource"]["current"]["value"] == provisioned["datasources"][0]["uid"]


@pytest.mark.parametrize("name", ["backend", "model"])
def test_variables_list_the_values_of_labels_that_exist(name: str) -> None:
    (variable,) = (item for item in dashboard()["templating"]["list"] if item["name"] == name)
    inside = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
    metric, label = inside.split(", ")
    assert label == name
    assert label in metrics_of_the_code()[metric][1]
