"""The report of a program: the trace judged by the rules, with the machine and the versions."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from hal.auditing.audit_waivers import AuditWaivers
from hal.auditing.document import AuditReport, Finding, Machine, Row, Work
from hal.auditing.session import Mode
from hal.auditing.surroundings import complete_report
from hal.auditing.trace import Trace
from hal.device import Confidence, DeviceSpec

_PACKAGES: Final = (
    *("torch", "transformers", "diffusers", "accelerate", "sentence-transformers", "torchvision"),
    *("timm", "numpy", "triton", "peft", "flash-attn", "xformers", "bitsandbytes", "torchao"),
)


def create_report(
    trace: Trace,
    *,
    subject: str,
    mode: Mode,
    device: DeviceSpec | None = None,
    notes: Iterable[str] = (),
    waivers: AuditWaivers | None = None,
) -> AuditReport:
    """Judges a trace. device: what it ran on, if it is known."""
    machine = trace.machine if device is None else machine_of(device)
    trace.machine = machine
    findings, rows = _judge(trace, device)
    report = AuditReport(
        kind="program",
        subject=subject,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        mode=mode,
        machine=machine,
        versions=_versions(),
        time_us=trace.time_us,
        coverage=_coverage(trace, rows),
        rows=tuple(rows),
        findings=tuple(findings),
        variables=tuple(trace.variables),
        refusals=tuple(trace.refusals),
        processes=trace.processes,
        notes=(*notes, *_rank_notes(trace)),
    )
    return complete_report(report, refusals=trace.refusals, waivers=waivers)


def machine_of(device: DeviceSpec) -> Machine:
    """A device as the report has it."""
    evidence = device.evidence.get("memory_bandwidth")
    return Machine(
        label=device.name,
        device_id=device.device_id,
        arch=device.arch,
        peak_flops=dict(device.peak_flops),
        memory_bandwidth=device.memory_bandwidth,
        is_measured=evidence is not None and evidence.confidence is Confidence.MEASURED,
    )


def _judge(trace: Trace, device: DeviceSpec | None) -> tuple[list[Finding], list[Row]]:
    from hal.auditing.rules import judge
    from hal.auditing.trace_rows import rows_of

    return judge(trace, device), rows_of(trace)


def _rank_notes(trace: Trace) -> list[str]:
    """How rows are to be read where several ranks ran the same lines."""
    ranks = sorted({op.rank for op in trace.ops})
    if len(ranks) < 2:
        return []
    shown = ", ".join(map(str, ranks[:_MAX_RANKS])) + (", …" if len(ranks) > _MAX_RANKS else "")
    return [f"rows are sums over ranks {shown}; where ranks differ a finding names each"]


_MAX_RANKS: Final = 16
_ROUNDING: Final = 1e-6


def _coverage(trace: Trace, rows: Iterable[Row]) -> dict[str, Work]:
    """Work by tier, and what no row has as "other": glue, views, copies."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        _add(sums, row.tier, row.calls, row.flops, row.bytes, row.time_us or 0.0)
    done = [sum(part[i] for part in sums.values()) for i in range(4)]
    totals = [0.0] * 4
    for op in trace.ops:
        values = (op.calls, op.flops, op.bytes, op.time_us)
        totals = [total + value for total, value in zip(totals, values, strict=True)]
    rest = [max(total - part, 0.0) for total, part in zip(totals, done, strict=True)]
    # Ops of an attention call are counted by the call: what remains of their number is no work.
    if any(part > _ROUNDING * total for part, total in zip(rest[1:], totals[1:], strict=True)):
        _add(sums, "other", int(rest[0]), rest[1], rest[2], rest[3])
    return {
        name: Work(calls=int(calls), flops=flops, bytes=size, time_us=time_us)
        for name, (calls, flops, size, time_us) in sums.items()
    }


def _add(
    sums: dict[str, list[float]], name: str, calls: int, flops: float, size: float, time_us: float
) -> None:
    known = sums.setdefault(name, [0.0] * 4)
    for index, value in enumerate((calls, flops, size, time_us)):
        known[index] += value


def _versions() -> Mapping[str, str]:
    """Of halstack, Python, and of what the program has imported."""
    found = {"python": platform.python_version(), "halstack": _version("halstack")}
    for package in _PACKAGES:
        if package.replace("-", "_") in sys.modules:
            found[package] = _version(package)
    return {name: text for name, text in found.items() if text}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
