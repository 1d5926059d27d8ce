"""Reports of audits that nobody ran, as large as real ones: a decoder of 30 layers in both phases,
a script of some lines. Figures are drawn anew from a seed; nothing here is a measurement.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hal.auditing.document import (
    AuditReport,
    Evidence,
    Finding,
    LeafCheck,
    Location,
    Loser,
    Machine,
    Refusal,
    Row,
    Variable,
    Verification,
    WaiverUse,
    Work,
)
from hal.auditing.gates import GateClass, Severity

BANDWIDTH: Final = 21.4e9
PEAKS: Final = {"float32": 98.3e9, "bfloat16": 61.0e9, "int8": 388.0e9}
MACHINE: Final = Machine(
    label="A CPU with 2 cores",
    device_id="cpu:0",
    arch="x86_64_v4",
    peak_flops=PEAKS,
    memory_bandwidth=BANDWIDTH,
    is_measured=True,
)


@dataclass(frozen=True, slots=True)
class Site:
    """A call site of a layer. flops, bytes: of one call with one token; weight: bytes that a call
    reads however many tokens it has."""

    name: str
    op: str
    implementation: str
    tier: str
    flops: float
    bytes: float
    weight: float
    arguments: str


_JIT8 = "cpu.gemm.jit_int8"
SITES: Final = (
    Site("input_norm", "rms_norm", "cpu.norm.rms.jit", "native", 2.9e3, 7e3, 2e3, "hidden 576"),
    Site("qkv_proj", "gemm", _JIT8, "native", 1.1e6, 6e3, 3.9e5, "576→960, q4_1"),
    Site("rope", "rope", "cpu.rope.jit", "native", 4.6e3, 8e3, 0, "12 heads of 64"),
    Site("kv_write", "kv_write", "cpu.kv_write.jit", "native", 0, 3e3, 0, "3 heads of 64"),
    Site("attention", "attention", "cpu.attention", "native", 2e5, 9e4, 0, "12/3 heads of 64"),
    Site("o_proj", "gemm", _JIT8, "native", 6.6e5, 5e3, 2.3e5, "576→576, q4_1"),
    Site("post_norm", "rms_norm", "cpu.norm.rms.jit", "native", 2.9e3, 7e3, 2e3, "hidden 576"),
    Site("gate_up_proj", "gemm", _JIT8, "native", 3.5e6, 9e3, 1.2e6, "576→3072, q4_1"),
    Site("down_proj", "gemm", "cpu.gemm.onednn_fp32", "portable", 1.8e6, 9e3, 3.5e6, "1536→576"),
)
OUTSIDE: Final = (
    Site("embed", "embedding", "cpu.embedding.jit", "native", 0, 5e3, 0, "49152×576"),
    Site("final_norm", "rms_norm", "cpu.norm.rms.jit", "native", 2.9e3, 7e3, 2e3, "hidden 576"),
    Site("lm_head", "gemm", _JIT8, "native", 5.7e7, 2e5, 2e7, "576→49152, q8_0"),
    Site("sample", "top_k_top_p", "reference.top_k_top_p", "reference", 0, 2e5, 0, "49152"),
)
Phase = tuple[str, tuple[int, int], int, int]
PHASES: Final[tuple[Phase, ...]] = (("prefill", (2, 512), 6, 180), ("decode", (1, 1), 61, 1))
"""(phase, range of tokens, calls, tokens of a call)."""
WAIVER: Final = "sample: reference tier, until 2026-06-30"
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_MATH = "aten::_scaled_dot_product_attention_math"
_BETTER: Final = Loser(
    name=_JIT8,
    tier="native",
    reasons=(
        Evidence(what="weight format", required="q4_0, q4_1, q8_0", found="float32"),
        Evidence(what="feature of the device", required="avx512_vnni", found="avx2"),
    ),
    unlock=("store the weight as q4_1: requantise the checkpoint",),
)


def model_report(*, layers: int = 30, seed: int = 0, times: bool = True) -> AuditReport:
    """A model in both phases. Layers 11 and 12 run attention on another tier, another leaf was
    seen there, and `down_proj` loses its fast path in every layer."""
    rng = random.Random(seed)
    rows = [row for phase in PHASES for row in _rows(phase, layers, rng)]
    if not times:
        rows = [row.model_copy(update={"time_us": None, "bound_us": None}) for row in rows]
    whole = sum(row.time_us or 0.0 for row in rows) * 1.04
    return AuditReport(
        kind="model",
        subject="tiny-decoder-135M-instruct.Q4_1.gguf",
        created="2026-01-01T00:00:00Z",
        machine=MACHINE,
        versions={"halstack": "0.1.0", "torch": "2.12.0", "numba": "0.68.1"},
        plan_hash="9f86d081884c7d65",
        time_us=whole if times else None,
        coverage=_coverage(rows, whole if times else None),
        rows=tuple(rows),
        findings=tuple(_findings(rows, whole)),
        variables=(
            Variable(
                name="OMP_NUM_THREADS",
                value="1",
                effect="torch's own ops use one core; the jit kernels do not read it",
                is_slow=True,
            ),
        ),
        refusals=(
            Refusal(
                who="cpu.attention.prefill.jit",
                required="head_dim of at most 256",
                found="head_dim 320",
                remedy="use the portable implementation with a waiver",
                location=Location(file="serve.py", line=88, function="load"),
                is_swallowed=True,
            ),
        ),
        waivers=(
            WaiverUse(text=WAIVER, state="used", calls=61),
            WaiverUse(text="layers.*.rope: portable tier", state="unused"),
        ),
        verification=Verification(
            share=0.01,
            compared_calls=412,
            skipped_calls=9,
            worst=0.31,
            worst_site="layers.7.o_proj",
        ),
        notes=("Prompts were synthetic: 1, 2, 7, 30, 100 and 512 tokens.",),
    )


def _rows(phase: Phase, layers: int, rng: random.Random) -> Iterator[Row]:
    for layer in range(layers):
        for site in SITES:
            yield _row(site, phase, layer, rng)
    for site in OUTSIDE:
        yield _row(site, phase, None, rng)


def _row(site: Site, phase: Phase, layer: int | None, rng: random.Random) -> Row:
    name, tokens, calls, per_call = phase
    implementation, tier, declared, seen = site.implementation, site.tier, "", ""
    if site.name == "attention":
        implementation += f".{name}.jit"
        if layer in (11, 12):
            implementation, tier, declared, seen = "cpu.attention.sdpa", "portable", _FLASH, _MATH
    row = Row(
        op=site.op,
        phase=name,
        site=site.name if layer is None else f"layers.{layer}.{site.name}",
        layer=layer,
        tokens=tokens,
        arguments=site.arguments,
        implementation=implementation,
        tier=tier,
        state="planned",
        leaf=LeafCheck(declared=(declared or implementation,), state="not-observed"),
        losers=(_BETTER,) if site.name == "down_proj" else (),
    )
    if site.name == "sample" and name == "prefill":
        return row.model_copy(update={"state": "never-exercised"})
    flops = calls * per_call * site.flops
    moved = calls * (per_call * site.bytes + site.weight)
    memory, compute = moved / BANDWIDTH * 1e6, flops / PEAKS["float32"] * 1e6
    slow = {"native": 1.3, "portable": 3.2, "reference": 6.0}[tier]
    time_us = max(memory, compute) * slow * rng.uniform(0.93, 1.1) + calls * 1.2
    leaf = LeafCheck(
        declared=row.leaf.declared,
        seen={seen or implementation: calls},
        state="other" if seen else "seen",
        proof="counted by the kernel itself",
    )
    return row.model_copy(
        update={
            "calls": calls,
            "flops": flops,
            "bytes": moved,
            "time_us": time_us,
            "bound_us": max(memory, compute),
            "bound_by": "memory" if memory >= compute else "compute",
            "leaf": leaf,
            "losers": tuple(
                loser.model_copy(update={"gain_us": time_us * 0.6}) for loser in row.losers
            ),
        }
    )


def _coverage(rows: list[Row], whole_us: float | None) -> dict[str, Work]:
    works: dict[str, Work] = {}
    for tier in ("native", "portable", "reference"):
        found = [row for row in rows if row.tier == tier and row.calls]
        works[tier] = Work(
            calls=sum(row.calls for row in found),
            flops=sum(row.flops for row in found),
            bytes=sum(row.bytes for row in found),
            time_us=None if whole_us is None else sum(row.time_us or 0.0 for row in found),
        )
    spent = sum(work.time_us or 0.0 for work in works.values())
    rest = None if whole_us is None else whole_us - spent
    works["outside"] = Work(calls=61, bytes=6.1e6, time_us=None if rest is None else rest * 0.4)
    works["host"] = Work(calls=134, bytes=1.2e6, time_us=None if rest is None else rest * 0.6)
    return works


def _findings(rows: list[Row], whole_us: float) -> Iterator[Finding]:
    for row in rows:
        if row.site.endswith(".down_proj"):
            yield _lost(row, whole_us)
        if row.leaf.state == "other":
            yield _mismatch(row, whole_us)
    yield Finding(
        rule="host-copy-in-step",
        gate=GateClass.UNROUTED,
        severity=Severity.WARNING,
        title="A tensor is copied to the host in every decode step",
        op="copy",
        location=Location(file="serve.py", line=214, function="next_token"),
        evidence=(Evidence(what="copies a step", required="0", found="2"),),
        remedy="Keep the sampled ids on the device until the stop check.",
        calls=122,
    )
    yield Finding(
        rule="reference-tier",
        gate=GateClass.LOST_FAST_PATH,
        severity=Severity.ERROR,
        title="sample runs plain torch",
        op="top_k_top_p",
        site="sample",
        remedy="Write the kernel.",
        calls=61,
        waiver=WAIVER,
    )


def _lost(row: Row, whole_us: float) -> Finding:
    return Finding(
        rule="lost-fast-path",
        gate=GateClass.LOST_FAST_PATH,
        severity=Severity.ERROR,
        title=f"{row.site} runs {row.implementation} where {_BETTER.name} is known",
        op=row.op,
        site=row.site,
        evidence=_BETTER.reasons,
        remedy="Store the weight as q4_1: requantise the checkpoint with a gguf tool.",
        calls=row.calls,
        time_us=row.time_us,
        time_share=(row.time_us or 0.0) / whole_us if whole_us else None,
        cost_us=None if row.time_us is None else row.time_us * 0.6,
    )


def _mismatch(row: Row, whole_us: float) -> Finding:
    return Finding(
        rule="leaf-mismatch",
        gate=GateClass.LEAF_MISMATCH,
        severity=Severity.ERROR,
        title="Attention ended in the math path",
        op=row.op,
        site=row.site,
        location=Location(file="model/attention.py", line=142, function="forward"),
        evidence=(Evidence(what="leaf", required=_FLASH, found=_MATH),),
        remedy="Pass is_causal=True instead of a mask, or a boolean mask.",
        calls=row.calls,
        time_us=row.time_us,
        time_share=(row.time_us or 0.0) / whole_us if whole_us else None,
    )


def changed_report(report: AuditReport) -> AuditReport:
    """What could come after `report`: `down_proj` cured, `o_proj` five times as slow, no `rope`, a
    version newer, one finding new."""
    rows = []
    for row in report.rows:
        change: dict[str, object] = {}
        if row.site.endswith(".rope"):
            continue
        if row.site.endswith(".down_proj"):
            change = {"implementation": _JIT8, "tier": "native", "losers": ()}
            change["time_us"] = (row.time_us or 0.0) * 0.4
        elif row.site.endswith(".o_proj"):
            change["time_us"] = (row.time_us or 0.0) * 5
        rows.append(row.model_copy(update=change))
    kept = [f for f in report.findings if not f.site.endswith(".down_proj")]
    fresh = Finding(
        rule="dequantised-per-call",
        gate=GateClass.LOST_FAST_PATH,
        severity=Severity.ERROR,
        title="A quantised weight is dequantised in every call",
        op="gemm",
        site="lm_head",
        remedy="Dequantise once at load, or use a product that takes the quantised weight.",
        calls=61,
        cost_us=1234.5,
    )
    return report.model_copy(
        update={
            "rows": tuple(rows),
            "findings": (*kept, fresh),
            "versions": {**report.versions, "torch": "2.13.0"},
            "plan_hash": "2c26b46b68ffc68f",
            "created": "2026-01-02T00:00:00Z",
        }
    )


_PROGRAM_OPS: Final = ("attention", "gemm", "norm", "activation", "elementwise", "copy")


def program_report(*, lines: int = 24, seed: int = 0) -> AuditReport:
    """A script: rows by source line, no plan, no layers."""
    rng = random.Random(seed)
    rows = []
    for line in range(lines):
        op = _PROGRAM_OPS[line % len(_PROGRAM_OPS)]
        place = Location(file="models/vision.py", line=10 + 7 * line, function=f"part_{line}")
        rows.append(
            Row(
                op=op,
                arguments=f"[{rng.randrange(1, 64)}, {rng.randrange(1, 4096)}] float32",
                implementation=f"aten::{op}",
                calls=rng.randrange(1, 500),
                flops=rng.uniform(1e6, 1e10) if op in ("attention", "gemm") else 0.0,
                bytes=rng.uniform(1e5, 1e9),
                time_us=rng.uniform(10, 1e6),
                location=place,
            )
        )
    return AuditReport(
        kind="program",
        subject="python train.py --steps 3",
        created="2026-01-01T00:00:00Z",
        machine=Machine(label="A CPU with 2 cores"),
        rows=tuple(rows),
        time_us=sum(row.time_us or 0.0 for row in rows),
    )


def empty_report() -> AuditReport:
    """An audit of a program that called nothing."""
    return AuditReport(
        kind="program",
        subject="true.py",
        created="2026-01-01T00:00:00Z",
        mode="light",
        machine=Machine(label="unknown"),
    )
