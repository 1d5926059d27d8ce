"""The audit of a routed model as "halstack.audit/1": rows of its plan, escaped calls, leaves."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hal.auditing.document import (
    AuditReport,
    Evidence,
    Finding,
    LeafCheck,
    Location,
    Loser,
    Machine,
    Row,
    Work,
)
from hal.auditing.gates import GateClass, Severity
from hal.binding import CallCount
from hal.device import Confidence, DeviceSpec
from hal.dispatch_spy import DispatchSpy, EscapedCall
from hal.ops import CATALOGUE, TokenRange
from hal.plan import Plan, PlannedOp
from hal.unlocks import unlocks_of


def audit_report(
    model: Any,
    plan: Plan,
    device: DeviceSpec,
    before: Sequence[CallCount],
    after: Sequence[CallCount],
    spy: DispatchSpy,
    escaped: Sequence[EscapedCall],
) -> AuditReport:
    """The report of what ran between two readings of the counters."""
    planned: dict[tuple[str, str, TokenRange], PlannedOp] = {
        (name, op.site.request.phase, op.tokens): op for op in plan.ops for name in op.site.names()
    }
    rows = tuple(
        _row(planned[now.site, now.phase, now.tokens], now, now.calls - then.calls, spy.leaf_ops)
        for then, now in zip(before, after, strict=True)
    )
    findings = [*_escapes(escaped), *_leaf_findings(rows), *_lost_findings(plan)]
    return AuditReport(
        kind="model",
        subject=type(model).__name__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=_machine(device),
        versions=plan.versions,
        plan_hash=plan.hash,
        coverage=_coverage(rows, escaped),
        rows=rows,
        findings=tuple(findings),
        notes=tuple(plan.notes),
    )


def _machine(device: DeviceSpec) -> Machine:
    rates = [device.evidence.get(name) for name in ("peak_flops", "memory_bandwidth")]
    return Machine(
        label=device.name,
        device_id=device.device_id,
        arch=device.arch,
        peak_flops=device.peak_flops,
        memory_bandwidth=device.memory_bandwidth,
        is_measured=any(e is not None and e.confidence is Confidence.MEASURED for e in rates),
    )


def _row(
    op: PlannedOp,
    count: CallCount,
    calls: int,
    leaves: Mapping[tuple[str, str], Counter[str]],
) -> Row:
    request, family = op.site.request, CATALOGUE[op.site.request.op]
    seen = dict(leaves.get((count.site, count.implementation), {}))
    # The least that these calls can have been: the counters do not keep their sizes.
    tokens = count.tokens.low
    return Row(
        op=count.op,
        phase=count.phase,
        site=count.site,
        tokens=(count.tokens.low, count.tokens.high),
        arguments=", ".join(f"{k}={v}" for k, v in request.arguments().items() if k in _SHOWN),
        implementation=count.implementation,
        tier=count.tier,
        state="planned" if calls else "never-exercised",
        calls=calls,
        flops=calls * family.flops(request, tokens),
        bytes=calls * family.bytes_moved(request, tokens),
        leaf=_leaf(op, seen, calls),
        losers=tuple(_losers(op)),
    )


_SHOWN = ("n", "k", "dtype", "num_heads", "num_kv_heads", "head_dim", "mask", "num_experts")


def _leaf(op: PlannedOp, seen: Mapping[str, int], calls: int) -> LeafCheck:
    declared = tuple(f"{leaf.kind} {leaf.name}" for leaf in op.choice.leaf)
    names = {leaf.name for leaf in op.choice.leaf if leaf.kind == "aten_op"}
    if not declared:
        return LeafCheck(seen=seen)
    if not calls or not names:
        return LeafCheck(declared=declared, seen=seen, state="not-observed")
    state = "seen" if names & set(seen) else "other"
    return LeafCheck(declared=declared, seen=seen, state=state, proof="dispatch mode")


def _losers(op: PlannedOp) -> list[Loser]:
    return [
        Loser(
            name=loser.name,
            tier=loser.tier.label,
            reasons=tuple(
                Evidence(what=r.what, required=r.required, found=r.found) for r in loser.reasons
            ),
            unlock=tuple(unlocks_of(loser.reasons)),
        )
        for loser in op.decision.rejected
        if loser.tier > op.choice.tier
    ]


def _escapes(escaped: Sequence[EscapedCall]) -> list[Finding]:
    findings = []
    for call in escaped:
        file, _, line = call.location.rpartition(":")
        findings.append(
            Finding(
                rule="routed.escaped",
                gate=GateClass.UNROUTED,
                severity=Severity.ERROR,
                title=f"{call.op} ran outside every bound op",
                op=call.op,
                location=Location(file=file or "unknown", line=int(line) if line.isdigit() else 0),
                remedy="route the model again with example_inputs that lead to it",
                calls=1,
            )
        )
    return findings


def _leaf_findings(rows: Sequence[Row]) -> list[Finding]:
    return [
        Finding(
            rule="routed.leaf",
            gate=GateClass.LEAF_MISMATCH,
            severity=Severity.ERROR,
            title=f"{row.implementation} ended in another kernel than it declares",
            op=row.op,
            site=row.site,
            evidence=(
                Evidence(
                    what="leaf",
                    required=" or ".join(row.leaf.declared),
                    found=", ".join(sorted(row.leaf.seen)) or "no torch op",
                ),
            ),
            calls=row.calls,
        )
        for row in rows
        if row.leaf.state == "other"
    ]


def _lost_findings(plan: Plan) -> list[Finding]:
    return [
        Finding(
            rule="plan.lost-fast-path",
            gate=GateClass.LOST_FAST_PATH,
            severity=Severity.ERROR,
            title=op.decision.lost.describe(op.choice),
            op=op.site.request.label,
            site=op.site.label(),
            waiver=op.waiver,
            remedy="; ".join(unlocks_of(op.decision.lost.reasons)),
        )
        for op in plan.ops
        if op.decision.lost is not None
    ]


def _coverage(rows: Sequence[Row], escaped: Sequence[EscapedCall]) -> dict[str, Work]:
    """Work by tier, at least: the counters do not keep the sizes of calls."""
    tiers: dict[str, Work] = {"outside": Work(calls=len(escaped))} if escaped else {}
    for row in rows:
        if row.calls:
            had = tiers.get(row.tier, Work())
            tiers[row.tier] = Work(
                calls=had.calls + row.calls,
                flops=had.flops + row.flops,
                bytes=had.bytes + row.bytes,
            )
    return tiers
