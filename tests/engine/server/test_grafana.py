"""The Grafana dashboard asks only for metrics and labels that `/metrics` has."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

BODY = {"model": "fake/model", "prompt": "hi", "max_tokens": 5}
# What Prometheus adds to every sample, and a histogram to its buckets.
ADDED_LABELS = {"job", "instance", "le"}
WORDS = {
    *("sum", "max", "min", "by", "rate", "increase", "histogram_quantile", "unless", "offset"),
    *("label_values",),
}
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
IDENTIFIER = re.compile(r"(?<![\w$])[a-zA-Z_:][\w:]*")
WANTED = (
    "hal_time_to_first_token_seconds_bucket",
    "hal_inter_token_latency_seconds_bucket",
    "hal_generated_tokens_total",
    "hal_sequences_waiting",
    "hal_kv_blocks_used",
    "hal_degraded",
    "hal_waivers_in_use",
    "hal_op_calls_total",
)


@pytest.fixture(scope="module")
def dashboard(server: Any) -> dict[str, Any]:
    with server.http() as http:
        found: dict[str, Any] = http.get("/static/grafana-dashboard.json").json()
    return found


@pytest.fixture(scope="module")
def samples(server: Any) -> dict[str, set[str]]:
    """Sample name -> its labels, of a server that has answered a request."""
    with server.http() as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
        text = http.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for note in dashboard["annotations"]["list"]:
        yield note["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            assert variable["definition"] == variable["query"]["query"]
            yield variable["definition"]


def _unknown(expression: str, samples: dict[str, set[str]]) -> set[str]:
    """Identifiers that are neither words of the language, nor metrics, nor labels of those."""
    bare = re.sub(r"\[[^\]]*\]", "", STRING.sub('""', expression))
    bare = re.sub(r"offset \d+m", "offset", bare)
    names = set(IDENTIFIER.findall(bare)) - WORDS
    metrics = {name for name in names if name.startswith("hal_")}
    known = set(samples) | ADDED_LABELS
    for metric in metrics:
        known |= samples.get(metric, set())
    return names - known


def test_every_expression_refers_to_what_there_is(
    dashboard: dict[str, Any], samples: dict[str, set[str]]
) -> None:
    expressions = list(_expressions(dashboard))
    assert len(expressions) > 20
    for expression in expressions:
        assert not _unknown(expression, samples), expression
        assert "hal_" in expression
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
    everything = " ".join(expressions)
    for name in WANTED:
        assert name in everything


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("sum(rate(hal_generated_token_total[5m]))", "hal_generated_token_total"),
        ('hal_op_calls_total{teir="native"}', "teir"),
        ("sum by (layer) (hal_op_calls_total)", "layer"),
    ],
)
def test_a_misspelt_name_is_found(
    samples: dict[str, set[str]], expression: str, unknown: str
) -> None:
    assert _unknown(expression, samples) == {unknown}


def test_legends_name_labels_that_the_expression_keeps(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target


def test_panels_are_distinct_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells: list[tuple[int, int]] = []
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells += itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
        assert panel["type"] == "row" or panel["description"]
    assert len(set(cells)) == len(cells)


def test_it_needs_no_data_source_of_a_certain_name(dashboard: dict[str, Any]) -> None:
    """Import and provisioning both work: the data source is a variable of the dashboard."""
    text = json.dumps(dashboard)
    assert text.count('"uid": "${datasource}"') == text.count('"type": "prometheus"')
    assert "://" not in text
