"""Counter totals equal calls: of threads that call at once, and of processes of a group."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from hal.auditing.gates import GateClass
from hal.binding import BoundOps, CallCount
from hal.candidates import KernelCandidate
from hal.ops.activation import GatedActivationRequest
from hal.ops.request import TokenRange
from hal.plan import OpSite, Plan, PlannedOp
from hal.selection import Decision
from hal.tiers import Tier
from hal_engine.audit.observer import CallObserver
from hal_engine.audit.ranks import rank_findings
from hal_engine.audit.running import AuditOptions
from model_audits import ENVIRONMENT, Auditor

RANGES = (TokenRange(1, 4), TokenRange(5, 5), TokenRange(6, 64))


def observed_ops(observer: CallObserver | None) -> BoundOps:
    request = GatedActivationRequest(width=1, dtype="float32")
    site = OpSite(site="x", request=request)
    ops = []
    for index, tokens in enumerate(RANGES):
        choice = KernelCandidate(
            name=f"test.activation.{index}",
            op=request.op,
            tier=Tier.NATIVE,
            summary="returns its argument",
            not_supported_reasons=lambda _: (),
            load=lambda: lambda _: lambda x: x,
        )
        decision = Decision(request=request, choice=choice, estimate_us=None, rejected=())
        ops.append(PlannedOp(site=site, tokens=tokens, decision=decision))
    plan = Plan(model={}, devices=(), settings={}, kv_bytes_per_token=0, ops=ops)
    return BoundOps(plan, observe=None if observer is None else observer.observe)


@given(
    calls=st.lists(st.lists(st.integers(1, 64), max_size=40), min_size=1, max_size=6),
    is_observed=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_threads(calls: list[list[int]], is_observed: bool) -> None:
    observer = CallObserver()
    ops = observed_ops(observer if is_observed else None)
    call = ops.bind("x")

    def run(sizes: list[int]) -> None:
        for size in sizes:
            assert call(size, size) == size

    with observer.timing():
        threads = [threading.Thread(target=run, args=(sizes,)) for sizes in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wanted = [sum(r.low <= n <= r.high for sizes in calls for n in sizes) for r in RANGES]
    assert [count.calls for count in ops.counts()] == wanted
    if is_observed:
        assert [record.num_timed for record in observer.records] == wanted


def test_two_processes(tmp_path: Path) -> None:
    tiny_models.make_tiny_model("qwen2", tmp_path, seed=torch.seed() % 2**31, num_layers=2)
    report = Auditor(tmp_path).run(AuditOptions(measure=False, verify=1.0), tp=2)
    assert report.processes == 2
    assert [f.title for f in report.findings if f.gate is not ENVIRONMENT] == []
    assert any("counters of 2 ranks were compared" in note for note in report.notes)
    reduces = [row for row in report.rows if row.op == "collective"]
    assert reduces
    assert {row.leaf.state for row in reduces} == {"seen"}
    # Each step reduces twice a layer; the other ops of a layer are called once a step.
    calls = {row.site: row.calls for row in report.rows if row.layer == 0 and row.phase == "any"}
    steps = {calls["layers.0.o_all_reduce"], calls["layers.0.down_all_reduce"]}
    assert len(steps) == 1

    # Collectives are not compared: the other rank would have to take part again.
    assert report.verification is not None
    assert report.verification.skipped_calls > 0
    assert any("the other ranks" in note for note in report.notes)


@pytest.mark.parametrize(
    "changed", [{"calls": 6}, {"implementation": "cpu.gemm.linear_fp32"}], ids=["calls", "other"]
)
def test_a_rank_that_disagrees(changed: dict[str, Any]) -> None:
    count = CallCount(
        site="layers.1.o_proj",
        op="gemm",
        phase="any",
        implementation="cpu.gemm.jit",
        tier="native",
        tokens=TokenRange(1, 64),
        calls=7,
    )
    assert not rank_findings([count], [[count], [count]])
    (finding,) = rank_findings([count], [[count], [replace(count, **changed)]])
    assert finding.rank == 2
    assert finding.site == "layers.1.o_proj"
    assert finding.gate is GateClass.LEAF_MISMATCH
