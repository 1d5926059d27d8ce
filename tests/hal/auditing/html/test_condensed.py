"""A page of a large report: what matters and sums, of a few megabytes, that says what it lacks."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from audit_reports import finding
from hal.auditing.document import AuditReport, LeafCheck, Location, Row
from hal.auditing.html import render_html
from hal.auditing.html.condensed import MAX_FINDINGS, MAX_ROWS, condensed
from hal.auditing.html.heat_map import MAX_COLUMNS, heat_map
from hal.auditing.html.tier_marks import is_loss
from hal.auditing.summary import observed_time_us
from hal.auditing.totals import totals_problem
from layered_reports import changed_report, model_report, program_report

MAX_BYTES = 3_000_000


def _embedded(page: str) -> AuditReport:
    text = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)
    return AuditReport.model_validate(json.loads(text[0]))


@pytest.mark.parametrize(
    "kind",
    [
        "program",
        pytest.param("model", marks=pytest.mark.long),
        pytest.param("lines of one function", marks=pytest.mark.long),
        pytest.param("all lost", marks=pytest.mark.long),
    ],
)
def test_forty_thousand_rows_are_three_megabytes(kind: str) -> None:
    seed = random.randrange(1 << 30)
    if kind == "model":
        report = model_report(layers=2222, seed=seed)
    elif kind == "all lost":
        report = _all_lost(model_report(layers=2222, seed=seed))
    else:
        report = program_report(lines=40_000, seed=seed)
        if kind == "lines of one function":
            report = _distinct_implementations(report)
    assert len(report.rows) >= 40_000
    page = render_html(report)
    assert len(page.encode()) < MAX_BYTES
    inside = condensed(report)
    assert inside.note in page.replace("&#39;", "'")
    assert len(inside.report.rows) <= MAX_ROWS
    assert _embedded(page).rows == AuditReport.model_validate_json(inside.report.to_json()).rows


def _all_lost(report: AuditReport) -> AuditReport:
    """Every leaf another one, each row with a finding of its own."""
    leaf = LeafCheck(declared=("aten::x",), seen={"aten::y": 1}, state="other")
    rows = tuple(row.model_copy(update={"leaf": leaf}) for row in report.rows)
    findings = tuple(
        finding(title=f"loss {number}", site=row.site, location=None, cost_us=float(number))
        for number, row in enumerate(rows)
    )
    return report.model_copy(update={"rows": rows, "findings": findings})


def _distinct_implementations(report: AuditReport) -> AuditReport:
    rows = tuple(
        row.model_copy(
            update={
                "implementation": f"kernel_{number}",
                "op": f"op_{number % 997}",
                "location": Location(file="one.py", line=number + 1, function="f"),
            }
        )
        for number, row in enumerate(report.rows)
    )
    return report.model_copy(update={"rows": rows})


def _large(seed: int) -> AuditReport:
    rng = random.Random(seed)
    report = rng.choice(
        (model_report(layers=rng.randrange(80, 160), seed=seed), program_report(lines=1500))
    )
    return _distinct_implementations(report) if rng.random() < 0.3 else report


@pytest.mark.parametrize("number", range(3))
def test_sums_stay_those_of_the_report(number: int) -> None:
    report = _large(random.randrange(1 << 30))
    inside = condensed(report)
    rows, whole = inside.report.rows, report.rows
    assert sorted(n for numbers in inside.sources for n in numbers) == list(range(len(whole)))
    for of in ("calls", "flops", "bytes", "time_us", "bound_us"):
        there = sum(getattr(row, of) or 0.0 for row in whole)
        here = sum(getattr(row, of) or 0.0 for row in rows)
        # A bound is said of a sum only where all that ran has one.
        assert here == pytest.approx(there) or (of == "bound_us" and here <= there)
    assert inside.num_summed == sum(len(n) for n in inside.sources if len(n) > 1)
    for row, numbers in zip(rows, inside.sources, strict=True):
        if len(numbers) == 1:
            assert row == whole[numbers[0]]
        assert {is_loss(whole[n]) for n in numbers} == {is_loss(row)}
        assert {whole[n].tier for n in numbers} == {row.tier}
    assert totals_problem(inside.report) is None
    assert observed_time_us(inside.report) == pytest.approx(observed_time_us(report))


def test_what_matters_stays() -> None:
    report = model_report(layers=150, seed=random.randrange(1 << 30))
    kept = {n for numbers in condensed(report).sources if len(numbers) == 1 for n in numbers}
    by_time = sorted(range(len(report.rows)), key=lambda n: -(report.rows[n].time_us or 0.0))
    losses = [n for n in by_time if is_loss(report.rows[n])]
    assert set(losses[:200]) <= kept
    assert set(by_time[:200]) <= kept


def test_a_small_report_is_there_as_it_is() -> None:
    report = model_report(seed=random.randrange(1 << 30))
    inside = condensed(report)
    assert inside.report is report
    assert (inside.note, inside.num_summed, inside.num_findings) == ("", 0, 0)
    assert _embedded(render_html(report)) == AuditReport.model_validate_json(report.to_json())


def test_findings_are_bounded_and_the_worst_stay() -> None:
    findings = tuple(
        finding(title=f"loss {number}", cost_us=float(number)) for number in range(900)
    )
    report = model_report().model_copy(update={"findings": findings})
    inside = condensed(report)
    costs = [found.cost_us for found in inside.report.findings]
    assert costs == [float(number) for number in range(899, 899 - MAX_FINDINGS, -1)]
    page = render_html(report)
    assert f"{900 - MAX_FINDINGS} findings that cost less left out" in page
    assert page.count('<article class="card warning"') == MAX_FINDINGS
    assert f"And {900 - MAX_FINDINGS} more" in page


def test_layers_share_columns_of_the_map() -> None:
    report = model_report(layers=1000)
    heat = heat_map(report, observed_time_us(report))
    assert heat is not None
    assert len(heat.columns) <= MAX_COLUMNS
    assert heat.layers_per_column == 8
    assert heat.columns[:3] == ("0", "8", "16")
    assert "A column per 8 layers" in render_html(report)
    small = heat_map(model_report(layers=MAX_COLUMNS), 1.0)
    assert small is not None
    assert small.columns == tuple(map(str, range(MAX_COLUMNS)))
    assert small.layers_per_column == 1


def test_a_large_comparison_is_bounded(tmp_path: Path) -> None:
    report = _distinct_implementations(program_report(lines=2000))
    older = report.model_copy(
        update={
            "rows": tuple(
                row.model_copy(update={"implementation": f"older_{row.implementation}"})
                for row in report.rows
            )
        }
    )
    page = render_html(report, older)
    assert len(page.encode()) < MAX_BYTES
    assert "1,700 more" in page
    layered = model_report(layers=200)
    assert len(render_html(changed_report(layered), layered).encode()) < MAX_BYTES


def test_a_row_of_one_place_is_said_to_be_summed() -> None:
    row = Row(op="gemm", implementation="x", calls=1, time_us=1.0, tier="native")
    report = program_report().model_copy(
        update={
            "rows": (
                *(row.model_copy(update={"time_us": 2.0 + n}) for n in range(MAX_ROWS)),
                *(row.model_copy(update={"arguments": f"[{n}]"}) for n in range(7)),
            ),
            "time_us": None,
        }
    )
    (summed,) = [r for r in condensed(report).report.rows if r.arguments.endswith("together")]
    assert summed.implementation == "x"
    assert summed.calls == len(report.rows) - (MAX_ROWS - 250)
    assert summed.arguments == f"{summed.calls} rows together"
