"""SARIF and JUnit XML against published schemas, unchanged: those of `support/schemas`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xmlschema
from jsonschema import Draft4Validator, FormatChecker

from audit_reports import finding, random_report, report
from fresh_draws import fresh_seeds
from hal.auditing.document import AuditReport
from hal.auditing.gates import GateClass
from hal.auditing.junit import render_junit
from hal.auditing.sarif import render_sarif
from hal.auditing.unobserved import with_unobserved
from hostile_reports import hostile_report
from layered_reports import empty_report, model_report, program_report

SCHEMAS = Path(__file__).resolve().parents[2] / "support" / "schemas"
SOME = frozenset({GateClass.LOST_FAST_PATH, GateClass.UNROUTED})


@pytest.fixture(scope="module")
def sarif() -> Draft4Validator:
    schema = json.loads((SCHEMAS / "sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8"))
    Draft4Validator.check_schema(schema)
    return Draft4Validator(schema, format_checker=FormatChecker())


@pytest.fixture(scope="module")
def junit() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(str(SCHEMAS / "junit-10.xsd"))


REPORTS: dict[str, Callable[[], AuditReport]] = {
    "one finding": lambda: report(findings=(finding(),)),
    "a waived one": lambda: report(findings=(finding(waiver="allowed until May"),)),
    "a model": lambda: model_report(layers=2),
    "a program": program_report,
    "nothing": lambda: with_unobserved(empty_report()),
    "without findings": report,
    "hostile": hostile_report,
    **{f"random {seed}": (lambda s=seed: random_report(s)) for seed in fresh_seeds(12)},
}


@pytest.mark.parametrize("fail_on", [frozenset(), SOME, frozenset(GateClass)], ids=len)
@pytest.mark.parametrize("name", REPORTS)
def test_both_hold(
    name: str,
    fail_on: frozenset[GateClass],
    sarif: Draft4Validator,
    junit: xmlschema.XMLSchema,
) -> None:
    audited = REPORTS[name]()
    errors = sarif.iter_errors(json.loads(render_sarif(audited, fail_on)))
    assert [f"{list(error.absolute_path)}: {error.message}" for error in errors] == []
    found = junit.iter_errors(render_junit(audited, fail_on))
    assert [f"{error.path}: {error.reason}" for error in found] == []


def _log() -> Any:
    return json.loads(render_sarif(report(findings=(finding(),)), SOME))


BREAKS: dict[str, Callable[[Any], object]] = {
    "no version": lambda log: log.pop("version"),
    "no driver": lambda log: log["runs"][0]["tool"].pop("driver"),
    "an unknown level": lambda log: log["runs"][0]["results"][0].update(level="fatal"),
    "an unknown key": lambda log: log["runs"][0]["results"][0].update(extra=1),
    "no message": lambda log: log["runs"][0]["results"][0].pop("message"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_schema_of_sarif_refuses_what_is_wrong(name: str, sarif: Draft4Validator) -> None:
    log = copy.deepcopy(_log())
    assert sarif.is_valid(log)
    BREAKS[name](log)
    assert not sarif.is_valid(log)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("<testcase ", '<testcase line="3" '),
        (' errors="0"', ""),
        (' time="', ' time="now" was="'),
        ("<properties>", "<facts></facts><properties>"),
    ],
)
def test_the_schema_of_junit_refuses_what_is_wrong(
    text: str, other: str, junit: xmlschema.XMLSchema
) -> None:
    whole = render_junit(report(findings=(finding(),)), SOME)
    assert junit.is_valid(whole)
    assert text in whole
    assert not junit.is_valid(whole.replace(text, other))
