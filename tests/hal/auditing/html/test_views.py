"""What the page's views make of a report, checked against the report itself."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hal.auditing.document import AuditReport, Machine, Row
from hal.auditing.gates import GateClass
from hal.auditing.html.comparison import compare, counts_of
from hal.auditing.html.finding_cards import open_cards, waived_cards
from hal.auditing.html.heat_map import MAX_LINES, heat_map
from hal.auditing.html.losers import leaf_groups, loser_list
from hal.auditing.html.places import layers_text, short_site, site_pattern
from hal.auditing.html.roofline_plot import roofline_plot
from hal.auditing.html.tier_marks import is_loss, row_mark
from hal.auditing.html.time_shares import coverage_of, op_groups, op_segments
from hal.auditing.html.verdict import judge_report
from hal.auditing.quantities import number_runs
from hal.auditing.summary import observed_time_us
from layered_reports import (
    BANDWIDTH,
    PEAKS,
    SITES,
    changed_report,
    empty_report,
    model_report,
    program_report,
)


@pytest.fixture
def report() -> AuditReport:
    return model_report(seed=random.randrange(1 << 30))


def test_places() -> None:
    assert site_pattern("layers.12.qkv_proj", 12) == "layers.*.qkv_proj"
    assert site_pattern("layers.3.experts.3.up", 3) == "layers.*.experts.3.up"
    assert short_site("layers.3.experts.3.up", 3) == "experts.3.up"
    assert short_site("lm_head") == "lm_head"
    assert number_runs([4, 0, 1, 2, 9, 9]) == "0–2, 4, 9"
    assert number_runs(range(0, 40, 2)) == "0, 2, 4, 6, 8, …, 38"
    assert (layers_text([]), layers_text([3]), layers_text([3, 4])) == (
        "",
        "layer 3",
        "layers 3–4",
    )


def test_the_map_has_a_cell_for_every_site_layer_and_phase(report: AuditReport) -> None:
    whole = observed_time_us(report)
    drawn = heat_map(report, whole)
    assert drawn is not None
    assert drawn.columns == tuple(map(str, range(30)))
    assert [band.heading for band in drawn.bands] == ["prefill", "decode"]
    marks = {
        (row.phase, row.site): row_mark(row).name for row in report.rows if row.layer is not None
    }
    for band in drawn.bands:
        for line in band.lines:
            for cell in line.cells:
                if cell is not None and cell.span == 1:
                    assert marks.pop((band.heading, cell.filter)) == cell.mark.name
    assert marks == {}


def test_a_cell_shows_the_worst_that_ran(report: AuditReport) -> None:
    row = next(row for row in report.rows if row.site == "layers.4.qkv_proj")
    slow = row.model_copy(update={"tokens": (513, 999), "tier": "reference"})
    never = slow.model_copy(update={"tier": "portable", "state": "never-exercised", "calls": 0})
    for rows, expected in (((row, slow), "reference"), ((row, never), "native")):
        drawn = heat_map(report.model_copy(update={"rows": rows}), None)
        assert drawn is not None
        (line,) = drawn.bands[0].lines
        assert [cell.mark.name for cell in line.cells if cell] == [expected]


def test_the_map_of_a_program_is_by_source_line() -> None:
    drawn = heat_map(program_report(lines=90), 1.0)
    assert drawn is not None
    assert (drawn.axis, len(drawn.bands[0].lines)) == ("op", MAX_LINES)
    assert drawn.num_hidden == 90 - MAX_LINES


def test_times_add_up(report: AuditReport) -> None:
    whole = observed_time_us(report)
    assert whole is not None
    rows_us = sum(row.time_us or 0.0 for row in report.rows)
    groups = op_groups(report, whole)
    assert sum(group.time_us or 0.0 for group in groups) == pytest.approx(rows_us)
    assert sum(group.calls for group in groups) == sum(row.calls for row in report.rows)
    assert [group.time_us for group in groups] == sorted(
        (group.time_us for group in groups), key=lambda us: -(us or 0.0)
    )
    segments = op_segments(report, whole)
    assert sum(part.width for part in segments) == pytest.approx(100 * rows_us / whole)
    for before, after in itertools.pairwise(segments):
        assert after.start == pytest.approx(before.start + before.width)


def test_rows_of_several_threads_may_be_more_than_the_whole(report: AuditReport) -> None:
    segments = op_segments(report, 1.0)
    assert sum(part.width for part in segments) == pytest.approx(100)


def test_coverage_is_the_reports_own_or_the_rows(report: AuditReport) -> None:
    own = coverage_of(report)
    assert own is not None
    assert [tier.name for tier in own.tiers] == [
        "native",
        "portable",
        "reference",
        "host",
        "outside",
    ]
    assert [measure.name for measure in own.measures] == ["time", "FLOPs", "bytes", "calls"]
    of_rows = coverage_of(report.model_copy(update={"coverage": {}}))
    assert of_rows is not None
    assert [tier.name for tier in of_rows.tiers] == ["native", "portable", "reference"]
    for drawn in (own, of_rows):
        for measure in drawn.measures:
            assert sum(part.width for part in measure.segments) == pytest.approx(100)
    assert coverage_of(empty_report()) is None


def test_points_lie_where_their_figures_are(report: AuditReport) -> None:
    """Read off the axes: the ticks give the scale, and each point's place gives its figures."""
    plot = roofline_plot(report, observed_time_us(report))
    assert plot is not None
    drawable = [r for r in report.rows if r.flops and r.bytes and r.time_us]
    assert len(plot.points) == len(drawable)
    ran = sum(row.calls > 0 for row in report.rows)
    assert plot.num_left_out == ran - len(drawable)

    def exponent(text: str) -> float:
        value, _, prefix = text.partition(" ")
        return math.log10(float(value)) + 3 * ("kMGTPE".find(prefix) + 1 if prefix else 0)

    def scale(ticks: list[tuple[float, float]], at: float) -> float:
        (a, first), (b, second) = ticks[0], ticks[-1]
        return first + (at - a) * (second - first) / (b - a)

    x_ticks = [(tick.at, exponent(tick.text)) for tick in plot.x_ticks]
    y_ticks = [(tick.at, exponent(tick.text)) for tick in plot.y_ticks]
    for point in plot.points:
        row = report.rows[point.index]
        assert row.time_us is not None
        assert scale(x_ticks, point.x) == pytest.approx(math.log10(row.flops / row.bytes))
        rate = row.flops / row.time_us * 1e6
        assert scale(y_ticks, point.y) == pytest.approx(math.log10(rate))
        assert 0 <= point.x <= 100
        assert 0 <= point.y <= 100
    for ceiling, (_, peak) in zip(
        plot.ceilings, sorted(PEAKS.items(), key=lambda item: -item[1]), strict=True
    ):
        assert scale(y_ticks, ceiling.y) == pytest.approx(math.log10(peak))
        assert scale(x_ticks, ceiling.x) == pytest.approx(math.log10(peak / BANDWIDTH))
    slope = plot.slope
    assert slope is not None
    for x, y in ((slope.x1, slope.y1), (slope.x2, slope.y2)):
        assert scale(y_ticks, y) - scale(x_ticks, x) == pytest.approx(math.log10(BANDWIDTH))


def test_a_roofline_without_rates_or_without_times(report: AuditReport) -> None:
    bare = report.model_copy(update={"machine": Machine(label="unknown")})
    plot = roofline_plot(bare, None)
    assert plot is not None
    assert (plot.ceilings, plot.slope) == ((), None)
    only_peaks = Machine(label="x", peak_flops={"float32": 1e12, "int8": 0.0})
    plot = roofline_plot(report.model_copy(update={"machine": only_peaks}), None)
    assert plot is not None
    assert [ceiling.x for ceiling in plot.ceilings] == [0.0]
    assert roofline_plot(model_report(times=False), None) is None


def test_losers_are_told_once_for_all_layers(report: AuditReport) -> None:
    losers = loser_list(report)
    (group,) = losers.groups
    assert group.places == ("layers.*.down_proj (layers 0–29)",)
    assert group.phases == ("prefill", "decode")
    assert group.num_rows == 60
    expected = sum(loser.gain_us or 0.0 for row in report.rows for loser in row.losers)
    assert group.gain_us == pytest.approx(expected)
    for row, number in zip(report.rows, losers.group_of, strict=True):
        assert (number == 1) == bool(row.losers)
        assert not row.losers or is_loss(row)


def test_leaves_that_failed_come_first(report: AuditReport) -> None:
    groups = leaf_groups(report)
    assert groups[0].state == "other"
    assert groups[0].num_rows == 4
    assert groups[0].seen[0][0] == "aten::_scaled_dot_product_attention_math"
    assert sum(group.num_rows for group in groups) == sum(r.calls > 0 for r in report.rows)


def test_findings_of_many_layers_are_one_card(report: AuditReport) -> None:
    cards = open_cards(report)
    lost = next(card for card in cards if card.gate is GateClass.LOST_FAST_PATH)
    assert lost.count == 60
    assert lost.places == ("layers.*.down_proj (layers 0–29)",)
    assert lost.title.startswith("layers.*.down_proj runs")
    assert lost.cost_us == pytest.approx(
        sum(f.cost_us or 0.0 for f in report.findings if f.site.endswith("down_proj"))
    )
    assert sum(card.count for card in cards) == len(report.open_findings())
    assert [card.anchor for card in cards if card.anchor] == [
        f"finding-{gate}" for gate in dict.fromkeys(card.gate.value for card in cards)
    ]
    assert [card.waiver for card in waived_cards(report)] == [
        "sample: reference tier, until 2026-06-30"
    ]


def test_the_verdict_counts_what_no_waiver_allows(report: AuditReport) -> None:
    verdict = judge_report(report)
    assert verdict.mood == "bad"
    assert verdict.title == "60 lost fast paths, 1 unrouted call, 4 leaf mismatches"
    assert {gate.gate: (gate.num_open, gate.num_waived) for gate in verdict.gates}[
        GateClass.LOST_FAST_PATH
    ] == (60, 1)
    assert any("never exercised" in caution for caution in verdict.cautions)
    clean = report.model_copy(update={"findings": (), "refusals": ()})
    assert (judge_report(clean).mood, judge_report(clean).title) == ("good", "No fast path lost")
    swallowed = report.model_copy(update={"findings": ()})
    assert judge_report(swallowed).mood == "warn"
    empty = judge_report(empty_report())
    assert (empty.mood, empty.title) == ("calm", "Nothing was observed")


def test_a_comparison_finds_what_changed(report: AuditReport) -> None:
    after = changed_report(report)
    found = compare(after, report)
    num_layers = 30
    assert dict(counts_of(found)) == {
        "changed": 2 * num_layers,
        "slower": 2 * num_layers,
        "gone": 2 * num_layers,
    }
    assert found.num_same == 2 * (num_layers * (len(SITES) - 3) + 4)
    slower = [change for change in found.changes if change.kind == "slower"]
    assert [change.ratio for change in slower] == [pytest.approx(5), pytest.approx(5)]
    assert {change.phase for change in slower} == {"prefill", "decode"}
    assert all(c.places == ("layers.*.o_proj (layers 0–29)",) for c in slower)
    changed = [change for change in found.changes if change.kind == "changed"]
    assert [change.ratio for change in changed] == [pytest.approx(0.4), pytest.approx(0.4)]
    assert [card.rule for card in found.new_findings] == ["dequantised-per-call"]
    assert [card.count for card in found.gone_findings] == [60]
    assert {fact.name for fact in found.facts} >= {"version of torch", "plan"}
    assert found.is_comparable


def test_a_report_compared_with_itself_has_no_changes(report: AuditReport) -> None:
    found = compare(report, report)
    assert (found.facts, found.changes, found.new_findings, found.gone_findings) == ((), (), (), ())
    assert found.num_same == len(report.rows)


def test_lines_that_moved_are_no_change() -> None:
    report = program_report()
    moved = report.model_copy(
        update={
            "rows": tuple(
                row.model_copy(
                    update={
                        "location": row.location.model_copy(update={"line": row.location.line + 3})
                    }
                )
                for row in report.rows
                if row.location is not None
            )
        }
    )
    assert compare(moved, report).changes == ()


def test_other_machines_are_not_comparable(report: AuditReport) -> None:
    other = report.model_copy(update={"machine": Machine(label="another")})
    assert not compare(other, report).is_comparable
    assert not compare(report.model_copy(update={"mode": "light"}), report).is_comparable


def test_marks_of_unknown_words() -> None:
    row = Row(op="gemm", implementation="x", tier="never")
    assert row_mark(row).name == "unknown"
    assert row_mark(row.model_copy(update={"state": "not-planned"})).name == "outside"


def test_what_belongs_to_no_site_is_one_line_of_a_models_map(report: AuditReport) -> None:
    strays = tuple(
        Row(
            op=f"aten::{op}",
            implementation=f"aten::{op}",
            tier="outside",
            state="not-planned",
            calls=1,
            time_us=10.0,
        )
        for op in ("cat", "view", "index")
    )
    drawn = heat_map(report.model_copy(update={"rows": (*report.rows, *strays)}), 100.0)
    assert drawn is not None
    (line,) = drawn.bands[-1].lines
    assert (line.label, drawn.bands[-1].heading) == ("3 ops", "outside call sites")
    (cell,) = line.cells
    assert cell is not None
    assert (cell.mark.name, cell.text, cell.filter) == ("outside", "outside 30.0%", "outside")
