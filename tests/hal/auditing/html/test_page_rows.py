"""The page in a headless Chromium: its table sorted and filtered, map and plot walked by keys."""

from __future__ import annotations

import random
from pathlib import Path

from chromium import Browser, Page
from hal.auditing.document import AuditReport
from hal.auditing.html import render_html
from hal.auditing.html.condensed import MAX_ROWS, condensed
from hal.auditing.html.tier_marks import is_loss
from layered_reports import model_report
from page_reading import cell, focus_first_cell, set_value, shown_rows


def test_rows_are_sorted_by_numbers(model: Page, audited: AuditReport) -> None:
    times = [row.time_us for row in audited.rows]
    slowest = sorted(range(len(times)), key=lambda i: (times[i] is None, -(times[i] or 0.0)))
    assert shown_rows(model) == slowest[:50]
    assert model.evaluate("document.querySelector('[aria-sort]').dataset.sort") == "time"
    model.click("[data-sort=time] button")
    fastest = sorted(range(len(times)), key=lambda i: (times[i] is None, times[i] or 0.0))
    assert shown_rows(model) == fastest[:50]
    model.click("[data-sort=calls] button")
    assert (
        shown_rows(model)
        == sorted(range(len(times)), key=lambda i: (-audited.rows[i].calls, i))[:50]
    )
    assert model.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == (
        "descending"
    )
    set_value(model, "#f-sort", "achieved")
    achieved = [row.achieved for row in audited.rows]
    worst = sorted(range(len(times)), key=lambda i: (achieved[i] is None, achieved[i] or 0.0, i))
    assert shown_rows(model) == worst[:50]


def test_filters_leave_what_fits(model: Page, audited: AuditReport) -> None:
    model.evaluate("document.getElementById('f-text').focus()")
    model.type_text("layers.7. GEMM")
    fits = [n for n, row in enumerate(audited.rows) if "layers.7." in row.site and row.op == "gemm"]
    assert sorted(shown_rows(model)) == fits
    set_value(model, "#f-phase", "decode")
    fits = [n for n in fits if audited.rows[n].phase == "decode"]
    assert sorted(shown_rows(model)) == fits
    assert f"{len(fits)} of {len(fits)} matching" in model.evaluate(
        "document.getElementById('shown').textContent"
    )
    model.click("#filters button[type=reset]")
    model.wait_for("document.getElementById('f-text').value === ''")
    model.evaluate("document.getElementById('f-loss').focus()")
    model.press("Space")
    losses = [n for n, row in enumerate(audited.rows) if is_loss(row)]
    assert set(shown_rows(model)) <= set(losses)
    assert f"50 of {len(losses)} matching" in model.text()
    set_value(model, "#f-tier", "never")
    assert shown_rows(model) == []
    assert "No row matches" in model.text()


def test_more_rows_are_shown_when_asked(model: Page, audited: AuditReport) -> None:
    assert len(shown_rows(model)) == 50
    while not model.evaluate("document.getElementById('more').hidden"):
        model.click("#more")
    assert sorted(shown_rows(model)) == list(range(len(audited.rows)))


def test_the_map_is_walked_with_arrows_and_leads_to_rows(model: Page, audited: AuditReport) -> None:
    focus_first_cell(model)
    assert cell(model) == "layers.0.input_norm"
    model.press("ArrowRight")
    model.press("ArrowDown")
    assert cell(model) == "layers.1.qkv_proj"
    model.press("End")
    assert cell(model) == "layers.29.qkv_proj"
    for _ in range(8):
        model.press("ArrowDown")
    assert cell(model) == "embed"
    for _ in range(8):
        model.press("ArrowUp")
    assert cell(model) == "layers.29.qkv_proj"
    model.press("Home")
    model.press("ArrowLeft")
    assert cell(model) == "layers.0.qkv_proj"
    tip = model.wait_for(
        "!document.getElementById('tip').hidden && document.getElementById('tip').textContent"
    )
    assert "layers.0.qkv_proj (gemm, prefill)" in tip
    assert model.evaluate("document.querySelectorAll('#heat [tabindex=\"0\"]').length") == 1
    model.press("Escape")
    assert model.evaluate("document.getElementById('tip').hidden")
    model.press("Enter")
    model.wait_for("document.activeElement.id === 'f-text'")
    places = {audited.rows[n].site for n in shown_rows(model)}
    assert places == {"layers.0.qkv_proj"}


def test_points_of_the_roofline_are_walked_longest_first(model: Page, audited: AuditReport) -> None:
    drawn = [n for n, row in enumerate(audited.rows) if row.flops and row.bytes and row.time_us]
    drawn.sort(key=lambda n: -(audited.rows[n].time_us or 0.0))
    model.evaluate("document.querySelector('#plot [tabindex=\"0\"]').focus()")
    walked = []
    for _ in range(3):
        walked.append(int(model.evaluate("document.activeElement.dataset.i")))
        model.press("ArrowRight")
    assert walked == drawn[:3]
    model.press("End")
    assert int(model.evaluate("document.activeElement.dataset.i")) == drawn[-1]
    label = model.evaluate("document.activeElement.getAttribute('aria-label')")
    assert audited.rows[drawn[-1]].site in label
    model.press("Home")
    tip = model.wait_for(
        "!document.getElementById('tip').hidden && document.getElementById('tip').textContent"
    )
    assert audited.rows[drawn[0]].implementation in tip
    model.press("Tab")
    assert model.evaluate("document.activeElement.closest('#plot')") is None


def test_of_three_thousand_rows_each_is_found_by_itself_or_in_a_sum(
    browser: Browser, tmp_path: Path
) -> None:
    report = model_report(layers=166, seed=random.randrange(1 << 30))
    assert len(report.rows) > 2900
    (tmp_path / "large.html").write_text(render_html(report), encoding="utf-8")
    page = browser.open_page((tmp_path / "large.html").as_uri(), width=360, is_mobile=True)
    assert len(shown_rows(page)) == 50
    inside = condensed(report)
    in_sums = {n for numbers in inside.sources if len(numbers) > 1 for n in numbers}
    assert len(in_sums) == inside.num_summed > len(report.rows) - MAX_ROWS
    for layer in (7, 165):
        set_value(page, "#f-text", f"layers.{layer}.")
        found = shown_rows(page)
        expected = [
            i
            for i, row in enumerate(inside.report.rows)
            if row.layer == layer or "layers.*." in row.site
        ]
        assert sorted(found) == expected[:50]
        sources = {n for i in expected for n in inside.sources[i]}
        assert {n for n, row in enumerate(report.rows) if row.layer == layer} <= sources
    set_value(page, "#f-text", '"layers.7.rope"')
    assert {inside.report.rows[i].site for i in shown_rows(page)} <= {
        "layers.7.rope",
        "layers.*.rope",
    }
    assert shown_rows(page)
    assert "took less time and are summed in" in page.text()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.problems == []
    page.close()
