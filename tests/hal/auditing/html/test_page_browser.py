"""The page in a headless Chromium: phone, keyboard, dark, paper, without scripts, hostile."""

from __future__ import annotations

import json

import pytest

from chromium import Browser, Page
from hal.auditing.document import AuditReport
from hal.auditing.html.palette import PALETTE
from hostile_reports import hostile_report
from page_reading import PAGES, focus_first_cell, set_value, shown_rows


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


def test_paper_has_everything_and_no_controls(model: Page, audited: AuditReport) -> None:
    set_value(model, "#f-text", "")
    model.emulate_media(is_dark=True, medium="print")
    assert len(shown_rows(model)) == len(audited.rows)
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
    browser: Browser, files: dict[str, str], name: str, audited: AuditReport
) -> None:
    page = browser.open_page()
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.go(files[name])
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    assert not page.evaluate("document.documentElement.className")
    for control in ("#filters", "#theme", "#more", "#save"):
        assert not page.evaluate(f"document.querySelector({control!r})?.checkVisibility() ?? false")
    if name == "model":
        assert len(shown_rows(page)) == len(audited.rows)
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


def test_saving_gives_the_report(model: Page, audited: AuditReport) -> None:
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
    assert saved == AuditReport.model_validate_json(audited.to_json())
