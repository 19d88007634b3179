"""Dashboard, alerts and the operations page name existing metrics, and all of them."""

import json
import re

import pytest
from prometheus_client import Counter, Histogram

from tests.deploy import reading
from tokencache import metrics

PAGE = reading.OPERATIONS
API = reading.ROOT / "docs/api.md"
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


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_selects_existing_series(query):
    asked = reading.selected(query)
    assert asked
    for name, matchers in asked:
        assert name in SERIES or name in RECORDED
        assert set(matchers) <= SERIES.get(name, set()) | FROM_PROMETHEUS
    for _, labels in re.findall(r"\b(by|on) \(([^)]*)\)", query):
        known = FROM_PROMETHEUS.union(*(SERIES.get(name, ()) for name, _ in asked))
        assert {label.strip() for label in labels.split(",") if label} <= known


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


def test_the_page_explains_every_metric():
    explained = [re.fullmatch(r"`(\w+)(\{[a-z, ]+\})?`", row[0]) for row in reading.table(PAGE, "Metrics, and what to do")]
    assert all(explained)
    named = {one[1]: set(re.findall(r"[a-z]+", one[2] or "")) for one in explained if one}
    assert named == {name.removesuffix("_bucket"): labels for name, labels in SERIES.items()}


def test_no_page_names_metrics_that_do_not_exist():
    known = {*SERIES, *(name.removesuffix("_bucket") for name in SERIES)}
    for page in ("operations.md", "deploy.md"):
        named = set(re.findall(r"`(tokencache_\w+)", (reading.ROOT / "docs" / page).read_text()))
        assert named <= known


def test_the_page_names_every_alert():
    named = {row[0].strip("`") for row in reading.table(PAGE, "Alerts")}
    assert named == {rule["alert"] for rule in RULES if "alert" in rule}


def test_alerts_have_a_description_and_a_severity():
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"critical", "warning"}
            assert rule["annotations"].keys() == {"summary", "description"}


def kinds(page, heading, column):
    """Incident kinds of a page's table: which leave a hole."""
    return {kind: row[column] == "yes" for row in reading.table(page, heading) for kind in re.findall(r"`([a-z-]+)`", row[0])}


def test_the_page_explains_every_incident():
    assert kinds(PAGE, "Incidents, and what to do", 1) == kinds(API, "Incidents", 1)


def test_the_alert_ignores_incidents_without_a_hole():
    spared = {kind for kind, hole in kinds(API, "Incidents", 1).items() if not hole}
    for query in QUERIES:
        for name, matchers in reading.selected(query):
            if name == "tokencache_incidents_total" and "|" in matchers.get("kind", ""):
                assert set(matchers["kind"].split("|")) == spared
