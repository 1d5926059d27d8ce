"""The page as text: complete without scripts, the same every time, and deaf to what it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from collections import Counter
from functools import cached_property
from html.parser import HTMLParser

import pytest

from hal.auditing.document import AuditReport, Finding
from hal.auditing.gates import GateClass, Severity
from hal.auditing.html import render_html
from hal.auditing.html.shown_text import LIMIT, shown_text
from hostile_reports import HOSTILE, hostile_report
from layered_reports import changed_report, empty_report, model_report, program_report

_VOID = {"col", "meta", "link", "br", "input"}


class Page(HTMLParser):
    """A page as a parser sees it. texts: what is shown; raws: contents of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.raws: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.errors: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.errors.append(f"</{tag}> in {self.open[-3:]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.raws.append((self.open[-1], data))
        else:
            self.texts.append(data)

    def values(self, tag: str, attribute: str) -> list[str]:
        return [v for t, name, v in self.attributes if (t, name) == (tag, attribute)]

    @cached_property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


REPORTS = {
    "model": lambda: model_report(seed=random.randrange(1 << 30)),
    "program": lambda: program_report(seed=random.randrange(1 << 30)),
    "untimed": lambda: model_report(layers=3, times=False),
    "empty": empty_report,
    "hostile": hostile_report,
}


@pytest.fixture(params=REPORTS)
def report(request: pytest.FixtureRequest) -> AuditReport:
    return REPORTS[request.param]()


def test_every_page_is_well_formed_and_whole(report: AuditReport) -> None:
    page = Page(render_html(report))
    assert page.errors == []
    assert page.open == []
    assert page.tags["h1"] == 1
    assert page.tags["main"] == 1
    identifiers = [value for _, name, value in page.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    targets = {value[1:] for value in page.values("a", "href")}
    assert targets <= set(identifiers)
    used = {value[1:] for value in page.values("use", "href")}
    assert used <= set(identifiers)


def test_every_row_finding_and_reason_is_there_without_a_script() -> None:
    report = model_report(seed=random.randrange(1 << 30))
    page = Page(render_html(report))
    assert len(page.values("tr", "data-i")) == len(report.rows)
    for row in report.rows:
        assert row.site in page.text
        assert row.implementation in page.text
    for finding in report.findings:
        assert finding.remedy in page.text
        for fact in finding.evidence:
            assert fact.what in page.text
            assert fact.required in page.text
            assert fact.found in page.text
    for row in report.rows:
        for loser in row.losers:
            assert loser.name in page.text
            assert all(step in page.text for step in loser.unlock)
    for word in ("swallowed", "OMP_NUM_THREADS", "layers.7.o_proj", *report.notes):
        assert word in page.text


def test_what_is_missing_is_said() -> None:
    page = Page(render_html(empty_report()))
    for sentence in (
        "Nothing was observed",
        "No open findings. This was a light audit",
        "No rows: nothing was planned and nothing was observed.",
        "No calls were observed.",
        "No row has FLOPs, bytes and a time",
        "Not asked for: no call was run again",
        "Nothing was refused.",
    ):
        assert sentence in page.text
    assert "best-ranked implementation" not in page.text


def test_a_comparison_is_shown_both_ways() -> None:
    before = model_report(seed=random.randrange(1 << 30))
    page = Page(render_html(changed_report(before), before))
    for words in (
        "60 rows changed",
        "rows slower",
        "60 rows gone",
        "1 new finding",
        "60 gone findings",
        "2.12.0 2.13.0",
        "5.00× slower",
        "A quantised weight is dequantised in every call",
    ):
        assert words in page.text, words
    assert "Changes since" not in Page(render_html(before)).text


@pytest.mark.parametrize("kind", REPORTS)
def test_the_same_report_gives_the_same_page(kind: str) -> None:
    report = REPORTS[kind]()
    again = AuditReport.model_validate_json(report.to_json())
    assert render_html(report) == render_html(again)


def test_the_report_in_the_page_is_the_report(report: AuditReport) -> None:
    page = Page(render_html(report))
    (_, data) = next(raw for raw in page.raws if raw[1].startswith("{"))
    assert json.loads(data) == json.loads(report.to_json())
    assert not re.search(r"[<>&\u2028\u2029\u202e]", data)


def test_nothing_hostile_becomes_markup() -> None:
    plain = Page(render_html(program_report(lines=1)))
    page = Page(render_html(hostile_report()))
    assert page.errors == []
    assert page.tags["script"] == plain.tags["script"] == 3
    assert page.tags["style"] == 1
    assert page.tags["img"] == 0
    allowed = {name for _, name, _ in plain.attributes} | {"colspan", "hidden", "class", "id"}
    found = {name for _, name, _ in page.attributes}
    assert not {name for name in found if name.startswith("on") or name == "style"}
    assert found - allowed <= {"data-loss", "data-page", "dx"}
    for tag, name, value in page.attributes:
        if name in ("href", "src"):
            assert value.startswith("#") or (tag, value) == ("link", "data:,")


def test_hostile_text_is_shown_as_what_it_is() -> None:
    page = Page(render_html(hostile_report()))
    text = " ".join(page.texts)
    for hostile in HOSTILE[:8]:
        assert hostile in text
    assert "{{ 7*7 }}" in text
    assert "\\u202egnp.exe\\u202c" in text
    assert "\\u2066left\\u2069\\u200b\\ufeff\\xad" in text
    assert "\\x1b[2J\\x07\\x00" in text
    unseen = re.compile("[\x00-\x08\x0b-\x1f\u200b\u202a-\u202e\u2066-\u2069\ufeff\u00ad]")
    assert not unseen.search(text)
    assert not any(unseen.search(value) for _, _, value in page.attributes)


def test_endless_text_is_cut_and_said_to_be() -> None:
    page = Page(render_html(hostile_report()))
    assert max(map(len, page.texts)) < 3 * LIMIT
    assert "[16,384 characters]" in page.text
    endless = program_report(lines=1).model_copy(update={"subject": "x" * (1 << 20)})
    assert "[1,048,576 characters]" in Page(render_html(endless)).text
    text = "".join(random.choices("abc\u0301\u202e<", k=LIMIT + 1))
    assert shown_text(text).endswith(f"[{LIMIT + 1:,} characters]")
    assert shown_text("plain é 字 text") == "plain é 字 text"
    assert len(shown_text("a" + "\u0301" * 300)) < 10


def test_the_policy_allows_what_is_here_and_nothing_else(report: AuditReport) -> None:
    page = Page(render_html(report))
    (policy,) = [v for v in page.values("meta", "content") if v.startswith("default-src")]
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in policy
    assert "http" not in policy

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    scripts = [text for tag, text in page.raws if tag == "script" and not text.startswith("{")]
    styles = [text for tag, text in page.raws if tag == "style"]
    assert set(rules["script-src"].split()) == set(map(hashed, scripts))
    assert rules["style-src"] == hashed("".join(styles))
    assert not [name for _, name, _ in page.attributes if name == "style"]


def test_the_page_names_no_address() -> None:
    html = render_html(model_report(layers=2))
    assert not re.search(r"https?://|url\((?!#)|@import|//[a-z]+\.", html)


def test_a_waiver_hides_no_finding() -> None:
    finding = Finding(
        rule="r",
        gate=GateClass.SEMANTIC,
        severity=Severity.ERROR,
        title="Dense attention for sparse",
        waiver="semantic: dense_attention_for_sparse",
    )
    report = program_report().model_copy(update={"findings": (finding,)})
    page = Page(render_html(report))
    assert "No open findings." in page.text
    assert "1 finding allowed by waivers" in page.text
    assert "Dense attention for sparse" in page.text
