"""A report as SARIF 2.1.0, which code hosts show beside the lines that lose a fast path.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. Findings that fail the gate have
level "error"; waived ones are suppressed with their waiver as justification. Every result has a
place: findings of a plan are in the model, as an artifact, with their call site as logical
location.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final
from urllib.parse import quote

from hal.auditing.document import AuditReport, Finding, Location
from hal.auditing.finding_text import evidence_text, finding_cost
from hal.auditing.gate import fails_gate
from hal.auditing.gates import GateClass
from hal.auditing.rule_texts import RuleText, rule_text
from hal.visible_text import visible_json, visible_text

SARIF_VERSION: Final = "2.1.0"
_SCHEMA_URI: Final = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def render_sarif(report: AuditReport, fail_on: frozenset[GateClass]) -> str:
    """The report as the text of a SARIF log with one run."""
    rules = list(dict.fromkeys(finding.rule for finding in report.findings))
    seen: Counter[str] = Counter()
    results = []
    for finding in report.findings:
        seen[finding.fingerprint] += 1
        number = seen[finding.fingerprint]
        results.append(_result(report, finding, rules.index(finding.rule), number, fail_on))
    first = {finding.rule: finding for finding in reversed(report.findings)}
    run = {
        "tool": {
            "driver": {
                "name": "hal audit",
                "version": report.versions.get("halstack", "unknown"),
                "rules": [_rule(rule_text(rule, first[rule])) for rule in rules],
            }
        },
        "automationDetails": {"id": f"hal-audit/{report.kind}/{_text(report.subject)}/"},
        "invocations": [{"executionSuccessful": True}],
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {
            "device": _text(report.machine.label),
            "plan": report.plan_hash or "",
            "mode": report.mode,
        },
    }
    document = {"$schema": _SCHEMA_URI, "version": SARIF_VERSION, "runs": [run]}
    return visible_json(json.dumps(document, indent=1, ensure_ascii=False)) + "\n"


def _rule(text: RuleText) -> dict[str, Any]:
    words = text.id.replace("_", "-").split("-")
    return {
        "id": text.id,
        "name": "".join(word[:1].upper() + word[1:] for word in words),
        "shortDescription": {"text": _text(text.summary)},
        "fullDescription": {"text": _text(f"{text.summary}. {text.gate_meaning}")},
        "help": {"text": _text(text.help), "markdown": _text(text.help)},
        "defaultConfiguration": {"level": text.level},
        "properties": {"tags": [text.gate.value], "precision": "high"},
    }


def _result(
    report: AuditReport,
    finding: Finding,
    rule_index: int,
    number: int,
    fail_on: frozenset[GateClass],
) -> dict[str, Any]:
    is_failure = fails_gate(finding, fail_on)
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "kind": "fail",
        "level": "error" if is_failure else finding.severity.value,
        "message": {"text": _message(finding)},
        "locations": [_location(report, finding)],
        # Of equal findings the hosts keep one: the number tells them apart, as their own hash does.
        "partialFingerprints": {
            "halFinding/v1": finding.fingerprint,
            "primaryLocationLineHash": f"{finding.fingerprint}:{number}",
        },
        "properties": {
            "gate": finding.gate.value,
            "op": _text(finding.op),
            "calls": finding.calls,
            **{
                name: value
                for name in ("time_us", "time_share", "cost_us", "rank")
                if (value := getattr(finding, name)) is not None
            },
        },
    }
    if finding.waiver is not None:
        result["suppressions"] = [
            {"kind": "external", "status": "accepted", "justification": _text(finding.waiver)}
        ]
    return result


def _message(finding: Finding) -> str:
    lines = [finding.title.strip() or finding.rule]
    lines += [evidence_text(fact) for fact in finding.evidence]
    if cost := finding_cost(finding):
        lines.append(f"Cost: {', '.join(cost)}")
    if finding.remedy:
        lines.append(f"Remedy: {finding.remedy}")
    return _text("\n".join(lines))


def _location(report: AuditReport, finding: Finding) -> dict[str, Any]:
    place = finding.location
    physical: dict[str, Any]
    if place is None:
        physical = {"artifactLocation": {"uri": _uri(report.subject)}, "region": {"startLine": 1}}
    else:
        physical = {
            "artifactLocation": {"uri": _uri(place.file), "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": max(1, place.line)},
        }
    location: dict[str, Any] = {"physicalLocation": physical}
    if names := _logical(finding.site, place):
        location["logicalLocations"] = names
    return location


def _logical(site: str, place: Location | None) -> list[dict[str, str]]:
    if site:
        return [{"fullyQualifiedName": _text(site), "kind": "member"}]
    if place is not None and place.function:
        return [{"fullyQualifiedName": _text(place.function), "kind": "function"}]
    return []


def _uri(path: str) -> str:
    """A relative reference, as hosts want them: of an installed package without the folder that it
    is installed in, of any other absolute path without the root."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    if "site-packages" in parts:
        last = len(parts) - 1 - parts[::-1].index("site-packages")
        parts = parts[last + 1 :]
    return quote("/".join(parts).encode("utf-8", "surrogateescape"), safe="/") or "unknown"


def _text(text: str) -> str:
    return visible_text(text)
