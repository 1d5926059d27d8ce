"""A sound model: every range is reached, every leaf seen, every call counted, and nothing found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hal.auditing.document import AuditReport, Row
from hal.auditing.gates import GateClass
from hal_engine.audit.running import AuditOptions
from model_audits import ENVIRONMENT, Auditor


@pytest.fixture(scope="module")
def report(shallow_folder: Path) -> AuditReport:
    return Auditor(shallow_folder).run(AuditOptions(measure=True, verify=1.0))


def bound_rows(report: AuditReport) -> list[Row]:
    return [row for row in report.rows if row.site]


def test_nothing_is_found(report: AuditReport) -> None:
    assert [f.title for f in report.findings if f.gate is not ENVIRONMENT] == []


def test_every_planned_call_was_made_and_ended_in_its_leaf(report: AuditReport) -> None:
    rows = bound_rows(report)
    assert {row.state for row in rows} == {"planned"}
    unseen = {(row.implementation, row.leaf.proof) for row in rows if row.leaf.state != "seen"}
    assert not unseen
    jit = [row for row in rows if row.implementation.endswith(".jit")]
    assert jit
    assert all("entries into its machine code" in row.leaf.proof for row in jit)


def test_rows_name_layers_and_arguments(report: AuditReport) -> None:
    layers = {row.layer for row in bound_rows(report)}
    assert layers == {None, 0, 1}
    attention = [row for row in bound_rows(report) if row.op == "attention"]
    assert {row.phase for row in attention} == {"prefill", "decode"}
    assert all(re.search(r"f32\[\d+,128\]", row.arguments) for row in attention)


def test_work_and_bounds(report: AuditReport) -> None:
    assert report.machine.is_measured
    for row in bound_rows(report):
        assert row.time_us is not None
        assert row.time_us > 0
        assert row.bytes > 0
        assert row.bound_us is not None
        assert row.bound_us > 0
        assert row.bound_by in ("memory", "compute")
    gemm = sum(row.flops for row in bound_rows(report) if row.op == "gemm")
    assert gemm > 0.5 * sum(work.flops for work in report.coverage.values())


def test_coverage_is_the_sum_of_the_rows(report: AuditReport) -> None:
    native = report.coverage["native"]
    rows = [row for row in report.rows if row.tier == "native"]
    assert native.calls == sum(row.calls for row in rows)
    assert native.flops == pytest.approx(sum(row.flops for row in rows))
    assert report.time_us == pytest.approx(sum(w.time_us or 0 for w in report.coverage.values()))
    assert "outside" in report.coverage  # inputs are made, tokens are drawn


def test_calls_were_compared_with_the_reference(report: AuditReport) -> None:
    verification = report.verification
    assert verification is not None
    assert verification.compared_calls == sum(row.calls for row in bound_rows(report))
    assert verification.first_divergence is None
    assert verification.worst is not None
    assert verification.worst <= 1


def test_a_range_that_cannot_be_reached_is_said_to_be(shallow_auditor: Auditor) -> None:
    """Rows with logits are one a sequence, or 256 of a scored prompt; the plan has more."""
    report = shallow_auditor.run(max_num_batched_tokens=300, max_model_len=64)
    unverified = [f for f in report.findings if f.gate is GateClass.UNVERIFIED]
    assert {f.rule for f in report.findings if f.gate is not ENVIRONMENT} <= {"never-exercised"}
    for finding in unverified:
        assert re.search(r"at most|longest|did not reach", finding.evidence[0].found)


def test_prompts_of_a_user(shallow_auditor: Auditor) -> None:
    options = AuditOptions(measure=False, prompts=["hello there", "a second prompt"])
    report = shallow_auditor.run(options)
    decode = [r for r in bound_rows(report) if r.op == "attention" and r.phase == "decode"]
    assert {row.calls for row in decode} == {decode[0].calls}
    assert decode[0].calls >= 15


def test_light_mode_samples(shallow_auditor: Auditor) -> None:
    report = shallow_auditor.run(AuditOptions(mode="light", measure=False))
    assert report.mode == "light"
    decode = [r for r in bound_rows(report) if r.op == "attention" and r.phase == "decode"]
    assert all(row.calls for row in decode)
    assert {f.gate for f in report.findings} <= {ENVIRONMENT, GateClass.UNVERIFIED}
