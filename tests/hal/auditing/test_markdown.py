"""The pull request's comment: short, true, and showing texts as they are."""

from __future__ import annotations

import html as html_library
import re

import pytest
from markdown_it import MarkdownIt

from audit_reports import HOSTILE, finding, random_report, report
from fresh_draws import fresh_seeds
from hal.auditing.document import Location, Refusal, Variable, WaiverUse, Work
from hal.auditing.gates import GateClass
from hal.auditing.markdown import COMMENT_MARK, MAX_CHARACTERS, render_markdown
from hal.auditing.markdown_text import markdown_code, markdown_text
from hal.visible_text import visible_text

LOST = frozenset({GateClass.LOST_FAST_PATH})
PARSER = MarkdownIt("commonmark").enable("table").enable("strikethrough")


def rendered(markdown: str) -> str:
    """The HTML that a host would make, but for its links to people and issues."""
    return PARSER.render(markdown)


def table_rows(markdown: str) -> list[list[str]]:
    """The cells of the tables' bodies, as text without tags."""
    html = rendered(markdown)
    bodies = re.findall(r"<tbody>(.*?)</tbody>", html, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", "".join(bodies), re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(text: str) -> None:
    markdown = f"| {markdown_text(text)} | {markdown_code(text)} |"
    table = f"| a | b |\n| --- | --- |\n{markdown}\n"
    html = rendered(table)
    (cells,) = table_rows(table)
    assert len(cells) == 2, html
    for tag in ("a", "img", "script", "em", "strong", "s", "input", "br", "li"):
        assert f"<{tag}" not in cells[0], html
    paragraph = rendered(f"{markdown_text(text)}\n")
    plain = html_library.unescape(re.sub("<[^>]*>", "", paragraph)).replace("\u200b", "")
    assert plain.strip() == " ".join(visible_text(text).split())
    outside = re.sub(r"&#\d+;", ";", markdown_text(text))
    assert not re.search(r"@\w|#\d|[Gg][Hh]-\d|://|[\x00-\x1f\u202e]", outside)


def test_text_is_cut_where_it_is_told_to() -> None:
    assert markdown_text("x" * 50, 10) == "x" * 9 + "…"
    assert markdown_code("a b") == "`a b`"
    assert markdown_text("attention_mask") == "attention_mask"


def test_a_failed_gate_says_what_where_and_how_to_mend_it() -> None:
    audited = report(
        findings=(finding(), finding(rule="x", gate=GateClass.ADVICE, title="a hint")),
        waivers=(WaiverUse(text="tier waiver for rope", state="expired"),),
        variables=(
            Variable(name="NCCL_P2P_DISABLE", value="1", effect="copies by the host", is_slow=True),
        ),
        refusals=(
            Refusal(
                who="plan", required="a", found="b", location=Location(file="m.py", line=3),
                is_swallowed=True,
            ),
        ),
    )  # fmt: skip
    text = render_markdown(audited, LOST)
    assert text.startswith(f"{COMMENT_MARK}\n### hal audit: failed\n")
    assert "Failed: 1 lost-fast-path." in text
    first, second = table_rows(text)
    assert first[:2] == ["❌", "lost-fast-path"]
    assert "attention ran unfused: attn_mask: required none, found dense" in first[2]
    assert first[3] == "<code>model.py:12</code> (attention)"
    assert "at least 900 µs to gain" in first[4]
    assert first[5] == "pass is_causal=True"
    assert second[1] == "advice"
    assert "expired: tier waiver for rope" in text
    assert "`NCCL_P2P_DISABLE=1`: copies by the host" in text
    assert "swallowed refusal: plan at `m.py:3`" in text
    assert "### hal audit: passed" in render_markdown(report(), LOST)
    assert "Passed: nothing was found (gate: lost-fast-path)." in render_markdown(report(), LOST)
    assert "### hal audit: report" in render_markdown(report(), frozenset())


def test_what_changed_since_the_earlier_report() -> None:
    old = report(
        findings=(finding(), finding(rule="gone")),
        coverage={"native": Work(flops=9.0), "portable": Work(flops=1.0)},
    )
    new = report(
        findings=(finding(), finding(rule="new", title="something new"), finding(rule="new")),
        coverage={"native": Work(flops=5.0), "portable": Work(flops=5.0)},
    )
    text = render_markdown(new, LOST, old)
    assert "Against the earlier report: 2 new findings, 1 gone, 1 as before." in text
    assert "- new: lost-fast-path: something new at `model.py:12`" in text
    assert "- gone: lost-fast-path: attention ran unfused" in text
    assert "- work in native: 90% → 50% of the FLOPs" in text
    same = render_markdown(old, LOST, old)
    assert "0 new findings, 0 gone, 2 as before." in same
    assert "new:" not in same


@pytest.mark.parametrize("seed", fresh_seeds(20))
def test_hostile_reports_keep_the_form(seed: int) -> None:
    audited, previous = random_report(seed), random_report(seed + 1)
    text = render_markdown(audited, LOST, previous)
    assert len(text.encode()) <= MAX_CHARACTERS
    rows = table_rows(text)
    assert len(rows) == len(audited.open_findings())
    assert all(len(row) == 6 for row in rows)
    html = rendered(text)
    for tag in ("<a ", "<img", "<script", "<em>", "<strong>", "<input"):
        assert tag not in html
    outside = re.sub(r"`[^`]*`|&#\d+;", ";", text)
    assert not re.search(r"@\w|#\d|://", outside)


@pytest.mark.parametrize("title", ["x" * 300, "🙂" * 300, "|" * 300, "`" * 300])
def test_a_long_list_is_cut_and_says_so(title: str) -> None:
    findings = tuple(finding(rule=f"r{n}", title=title, remedy=title) for n in range(1500))
    audited = report(findings=findings)
    text = render_markdown(audited, LOST, report())
    assert len(text.encode()) <= MAX_CHARACTERS
    shown = len(table_rows(text))
    assert 3 < shown < 1500
    assert f"…and {1500 - shown:,} findings more than this comment can hold" in text
