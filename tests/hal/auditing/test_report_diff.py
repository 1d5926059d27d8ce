"""Diffs of audit reports: what was observed to change, and what only disperses."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from audit_reports import finding, random_report, report
from fresh_draws import fresh_seeds
from hal.auditing.changes import ChangeKind, Diff
from hal.auditing.diff_text import render_diff_markdown, sites_text, summary
from hal.auditing.document import AuditReport, Location, Machine, Row, Variable, WaiverUse
from hal.auditing.gates import GateClass
from hal.auditing.html.comparison import compare, counts_of
from hal.auditing.report_diff import diff_reports
from hal.auditing.row_matching import NOISE
from hal.auditing.summary import observed_time_us
from hal.cli import main
from layered_reports import model_report


def kinds(old: AuditReport, new: AuditReport) -> list[ChangeKind]:
    return [change.kind for change in diff_reports(old, new).changes]


def row(**changes: object) -> Row:
    fields: dict[str, object] = {
        "op": "gemm",
        "site": "layers.3.qkv_proj",
        "implementation": "acme.gemm",
        "tier": "tuned",
        "calls": 10,
        "time_us": 1000.0,
    }
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", fresh_seeds(10))
def test_a_report_does_not_differ_from_itself(seed: int) -> None:
    audited = random_report(seed)
    assert diff_reports(audited, audited).changes == ()
    assert diff_reports(audited, audited).exit_code() == 0
    other = diff_reports(audited, random_report(seed + 1))
    assert other.changes
    assert len(render_diff_markdown(other).encode()) <= 65_536


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"versions": {"halstack": "0.1.0", "torch": "2.12.0"}}, ChangeKind.VERSION),
        ({"variables": (Variable(name="A", value="1", effect="x"),)}, ChangeKind.ENVIRONMENT),
        ({"machine": Machine(label="Other CPU", device_id="cpu:0", arch="x86_64_avx2")},
         ChangeKind.DEVICE),
        ({"waivers": (WaiverUse(text="w", state="used"),)}, ChangeKind.SETTING),
        ({"subject": "python other.py"}, ChangeKind.MODEL),
        ({"findings": (finding(),)}, ChangeKind.SLOWER),
        ({"findings": (finding(gate=GateClass.SEMANTIC),)}, ChangeKind.SEMANTICS),
        ({"findings": (finding(gate=GateClass.UNVERIFIED),)}, ChangeKind.REASONS),
        ({"rows": ()}, ChangeKind.SITE_REMOVED),
    ],
)  # fmt: skip
def test_one_change_is_of_its_kind(changes: dict[str, object], kind: ChangeKind) -> None:
    assert kinds(report(), report(**changes)) == [kind]


def test_a_finding_that_is_gone_is_good_news() -> None:
    assert kinds(report(findings=(finding(),)), report()) == [ChangeKind.FASTER]
    moved = finding(location=Location(file="model.py", line=99, function="forward"))
    assert kinds(report(findings=(finding(),)), report(findings=(moved,))) == []
    waived = finding(waiver="allowed")
    assert kinds(report(findings=(finding(),)), report(findings=(waived,))) == [ChangeKind.FASTER]


def test_rows_by_tier_then_by_time() -> None:
    def compared(**changes: object) -> list[ChangeKind]:
        return kinds(report(rows=(row(),)), report(rows=(row(**changes),)))

    assert compared(implementation="reference.gemm", tier="reference") == [ChangeKind.SLOWER]
    assert compared(implementation="acme.best", tier="native") == [ChangeKind.FASTER]
    assert compared(implementation="acme.other") == [ChangeKind.IMPLEMENTATION]
    assert compared(time_us=1000.0 * NOISE * 0.99) == []
    assert compared(time_us=1000.0 * NOISE * 1.01) == [ChangeKind.SLOWER]
    assert compared(time_us=1000.0 / NOISE / 1.01) == [ChangeKind.FASTER]
    assert compared(calls=20, time_us=2000.0) == []
    assert compared(site="layers.4.qkv_proj") == [ChangeKind.SITE_REMOVED, ChangeKind.SITE_ADDED]


def test_the_command_reads_two_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, audited in (("old", report()), ("new", report(findings=(finding(),)))):
        (tmp_path / f"{name}.json").write_text(audited.to_json())
    paths = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    with pytest.raises(SystemExit) as ended:
        main(["diff", *paths, "--json", "-"])
    assert ended.value.code == ChangeKind.SLOWER.exit_code
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "halstack.diff/1"
    assert (document["subject"], document["worst"]) == ("report", "slower")
    assert document["counts"] == {"slower": 1}
    with pytest.raises(SystemExit) as ended:
        main(["diff", *paths, "--fail-on", "semantics"])
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(["diff", *paths, "--json", "-", "--markdown", "-"])
    assert ended.value.code == 2


def test_sites_of_layers_are_told_together() -> None:
    rows = tuple(row(site=f"layers.{n}.qkv_proj") for n in (0, 1, 2, 5, 7))
    worse = tuple(
        row(site=f"layers.{n}.qkv_proj", tier="reference", implementation="r")
        for n in (0, 1, 2, 5, 7)
    )
    found: Diff = diff_reports(report(rows=rows), report(rows=worse))
    (change,) = found.changes
    assert sites_text(change) == "at layers.0–2,5,7.qkv_proj"
    assert summary(found) == "1 slower. The worst: slower."


def test_layers_are_judged_together_as_on_the_page() -> None:
    """Each of thirty rows takes less than a percent; together they take a tenth."""
    layered = model_report(layers=30, seed=random.randrange(1 << 30))
    whole = observed_time_us(layered) or 0.0

    def with_norms(factor: float, of: float) -> AuditReport:
        """Norms of all layers take that share of the whole, times a factor."""
        each = whole * of / 60
        rows = tuple(
            row.model_copy(update={"time_us": each * factor, "calls": 10})
            if row.site.endswith(".input_norm")
            else row
            for row in layered.rows
        )
        return layered.model_copy(update={"rows": rows})

    for of, is_said in ((0.1, True), (0.001, False)):
        old, new = with_norms(1.0, of), with_norms(NOISE * 1.5, of)
        for before, after, kind in (
            (old, new, ChangeKind.SLOWER),
            (new, old, ChangeKind.FASTER),
        ):
            kinds = [change.kind for change in diff_reports(before, after).changes]
            assert kinds == [kind] * len(kinds)
            assert bool(kinds) is is_said
            counts = counts_of(compare(after, before))
            assert counts == ([(kind.value, 60)] if is_said else [])
