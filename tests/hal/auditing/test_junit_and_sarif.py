"""JUnit XML and SARIF: of the shape that servers take, whatever texts a report holds."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from audit_reports import finding, random_report, report
from fresh_draws import fresh_seeds
from hal.auditing.document import AuditReport, Location
from hal.auditing.gate import gated_findings
from hal.auditing.gates import GateClass, Severity
from hal.auditing.junit import render_junit
from hal.auditing.rules import ALL_RULES
from hal.auditing.sarif import render_sarif

SEEDS = fresh_seeds(25)
SOME = frozenset({GateClass.LOST_FAST_PATH, GateClass.SEMANTIC})
# What Jenkins' junit-10.xsd allows (https://github.com/jenkinsci/xunit-plugin, junit-10.xsd).
SUITES = {"name", "time", "tests", "failures", "disabled", "errors"}
SUITE = {
    *("name", "tests", "failures", "errors", "time", "disabled", "skipped", "timestamp"),
    *("hostname", "id", "package", "file", "log", "url", "version"),
}
CASE = {"name", "classname", "time"}
CHILDREN = ("failure", "error", "skipped", "system-out", "system-err", "properties")


def junit(audited: AuditReport, fail_on: frozenset[GateClass] = SOME) -> ElementTree.Element:
    """Parsed again, from bytes, and of the allowed form."""
    root = ElementTree.fromstring(render_junit(audited, fail_on).encode())
    assert root.tag == "testsuites"
    assert set(root.attrib) <= SUITES
    for suite in root:
        assert suite.tag == "testsuite"
        assert set(suite.attrib) <= SUITE
        assert {"name", "tests"} <= set(suite.attrib)
        assert [child.tag for child in suite][:1] == ["properties"]
        cases = suite.findall("testcase")
        assert suite.attrib["tests"] == str(len(cases))
        for tag in ("failures", "skipped"):
            found = suite.findall(f"testcase/{tag.rstrip('s') if tag == 'failures' else tag}")
            assert suite.attrib[tag] == str(len(found))
        names = [(case.attrib["classname"], case.attrib["name"]) for case in cases]
        assert len(set(names)) == len(names)
        for case in cases:
            assert set(case.attrib) <= CASE
            assert all(child.tag in CHILDREN for child in case)
            assert sum(child.tag in ("failure", "skipped") for child in case) <= 1
            assert float(case.attrib["time"]) >= 0
    assert root.attrib["tests"] == str(len(root.findall("testsuite/testcase")))
    assert root.attrib["failures"] == str(len(root.findall("testsuite/testcase/failure")))
    return root


@pytest.mark.parametrize("seed", SEEDS)
def test_junit_has_a_case_for_every_row_and_finding(seed: int) -> None:
    audited = random_report(seed)
    root = junit(audited)
    assert len(root.findall("testsuite/testcase")) == len(audited.rows) + len(audited.findings)
    failures = root.findall("testsuite/testcase/failure")
    assert len(failures) == len(gated_findings(audited, SOME))
    for failure in failures:
        assert failure.attrib["type"] in {gate.value for gate in SOME}


def test_junit_names_what_failed_and_why() -> None:
    lost = finding()
    waived = finding(rule="w", waiver="ticket 12")
    other = finding(rule="u", gate=GateClass.UNVERIFIED)
    root = junit(report(findings=(lost, waived, other)))
    cases = {case.attrib["name"]: case for case in root.iter("testcase")}
    case = cases["math-attention at model.py:12"]
    (failure,) = case
    assert failure.attrib == {"message": "attention ran unfused", "type": "lost-fast-path"}
    assert "attn_mask: required none, found dense" in str(failure.text)
    assert "pass is_causal=True" in str(failure.text)
    skipped = cases["w at model.py:12"].find("skipped")
    assert skipped is not None
    assert skipped.attrib["message"] == "waived: ticket 12"
    assert cases["u at model.py:12"].find("failure") is None


def test_junit_escapes_what_xml_cannot_hold() -> None:
    text = "bell \x07 null \x00 escape \x1b[2J \ufffe \uffff \u202e ]]> <a> & \" '"
    audited = report(findings=(finding(title=text, remedy=text),), subject=text)
    written = render_junit(audited, SOME)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\u202e]", written)
    failure = next(junit(audited).iter("failure"))
    assert "bell \\x07 null \\x00 escape \\x1b[2J \\ufffe \\uffff \\u202e ]]> <a> & \" '" in str(
        failure.text
    )


def sarif(audited: AuditReport, fail_on: frozenset[GateClass] = SOME) -> dict[str, Any]:
    """The one run, parsed again; its fields are those of the schema, with the schema's types."""
    document = json.loads(render_sarif(audited, fail_on))
    assert set(document) == {"$schema", "version", "runs"}
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "hal audit"
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids)
    for rule in driver["rules"]:
        for field in ("shortDescription", "fullDescription", "help"):
            assert rule[field]["text"].strip()
        assert rule["defaultConfiguration"]["level"] in ("note", "warning", "error")
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("note", "warning", "error")
        assert result["message"]["text"].strip()
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        uri = physical["artifactLocation"]["uri"]
        assert re.fullmatch(r"[A-Za-z0-9/._~%+-]+", uri), uri
        assert not uri.startswith("/")
        assert ".." not in uri.split("/")
        assert physical["region"]["startLine"] >= 1
        assert all(isinstance(v, str) for v in result["partialFingerprints"].values())
        for suppression in result.get("suppressions", ()):
            assert suppression["kind"] in ("inSource", "external")
    return dict(run)


@pytest.mark.parametrize("seed", SEEDS)
def test_sarif_has_every_finding(seed: int) -> None:
    audited = random_report(seed)
    run = sarif(audited)
    assert len(run["results"]) == len(audited.findings)
    gated = gated_findings(audited, SOME)
    for found, result in zip(audited.findings, run["results"], strict=True):
        assert ("suppressions" in result) == (found.waiver is not None)
        assert result["level"] == ("error" if found in gated else found.severity.value)
    prints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]
    assert len(set(prints)) == len(prints)


def test_sarif_places_are_relative() -> None:
    places = {
        "model.py": "model.py",
        "/usr/lib/python3/site-packages/transformers/modeling.py": "transformers/modeling.py",
        "/somewhere/else/x y.py": "somewhere/else/x%20y.py",
        "../outside.py": "outside.py",
        "": "unknown",
    }
    findings = tuple(finding(location=Location(file=file, line=0)) for file in places)
    run = sarif(report(findings=findings))
    uris = [
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in run["results"]
    ]
    assert uris == list(places.values())


def test_sarif_of_a_plan_has_the_call_site_as_logical_location() -> None:
    run = sarif(
        report(
            kind="model",
            subject="tiny-llama",
            findings=(finding(site="layers.3.attention", location=None),),
        )
    )
    (location,) = run["results"][0]["locations"]
    assert location["logicalLocations"] == [
        {"fullyQualifiedName": "layers.3.attention", "kind": "member"}
    ]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "tiny-llama"


def test_fingerprints_stay_while_lines_move() -> None:
    before = sarif(report(findings=(finding(),)))
    after = sarif(
        report(findings=(finding(location=Location(file="model.py", line=99, function="forward")),))
    )
    assert before["results"][0]["partialFingerprints"] == after["results"][0]["partialFingerprints"]


def test_every_rule_of_programs_has_its_help() -> None:
    findings = tuple(
        finding(rule=rule.id, gate=rule.gate, severity=Severity.WARNING) for rule in ALL_RULES
    )
    run = sarif(report(findings=findings))
    helps = {rule["id"]: rule["help"]["text"] for rule in run["tool"]["driver"]["rules"]}
    assert {rule.id for rule in ALL_RULES} == helps.keys()
    for rule in ALL_RULES:
        assert rule.remedy in helps[rule.id]
