"""The gate: words, exit codes, places of outputs, and which files a finished audit leaves."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest

from audit_reports import finding, random_report, report
from hal.auditing.document import AuditReport
from hal.auditing.gate import (
    MODEL_FAIL_ON,
    PROGRAM_FAIL_ON,
    create_outputs,
    exit_code,
    finish_audit,
    gated_findings,
    parse_fail_on,
)
from hal.auditing.gates import GATE_CLASSES, GateClass, Severity
from hal.auditing.report_files import read_report
from hal.errors import DocumentError, UsageError


def test_words_of_fail_on() -> None:
    assert parse_fail_on(None) == parse_fail_on(MODEL_FAIL_ON)
    assert {gate.value for gate in parse_fail_on(MODEL_FAIL_ON)} == {
        "lost-fast-path",
        "unrouted",
        "semantic",
        "leaf-mismatch",
    }
    assert parse_fail_on(None, PROGRAM_FAIL_ON) == frozenset()
    assert parse_fail_on("none") == frozenset()
    for count in range(1, len(GATE_CLASSES) + 1):
        for words in itertools.combinations(GATE_CLASSES, count):
            assert {gate.value for gate in parse_fail_on(" , ".join(words))} == set(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lost-fast-pth", ["'lost-fast-pth'", "did you mean 'lost-fast-path'"]),
        ("unrouted,", ["an empty word"]),
        ("", ["an empty word"]),
        ("none,unrouted", ["none beside 1 others", "none alone"]),
        ("advice", ["never fails a gate"]),
        ("Semantic", ["'Semantic'", "did you mean 'semantic'"]),
        ("xyzzy", ["known names", "ignored-setting"]),
    ],
)
def test_unfit_words_name_the_nearest(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        parse_fail_on(text)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("gate", list(GateClass))
def test_a_gate_fails_on_its_own_classes_only(gate: GateClass) -> None:
    audited = report(findings=(finding(gate=gate, severity=Severity.NOTE),))
    for other in GateClass:
        is_failed = other is gate and gate is not GateClass.ADVICE
        assert exit_code(audited, {other}) == int(is_failed)
    waived = report(findings=(finding(gate=gate, waiver="allowed"),))
    assert exit_code(waived, set(GateClass)) == 0
    assert exit_code(audited, ()) == 0


def test_gated_findings_come_worst_first() -> None:
    cheap = finding(rule="a", cost_us=1.0)
    dear = finding(rule="b", cost_us=500.0)
    error = finding(rule="c", cost_us=None, severity=Severity.ERROR)
    audited = report(findings=(cheap, dear, error))
    assert gated_findings(audited, {GateClass.LOST_FAST_PATH}) == [error, dear, cheap]


def test_outputs_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="the folder"):
        create_outputs(json=tmp_path)
    with pytest.raises(DocumentError, match="no folder"):
        create_outputs(sarif=tmp_path / "not" / "there.sarif")
    with pytest.raises(DocumentError):
        create_outputs(json=tmp_path / ("x" * 5000))
    with pytest.raises(DocumentError):
        create_outputs(json=tmp_path / "null\0character")
    with pytest.raises(UsageError, match="for both --json and --markdown"):
        create_outputs(json=Path("-"), markdown=Path("-"))
    with pytest.raises(UsageError, match="--sarif"):
        create_outputs(sarif=Path("-"))
    same = tmp_path / "x"
    with pytest.raises(UsageError, match="a place each"):
        create_outputs(json=same, html=tmp_path / "." / "x")
    with pytest.raises(DocumentError, match="readable file"):
        create_outputs(previous=tmp_path / "none.json")
    assert create_outputs().files() == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_closed_to_us_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(DocumentError, match="no permission"):
        create_outputs(json=closed / "report.json")


def test_a_finished_audit_leaves_every_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audited = report(findings=(finding(), finding(rule="r", gate=GateClass.UNVERIFIED)))
    outputs = create_outputs(
        json=tmp_path / "a.json",
        junit=tmp_path / "a.xml",
        sarif=tmp_path / "a.sarif",
        markdown=tmp_path / "a.md",
    )
    assert finish_audit(audited, outputs, parse_fail_on(None)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.json",
        "a.md",
        "a.sarif",
        "a.xml",
    ]
    assert read_report(tmp_path / "a.json") == audited
    assert "Failed: 1 lost-fast-path." in capsys.readouterr().out
    assert finish_audit(audited, outputs, parse_fail_on("semantic")) == 0


@pytest.mark.parametrize("kind", ["json", "markdown"])
def test_standard_output_has_the_document_alone(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    audited = report(findings=(finding(),))
    outputs = create_outputs(**{kind: Path("-")})
    assert finish_audit(audited, outputs, frozenset()) == 0
    text = capsys.readouterr().out
    if kind == "json":
        assert AuditReport.model_validate_json(text) == audited
    else:
        assert text.startswith("<!-- hal audit -->\n")


def test_one_file_that_cannot_be_written_stops_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    outputs = create_outputs(json=folder / "a.json", sarif=tmp_path / "a.sarif")
    folder.rmdir()
    with pytest.raises(ExceptionGroup) as raised:
        finish_audit(report(), outputs, frozenset())
    assert [type(error) for error in raised.value.exceptions] == [DocumentError]
    assert (tmp_path / "a.sarif").is_file()


def test_reports_survive_their_file(tmp_path: Path) -> None:
    for seed in random.sample(range(10**6), 20):
        audited = random_report(seed)
        path = tmp_path / f"{seed}.json"
        finish_audit(audited, create_outputs(json=path), frozenset())
        assert read_report(path) == audited, seed
        assert json.loads(path.read_text())["schema"] == "halstack.audit/1"
        assert "\x1b" not in path.read_text()
