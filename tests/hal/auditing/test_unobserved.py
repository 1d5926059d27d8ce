"""A report of nothing fails every gate, in every form of `hal audit`; what each exit code is."""

from __future__ import annotations

import datetime
import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from audit_reports import finding, report
from hal.auditing.audit_waivers import audit_waivers
from hal.auditing.document import AuditReport, Row, Work
from hal.auditing.gate import AuditOutputs, exit_code, fails_gate, finish_audit, parse_fail_on
from hal.auditing.gates import GATE_CLASSES, GateClass
from hal.auditing.junit import render_junit
from hal.auditing.markdown import render_markdown
from hal.auditing.program import audit
from hal.auditing.sarif import render_sarif
from hal.auditing.summary import verdict
from hal.auditing.surroundings import complete_report
from hal.auditing.unobserved import NOTHING_OBSERVED, is_observed, with_unobserved
from hal.cli.audit_show import show_report
from hal.errors import AuditError, UsageError
from hal.waivers import Waiver
from hal_process import run_hal

EMPTY = report(rows=(), coverage={}, time_us=0.0)
PLANNED = report(
    kind="model",
    rows=(Row(op="gemm", site="lm_head", implementation="x", state="never-exercised"),),
    coverage={"native": Work(calls=0)},
)
WORDS = [
    ",".join(words)
    for count in (1, 2, len(GATE_CLASSES))
    for words in itertools.combinations(GATE_CLASSES, count)
]


@pytest.mark.parametrize("audited", [EMPTY, PLANNED], ids=["program", "model"])
@pytest.mark.parametrize("words", WORDS)
def test_a_report_of_nothing_fails_a_gate_of_any_class(audited: AuditReport, words: str) -> None:
    for known in (audited, complete_report(audited, environment={})):
        assert exit_code(known, parse_fail_on(words)) == 1
        assert exit_code(known, parse_fail_on("none")) == 0
        assert exit_code(known, {GateClass.ADVICE}) == 0


def test_one_call_is_something() -> None:
    for seen in (
        report(coverage={}),
        report(rows=(), coverage={"outside": Work(calls=1)}),
    ):
        assert is_observed(seen)
        assert with_unobserved(seen) is seen
        assert exit_code(seen, frozenset(GateClass)) == 0


def test_it_is_said_once_and_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    classes = parse_fail_on("semantic")
    audited = complete_report(complete_report(EMPTY, environment={}), environment={})
    assert [f.rule for f in audited.findings] == [NOTHING_OBSERVED]
    (found,) = audited.findings
    assert (found.gate, found.waiver) == (GateClass.UNVERIFIED, None)
    assert found.remedy
    assert "nothing was observed" in verdict(audited, classes)
    assert "nothing was observed" in render_markdown(audited, classes)
    root = ElementTree.fromstring(render_junit(audited, classes))
    assert root.get("failures") == "1"
    (result,) = json.loads(render_sarif(audited, classes))["runs"][0]["results"]
    assert (result["ruleId"], result["level"]) == (NOTHING_OBSERVED, "error")
    # Without a gate it is a warning of the report.
    root = ElementTree.fromstring(render_junit(audited, frozenset()))
    assert root.get("failures") == "0"
    assert finish_audit(EMPTY, AuditOutputs(), classes) == 1
    assert "Failed: nothing was observed" in capsys.readouterr().out


def test_no_waiver_allows_it() -> None:
    for op, component in (("*", "*"), ("attention", "*"), ("*", "model.py"), ("*", "?*")):
        waiver = Waiver(
            op=op,
            component=component,
            device="*",
            kind="unverified",
            reason="a smoke run of the command only",
            owner="somebody@example.com",
            expires=datetime.date(2999, 1, 1),
            max_call_share=1.0,
        )
        allowed = audit_waivers([waiver]).applied_to(with_unobserved(EMPTY))
        assert exit_code(allowed, parse_fail_on("unverified")) == 1, (op, component)


def test_fails_gate_is_of_its_classes_without_advice_and_waivers() -> None:
    plain = finding(gate=GateClass.UNROUTED)
    assert fails_gate(plain, {GateClass.UNROUTED, GateClass.SEMANTIC})
    assert not fails_gate(plain, {GateClass.SEMANTIC})
    assert not fails_gate(finding(gate=GateClass.ADVICE), frozenset(GateClass))
    assert not fails_gate(finding(waiver="w"), frozenset(GateClass))


def test_the_programs_own_code_counts_first() -> None:
    gate = {GateClass.LOST_FAST_PATH}
    lost = report(findings=(finding(),))
    codes = [exit_code(audited, gate, code) for audited in (report(), lost) for code in (0, 7, 130)]
    assert codes == [0, 7, 130, 1, 7, 130]


def test_a_block_of_nothing_fails_its_gate() -> None:
    with pytest.raises(AuditError, match="nothing was observed"), audit(fail_on="semantic"):
        pass
    with audit() as observed:
        pass
    assert NOTHING_OBSERVED in {f.rule for f in observed.findings}


def test_commands_end_with_the_gates_code(tmp_path: Path) -> None:
    """0 without a gate, 1 for one, 2 for a word that there is not; the program runs all the same,
    but for the last."""
    program, stored = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text("print('hello')\n")
    done = run_hal("audit", "run", "--fail-on", "lost-fast-path", "--json", stored, program)
    assert (done.returncode, done.stdout) == (1, "hello\n"), done.stderr
    assert "Failed: nothing was observed" in done.stderr
    for words, code in (("none", 0), ("unverified", 1), ("advice,unverified", 2)):
        if code == 2:
            with pytest.raises(UsageError):
                show_report(stored, AuditOutputs(), words)
        else:
            assert show_report(stored, AuditOutputs(), words) == code
    done = run_hal("audit", "run", "--fail-on", "unverifed", program)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'unverified'" in done.stderr
