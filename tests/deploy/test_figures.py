"""Dashboard and alerts name existing metrics, and all of them. `tests/docs/lint.py` checks the pages."""

import json
import re

import pytest
from prometheus_client import Counter, Histogram

from tests.deploy import reading
from tokencache import metrics
from tokencache.core.incidents import IncidentKind

FROM_PROMETHEUS = {"job", "instance", "le"}


def exposed() -> dict[str, set[str]]:
    """The series that `/metrics` has, with their labels."""
    found = {}
    for collector in vars(metrics).values():
        match collector:
            case Counter():
                found[f"{collector._name}_total"] = set(collector._labelnames)
            case Histogram():
                found[f"{collector._name}_bucket"] = set(collector._labelnames)
            case _ if hasattr(collector, "_labelnames"):
                found[collector._name] = set(collector._labelnames)
    return found


SERIES = exposed()
RULES = reading.rules()
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
QUERIES = [*(rule["expr"] for rule in RULES), *reading.dashboard_queries()]


def test_no_metric_is_missing():
    assert {name.removesuffix("_total").removesuffix("_bucket") for name in SERIES} == {f.name for f in metrics.REGISTRY.collect()}


def wrong(query: str) -> list[str]:
    """The series and labels of a query that do not exist."""
    asked = reading.selected(query)
    labels = FROM_PROMETHEUS.union(*(SERIES.get(name, ()) for name, _ in asked))
    unknown = [name for name, _ in asked if name not in SERIES and name not in RECORDED]
    for name, matchers in asked:
        unknown += [f"{name}{{{label}}}" for label in set(matchers) - SERIES.get(name, set()) - FROM_PROMETHEUS]
    for word, by in re.findall(r"\b(by|on) \(([^)]*)\)", query):
        unknown += [f"{word} ({label.strip()})" for label in by.split(",") if label and label.strip() not in labels]
    return unknown if asked else [f"{query} selects nothing"]


def test_queries_select_existing_series():
    assert [name for query in QUERIES for name in wrong(query)] == []


@pytest.mark.parametrize("query", ["up", "tokencache_turns_total{missing='x'}", "sum by (missing) (tokencache_turns_total)", "1"])
def test_a_query_of_something_else_is_found(query):
    assert wrong(query)


def test_the_dashboard_shows_every_metric():
    shown = {name for query in reading.dashboard_queries() for name, _ in reading.selected(query)}
    assert shown == set(SERIES)


def test_the_dashboard_is_consistent():
    panels = reading.panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)
    variables = {one["name"] for one in json.loads((reading.MONITORING / "dashboard.json").read_text())["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\b", json.dumps(panels)))
    assert used == variables


def test_alerts_have_a_description_and_a_severity():
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"critical", "warning"}
            assert rule["annotations"].keys() == {"summary", "description"}


def test_the_alert_ignores_incidents_without_a_hole():
    spared = {kind for kind in IncidentKind if not kind.hole}
    for query in QUERIES:
        for name, matchers in reading.selected(query):
            if name == "tokencache_incidents_total" and "|" in matchers.get("kind", ""):
                assert set(matchers["kind"].split("|")) == spared
