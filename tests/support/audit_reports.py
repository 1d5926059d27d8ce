"""Audit reports for tests of what reads them: one that is small and clear, and random ones."""

from __future__ import annotations

import random
import string
from typing import Any

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
    RowState,
    Variable,
    Verification,
    WaiverUse,
    Work,
)
from hal.auditing.gates import GateClass, Severity

HOSTILE = (
    "a|b",
    "`code`",
    "<script>alert(1)</script>",
    "@somebody",
    "#12 and GH-12",
    "https://example.com/x?a=1&b=2",
    "[link](https://example.com)",
    "![image](x)",
    "line\nend\r\n| next | row |",
    "bell \x07 escape \x1b[31m null-like \x00 \x0b \x0c",
    "\ufffe\uffff",
    "right to left \u202e gnp.exe",
    "]]>",
    "&amp; &lt;",
    "\\| \\` \\",
    "***bold*** __under__ ~~gone~~",
    "- [ ] task",
    "日本語 ünïcödé 🙂",
    " ",
)


def finding(**changes: Any) -> Finding:
    """A lost fast path at a line."""
    fields: dict[str, Any] = {
        "rule": "math-attention",
        "gate": GateClass.LOST_FAST_PATH,
        "severity": Severity.WARNING,
        "title": "attention ran unfused",
        "op": "attention",
        "location": Location(file="model.py", line=12, function="forward"),
        "evidence": (Evidence(what="attn_mask", required="none", found="dense"),),
        "remedy": "pass is_causal=True",
        "calls": 3,
        "time_us": 1500.0,
        "time_share": 0.4,
        "cost_us": 900.0,
    }
    return Finding(**{**fields, **changes})


def report(**changes: Any) -> AuditReport:
    """A program on a CPU, without findings."""
    fields: dict[str, Any] = {
        "kind": "program",
        "subject": "python train.py",
        "created": "2026-06-15T12:00:00+00:00",
        "machine": Machine(label="Acme CPU", device_id="cpu:0", arch="x86_64_avx2"),
        "versions": {"halstack": "0.1.0", "torch": "2.11.0"},
        "time_us": 3750.0,
        "rows": (
            Row(
                op="attention",
                implementation="aten::scaled_dot_product_attention",
                calls=3,
                flops=3e6,
                bytes=1e6,
                time_us=1500.0,
                bound_us=600.0,
                bound_by="memory",
                location=Location(file="model.py", line=12, function="forward"),
            ),
        ),
        "coverage": {"outside": Work(calls=3, flops=3e6, bytes=1e6, time_us=1500.0)},
    }
    return AuditReport(**{**fields, **changes})


def random_text(rng: random.Random) -> str:
    """Words, or something that breaks what is careless."""
    if rng.random() < 0.4:
        return rng.choice(HOSTILE)
    return "".join(rng.choices(string.ascii_letters + " ._-/:", k=rng.randrange(1, 60)))


def random_report(seed: int, num_findings: int = 12) -> AuditReport:
    """Everything filled, with text that would break a careless writer."""
    rng = random.Random(seed)

    def text() -> str:
        return random_text(rng)

    def place() -> Location | None:
        if rng.random() < 0.3:
            return None
        return Location(file=text(), line=rng.randrange(5000), function=text())

    def facts() -> tuple[Evidence, ...]:
        return tuple(
            Evidence(what=text(), required=text(), found=text()) for _ in range(rng.randrange(4))
        )

    def number() -> float | None:
        return rng.choice([None, 0.0, rng.random(), rng.random() * 1e7])

    def calls_of(state: str) -> int:
        return 0 if state == "never-exercised" else rng.randrange(10**7)

    findings = tuple(
        Finding(
            rule=rng.choice(["math-attention", "widened-gemm", "swallowed-refusal", "x y"]),
            gate=rng.choice(list(GateClass)),
            severity=rng.choice(list(Severity)),
            title=text(),
            op=text(),
            site=rng.choice(["", "layers.3.attention", text()]),
            location=place(),
            evidence=facts(),
            remedy=text(),
            calls=rng.randrange(10**6),
            time_us=number(),
            time_share=rng.choice([None, rng.random()]),
            cost_us=number(),
            waiver=rng.choice([None, None, text()]),
            rank=rng.choice([None, 0, 3]),
        )
        for _ in range(num_findings)
    )
    states: list[RowState] = ["planned", "never-exercised", "not-planned", "observed"]
    rows = tuple(
        Row(
            op=rng.choice(["attention", "gemm", text()]),
            phase=rng.choice(["any", "decode", "prefill"]),
            site=rng.choice(["", f"layers.{n}.attention"]),
            layer=rng.choice([None, n]),
            tokens=rng.choice([None, (1, 64)]),
            arguments=text(),
            implementation=text(),
            tier=rng.choice(["native", "portable", "reference", "unknown"]),
            state=state,
            calls=calls_of(state),
            flops=rng.random() * 1e15,
            bytes=rng.random() * 1e12,
            time_us=number(),
            bound_us=number(),
            leaf=LeafCheck(declared=(text(),), seen={text(): 3}, state="seen"),
            losers=(Loser(name=text(), tier="native", reasons=facts(), unlock=(text(),)),),
            location=place(),
        )
        for n in range(rng.randrange(1, 20))
        for state in rng.choices(states)
    )
    times = [row.time_us or 0.0 for row in rows]
    return report(
        subject=text(),
        machine=Machine(label=text(), device_id=text(), arch=text()),
        plan_hash=rng.choice([None, "0123456789abcdef"]),
        rows=rows,
        findings=findings,
        time_us=sum(times),
        coverage={
            name: Work(
                calls=sum(row.calls for row in rows) if n == 0 else n,
                flops=sum(row.flops for row in rows) / (n + 1),
                bytes=sum(row.bytes for row in rows) / (n + 1),
                time_us=sum(times) / 4,
            )
            for n, name in enumerate(["native", "outside", "host", text()])
        },
        variables=(
            Variable(name=text(), value=text(), effect=text(), is_slow=True, source=text()),
        ),
        refusals=(
            Refusal(
                who=text(),
                required=text(),
                found=text(),
                remedy=text(),
                location=place(),
                is_swallowed=rng.random() < 0.5,
            ),
        ),
        waivers=(WaiverUse(text=text(), state=rng.choice(["used", "expired"]), calls=3),),
        verification=Verification(share=0.01, compared_calls=12, worst=0.4, worst_site=text()),
        processes=rng.randrange(1, 4),
        notes=(text(),),
    )
