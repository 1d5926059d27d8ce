"""Waivers in an audit: what each became is visible, and only what holds allows anything."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from audit_reports import finding, report
from hal.auditing.audit_waivers import AuditWaivers, gate_of, read_audit_waivers
from hal.auditing.document import AuditReport, Location, Machine, Row
from hal.auditing.gate import exit_code
from hal.auditing.gates import GateClass
from hal.errors import WaiverError
from hal.waivers import parse_waivers

TODAY = datetime.date(2026, 6, 15)
GOOD = {
    "op": '"attention"',
    "component": '"model.py:*"',
    "device": '"cpu:*"',
    "kind": '"tier"',
    "reason": '"measured, it does not matter"',
    "owner": '"serving team"',
    "expires": "2026-06-15",
    "max_call_share": "1.0",
}


def stanza(**changes: str) -> str:
    fields = {**GOOD, **changes}
    return "[[waiver]]\n" + "\n".join(f"{key} = {value}" for key, value in fields.items()) + "\n"


def read(tmp_path: Path, *stanzas: str) -> AuditWaivers:
    path = tmp_path / "waivers.toml"
    path.write_text("\n".join(stanzas))
    return read_audit_waivers(path, today=TODAY)


def states(audited: AuditReport) -> list[str]:
    return [use.state for use in audited.waivers]


def test_used_and_unused_are_both_visible(tmp_path: Path) -> None:
    waivers = read(tmp_path, stanza(), stanza(op='"gemm"'))
    audited = waivers.applied_to(report(findings=(finding(calls=5),)))
    assert states(audited) == ["used", "unused"]
    assert [use.calls for use in audited.waivers] == [5, 0]
    assert "serving team" in str(audited.findings[0].waiver)
    assert exit_code(audited, set(GateClass)) == 0


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"expires": "2026-06-14"}, "expired"),
        ({"op": '"*"', "component": '"*"'}, "over-broad"),
        ({"max_call_share": "0.4"}, "over-broad"),
        ({"max_call_share": "0.5"}, "used"),
        ({"device": '"cuda:*"'}, "unused"),
        ({"device": '"x86_64*"'}, "used"),
        ({"device": '"Acme*"'}, "used"),
        ({"kind": '"semantic"'}, "unused"),
        ({"component": '"model.py"'}, "used"),
        ({"component": '"model.py:forward"'}, "used"),
        ({"component": '"other.py*"'}, "unused"),
        ({"op": '"att*"'}, "used"),
        ({"op": '"attention.decode"'}, "unused"),
    ],
)
def test_what_becomes_of_a_waiver(changes: dict[str, str], state: str, tmp_path: Path) -> None:
    rows = tuple(
        Row(op="attention", implementation="math", location=Location(file=file, line=12))
        for file in ("model.py", "other_place.py")
    )
    waivers = read(tmp_path, stanza(**changes))
    audited = waivers.applied_to(
        report(
            rows=rows[1:],
            findings=(finding(location=Location(file="model.py", line=12, function="forward")),),
        )
    )
    assert states(audited) == [state]
    assert (audited.findings[0].waiver is not None) == (state == "used")
    assert exit_code(audited, {GateClass.LOST_FAST_PATH}) == int(state != "used")


@pytest.mark.parametrize("gate", [gate for gate in GateClass if gate is not GateClass.ADVICE])
def test_each_class_has_its_kind(gate: GateClass, tmp_path: Path) -> None:
    kind = "tier" if gate is GateClass.LOST_FAST_PATH else gate.value
    waivers = read(tmp_path, stanza(kind=f'"{kind}"'))
    assert gate_of(waivers.waivers[0]) is gate
    everything = tuple(finding(gate=other) for other in GateClass)
    audited = waivers.applied_to(report(findings=everything))
    assert [found.gate for found in audited.findings if found.waiver] == [gate]


def test_waivers_of_a_plan_count_as_used_there(tmp_path: Path) -> None:
    waivers = read(tmp_path, stanza(op='"rope"', component='"layers.*.rope"'))
    text = waivers.waivers[0].describe()
    site = finding(op="rope", site="layers.3.rope", location=None, waiver=text)
    audited = waivers.applied_to(report(findings=(site,)))
    assert states(audited) == ["used"]
    broad = read(tmp_path, stanza(op='"rope"', component='"layers.*.rope"', max_call_share="0.1"))
    site = finding(
        op="rope", site="layers.3.rope", location=None, waiver=broad.waivers[0].describe()
    )
    audited = broad.applied_to(report(findings=(site,)))
    assert states(audited) == ["over-broad"]
    assert audited.findings[0].waiver is None


def test_ops_of_any_program_can_be_named(tmp_path: Path) -> None:
    waivers = read(tmp_path, stanza(op='"convolution"'), stanza(op='"copy"'))
    audited = waivers.applied_to(report(findings=(finding(op="convolution"),)))
    assert states(audited) == ["used", "unused"]
    with pytest.raises(WaiverError, match="did you mean 'convolution'"):
        read(tmp_path, stanza(op='"convolutoin"'))


def test_planning_of_an_audit_does_not_fail_for_what_the_report_shows(tmp_path: Path) -> None:
    text = [stanza(), stanza(expires="2026-06-14"), stanza(op='"*"', component='"*"')]
    book = read(tmp_path, *text).planning_book()
    assert len(book.waivers) == 1
    assert book.is_lenient
    with pytest.raises(WaiverError, match="expired"):
        parse_waivers("\n".join(text), "waivers.toml", today=TODAY)
    assert read_audit_waivers(None).applied_to(report()).waivers == ()


def test_malformed_files_are_errors_all_the_same(tmp_path: Path) -> None:
    for text in ("[[waiver]", "[waivr]\n", stanza(kind='"slow"'), stanza(reason='" "')):
        with pytest.raises(WaiverError):
            read(tmp_path, text)
    with pytest.raises(WaiverError, match="readable"):
        read_audit_waivers(tmp_path / "none.toml")


def test_kinds_of_audits_are_passed_over_by_plans(tmp_path: Path) -> None:
    book = parse_waivers(stanza(kind='"unverified"'), "waivers.toml", today=TODAY)
    assert [waiver.kind for waiver in book.waivers] == ["unverified"]
    machine = Machine(label="x", device_id="cuda:0")
    waivers = read(tmp_path, stanza(kind='"unverified"', device='"cuda:0"'))
    audited = waivers.applied_to(
        report(machine=machine, findings=(finding(gate=GateClass.UNVERIFIED),))
    )
    assert states(audited) == ["used"]
