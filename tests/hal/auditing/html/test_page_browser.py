"""The page in a headless Chromium: phone, keyboard, dark, paper, without scripts, hostile."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import Browser, Page, open_browser
from hal.auditing.document import AuditReport
from hal.auditing.html import render_html
from hal.auditing.html.palette import PALETTE
from hal.auditing.html.tier_marks import is_loss
from hostile_reports import hostile_report
from layered_reports import changed_report, empty_report, model_report, program_report


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return model_report(seed=random.randrange(1 << 30))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, report: AuditReport) -> dict[str, str]:
    """Addresses of pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "model": render_html(report),
        "changes": render_html(changed_report(report), report),
        "program": render_html(program_report()),
        "empty": render_html(empty_report()),
        "hostile": render_html(hostile_report(), program_report()),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


PAGES = ("model", "changes", "program", "empty", "hostile")


@pytest.fixture
def model(browser: Browser, files: dict[str, str]) -> Iterator[Page]:
    page = browser.open_page(files["model"], width=1280, height=900)
    yield page
    assert page.problems == []
    assert page.requests == [files["model"]]
    page.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_scrolls_down_only(browser: Browser, files: dict[str, str], name: str) -> None:
    page = browser.open_page(files[name], width=360, height=740, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wide = page.evaluate("""[...document.querySelectorAll('main *')].filter((e) => {
        const box = e.getBoundingClientRect();
        return box.width && (box.right > 361 || box.left < -1)
          && !e.closest('.scroller, .visually-hidden, .stackable thead, svg');
      }).map((e) => e.outerHTML.slice(0, 200))""")
    assert wide == []
    assert page.problems == []
    assert page.requests == [files[name]]
    page.close()


@pytest.mark.parametrize("name", PAGES)
def test_everything_that_tab_reaches_has_a_name_and_an_end(
    browser: Browser, files: dict[str, str], name: str
) -> None:
    page = browser.open_page(files[name], width=1000, height=800)
    reached: list[str] = []
    page.evaluate("document.body.focus()")
    for _ in range(300):
        page.press("Tab")
        where = page.evaluate("""(() => {
          const e = document.activeElement;
          if (!e || e === document.body || e === document.documentElement) return null;
          e.dataset.stop ??= String(document.querySelectorAll('[data-stop]').length);
          return e.dataset.stop;
        })()""")
        if where is None or where in reached:
            break
        reached.append(where)
    expected = page.evaluate("""[...document.querySelectorAll(
        'a[href], button, input, select, summary, [tabindex="0"]')].filter((e) =>
        e.tabIndex >= 0 && e.checkVisibility({visibilityProperty: true})).length""")
    assert len(reached) == expected
    for node in page.call("Accessibility.getFullAXTree")["nodes"]:
        properties = {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
        if properties.get("focusable") and node["role"]["value"] != "RootWebArea":
            assert node["name"]["value"] or node["role"]["value"] == "main", node
    page.close()


def test_the_skip_link_comes_first_and_leads_to_the_report(model: Page) -> None:
    model.press("Tab")
    assert model.evaluate("document.activeElement.className") == "skip"
    assert model.evaluate("document.activeElement.getBoundingClientRect().top >= 0")
    model.press("Enter")
    assert model.wait_for("location.hash") == "#main"
    model.press("Tab")
    assert model.evaluate("document.activeElement.closest('main') !== null")


def shown_rows(page: Page) -> list[int]:
    """Numbers of the rows that the table shows, in its order."""
    shown: list[int] = page.evaluate("""[...document.querySelectorAll('#row-table tbody tr')]
        .filter((row) => row.checkVisibility()).map((row) => Number(row.dataset.i))""")
    return shown


def set_value(page: Page, selector: str, value: str) -> None:
    page.evaluate(f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
        e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input', {{bubbles: true}}));
        e.dispatchEvent(new Event('change', {{bubbles: true}})); }})()""")


def test_rows_are_sorted_by_numbers(model: Page, report: AuditReport) -> None:
    times = [row.time_us for row in report.rows]
    slowest = sorted(range(len(times)), key=lambda i: (times[i] is None, -(times[i] or 0.0)))
    assert shown_rows(model) == slowest[:50]
    assert model.evaluate("document.querySelector('[aria-sort]').dataset.sort") == "time"
    model.click("[data-sort=time] button")
    fastest = sorted(range(len(times)), key=lambda i: (times[i] is None, times[i] or 0.0))
    assert shown_rows(model) == fastest[:50]
    model.click("[data-sort=calls] button")
    assert (
        shown_rows(model)
        == sorted(range(len(times)), key=lambda i: (-report.rows[i].calls, i))[:50]
    )
    assert model.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == (
        "descending"
    )
    set_value(model, "#f-sort", "achieved")
    achieved = [row.achieved for row in report.rows]
    worst = sorted(range(len(times)), key=lambda i: (achieved[i] is None, achieved[i] or 0.0, i))
    assert shown_rows(model) == worst[:50]


def test_filters_leave_what_fits(model: Page, report: AuditReport) -> None:
    model.evaluate("document.getElementById('f-text').focus()")
    model.type_text("layers.7. GEMM")
    fits = [n for n, row in enumerate(report.rows) if "layers.7." in row.site and row.op == "gemm"]
    assert sorted(shown_rows(model)) == fits
    set_value(model, "#f-phase", "decode")
    fits = [n for n in fits if report.rows[n].phase == "decode"]
    assert sorted(shown_rows(model)) == fits
    assert f"{len(fits)} of {len(fits)} matching" in model.evaluate(
        "document.getElementById('shown').textContent"
    )
    model.click("#filters button[type=reset]")
    model.wait_for("document.getElementById('f-text').value === ''")
    model.evaluate("document.getElementById('f-loss').focus()")
    model.press("Space")
    losses = [n for n, row in enumerate(report.rows) if is_loss(row)]
    assert set(shown_rows(model)) <= set(losses)
    assert f"50 of {len(losses)} matching" in model.text()
    set_value(model, "#f-tier", "never")
    assert shown_rows(model) == []
    assert "No row matches" in model.text()


def test_more_rows_are_shown_when_asked(model: Page, report: AuditReport) -> None:
    assert len(shown_rows(model)) == 50
    while not model.evaluate("document.getElementById('more').hidden"):
        model.click("#more")
    assert sorted(shown_rows(model)) == list(range(len(report.rows)))


def focus_first_cell(page: Page) -> None:
    page.evaluate("document.querySelector('#heat [tabindex=\"0\"]').focus()")


def cell(page: Page) -> Any:
    return page.evaluate("document.activeElement.dataset.find")


def shown_tip(page: Page) -> str:
    text: str = page.wait_for(
        "[document.getElementById('tip')].map((tip) => tip.hidden ? '' : tip.textContent)[0]"
    )
    return text


def test_the_map_is_walked_with_arrows_and_leads_to_rows(model: Page, report: AuditReport) -> None:
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
    places = {report.rows[n].site for n in shown_rows(model)}
    assert places == {"layers.0.qkv_proj"}


def test_points_of_the_roofline_are_walked_longest_first(model: Page, report: AuditReport) -> None:
    drawn = [n for n, row in enumerate(report.rows) if row.flops and row.bytes and row.time_us]
    drawn.sort(key=lambda n: -(report.rows[n].time_us or 0.0))
    model.evaluate("document.querySelector('#plot [tabindex=\"0\"]').focus()")
    walked = []
    for _ in range(3):
        walked.append(int(model.evaluate("document.activeElement.dataset.i")))
        model.press("ArrowRight")
    assert walked == drawn[:3]
    model.press("End")
    assert int(model.evaluate("document.activeElement.dataset.i")) == drawn[-1]
    label = model.evaluate("document.activeElement.getAttribute('aria-label')")
    assert report.rows[drawn[-1]].site in label
    model.press("Home")
    tip = model.wait_for(
        "!document.getElementById('tip').hidden && document.getElementById('tip').textContent"
    )
    assert report.rows[drawn[0]].implementation in tip
    model.press("Tab")
    assert model.evaluate("document.activeElement.closest('#plot')") is None


def ground(page: Page) -> str:
    value: str = page.evaluate("""(() => {
      const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
      return '#' + [r, g, b].map((v) => v.toString(16).padStart(2, '0')).join('');
    })()""")
    return value


def test_themes_follow_the_system_and_the_button(browser: Browser, files: dict[str, str]) -> None:
    light, dark = PALETTE["page"].light, PALETTE["page"].dark
    for is_dark, system in ((False, light), (True, dark)):
        page = browser.open_page(files["empty"], is_dark=is_dark)
        seen = []
        for _ in range(4):
            seen.append(ground(page))
            page.click("#theme")
        assert seen == [system, light, dark, system]
        page.call("Page.reload")
        page.wait_for(
            "document.readyState === 'complete' && document.getElementById('theme').textContent"
        )
        assert page.problems == []
        page.close()


_LOW_CONTRAST = """(() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('svg') || !e.checkVisibility({visibilityProperty: true})) continue;
    if (e.closest('.visually-hidden, .skip')) continue;
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    let under = e;
    let ground = [];
    while (under) {
      ground = parse(getComputedStyle(under).backgroundColor);
      if (ground.length === 3) break;
      under = under.parentElement;
    }
    const a = light(parse(getComputedStyle(e).color).slice(0, 3));
    const b = light(ground.length ? ground : [255, 255, 255]);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${e.outerHTML.slice(0, 120)}`);
  }
  return found;
})()"""


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["model", "changes", "empty"])
def test_all_text_can_be_read(
    browser: Browser, files: dict[str, str], name: str, is_dark: bool
) -> None:
    page = browser.open_page(files[name], is_dark=is_dark)
    assert page.evaluate(_LOW_CONTRAST) == []
    page.close()


def test_paper_has_everything_and_no_controls(model: Page, report: AuditReport) -> None:
    set_value(model, "#f-text", "")
    model.emulate_media(is_dark=True, medium="print")
    assert len(shown_rows(model)) == len(report.rows)
    for hidden in (".top", "#filters", "#theme", "#more", "#save"):
        assert not model.evaluate(f"document.querySelector({hidden!r}).checkVisibility()")
    assert ground(model) == "#ffffff"
    closed = model.evaluate("""[...document.querySelectorAll('details:not([open])')].map((d) =>
        getComputedStyle(d, '::details-content').contentVisibility)""")
    assert closed
    assert set(closed) == {"visible"}
    document = model.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"]
    assert len(document) > 50_000
    assert model.evaluate("document.querySelectorAll('details[open]').length") == 0


@pytest.mark.parametrize("name", PAGES)
def test_without_scripts_the_page_is_complete(
    browser: Browser, files: dict[str, str], name: str, report: AuditReport
) -> None:
    page = browser.open_page()
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.go(files[name])
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    assert not page.evaluate("document.documentElement.className")
    for control in ("#filters", "#theme", "#more", "#save"):
        assert not page.evaluate(f"document.querySelector({control!r})?.checkVisibility() ?? false")
    if name == "model":
        assert len(shown_rows(page)) == len(report.rows)
    assert page.problems == []
    page.close()


def test_hostile_strings_run_nothing_and_move_nothing(
    browser: Browser, files: dict[str, str]
) -> None:
    page = browser.open_page(files["hostile"])
    assert page.evaluate("window.broken === undefined")
    assert page.evaluate("document.querySelectorAll('img, iframe, object, script').length") == 3
    page.evaluate("document.querySelectorAll('summary').forEach((s) => s.click())")
    focus_first_cell(page)
    page.press("Enter")
    page.press("Tab")
    assert page.evaluate("window.broken === undefined")
    data = page.evaluate("JSON.parse(document.getElementById('report').textContent)")
    assert data == json.loads(hostile_report().to_json())
    assert page.problems == []
    assert page.requests == [files["hostile"]]
    page.close()


def test_the_policy_stops_scripts_and_requests(browser: Browser, files: dict[str, str]) -> None:
    page = browser.open_page(files["empty"])
    outcome = page.evaluate("""(async () => {
      const outcomes = [];
      const stopped = (window.stopped = []);
      addEventListener('securitypolicyviolation', (e) => stopped.push(e.effectiveDirective));
      try { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); outcomes.push('markup'); }
      catch (error) { outcomes.push(error.name); }
      const script = document.createElement('script');
      try { script.textContent = 'window.broken = 1'; document.body.append(script); }
      catch (error) { outcomes.push(error.name); }
      const image = new Image();
      outcomes.push(await new Promise((done) => {
        image.onload = () => done('loaded'); image.onerror = () => done('refused');
        image.src = 'http://127.0.0.1:9/x.png';
      }));
      outcomes.push(await fetch('http://127.0.0.1:9/').then(() => 'loaded', () => 'refused'));
      return outcomes;
    })()""")
    assert outcome == ["TypeError", "TypeError", "refused", "refused"]
    page.wait_for("['img-src', 'connect-src'].every((rule) => window.stopped.includes(rule))")
    assert page.evaluate("window.broken === undefined")
    page.close()


def test_saving_gives_the_report(model: Page, report: AuditReport) -> None:
    model.evaluate(
        """window.saved = new Promise((done) => {
      const create = URL.createObjectURL;
      URL.createObjectURL = (blob) => { blob.text().then(done); return create.call(URL, blob); };
    })"""
        + ", 0"
    )
    model.call("Browser.setDownloadBehavior", behavior="deny")
    model.click("#save")
    saved = AuditReport.model_validate_json(model.evaluate("window.saved"))
    assert saved == AuditReport.model_validate_json(report.to_json())


def test_three_thousand_rows_show_fifty(browser: Browser, tmp_path: Path) -> None:
    report = model_report(layers=166, seed=random.randrange(1 << 30))
    assert len(report.rows) > 2900
    (tmp_path / "large.html").write_text(render_html(report), encoding="utf-8")
    page = browser.open_page((tmp_path / "large.html").as_uri(), width=360, is_mobile=True)
    assert len(shown_rows(page)) == 50
    set_value(page, "#f-text", "layers.165.")
    assert sorted(shown_rows(page)) == [n for n, r in enumerate(report.rows) if r.layer == 165]
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.problems == []
    page.close()
