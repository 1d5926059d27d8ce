"""Reports of audits as somebody would write them who wants a view to act for him, or to lie."""

from __future__ import annotations

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

HOSTILE: Final = (
    "</script><script>window.broken=1</script>",
    "<!--<script>",
    "</style><style>*{display:none}</style>",
    '" onfocus=window.broken=2 autofocus x="',
    "' onmouseover='window.broken=3",
    "<img src=http://evil.example/x onerror=window.broken=4>",
    "javascript:window.broken=5",
    "{{ 7*7 }}{% raw %}",
    "\u202egnp.exe\u202c",
    "\u2066left\u2069\u200b\ufeff\u00ad",
    "a\u0300" + "\u0301" * 400,
    "\x1b[2J\x07\x00",
    "&lt;b&gt;&#x3c;script&#x3e;",
    "\u2028\u2029",
    "שלום مرحبا",
)


def hostile_report(*, long: int = 1 << 14) -> AuditReport:
    """Every string of a report as somebody's who wants the page to break or to lie."""
    texts = [*HOSTILE, "x" * long, "wide " * 200]

    def text(number: int) -> str:
        return texts[number % len(texts)]

    evidence = tuple(
        Evidence(what=text(n), required=text(n + 1), found=text(n + 2)) for n in range(17)
    )
    rows = tuple(
        Row(
            op=text(n),
            phase=text(n + 1),
            site=text(n + 2) if n % 2 else f"layers.{n}.{text(n)}",
            layer=None if n % 2 else n,
            arguments=text(n + 3),
            implementation=text(n + 4),
            tier=text(n + 5),
            state="not-planned" if n % 3 else "planned",
            calls=n + 1,
            flops=1e36 if n == 5 else 10.0**n,
            bytes=1e-300 if n == 6 else 10.0 ** (n / 2),
            time_us=1e-12 if n == 7 else 10.0 ** (n / 3),
            bound_us=1.0,
            bound_by=text(n + 6),
            leaf=LeafCheck(
                declared=(text(n),), seen={text(n + 1): n}, state="other", proof=text(n)
            ),
            losers=(
                Loser(name=text(n), tier=text(n + 1), reasons=evidence[:2], unlock=(text(n),)),
            ),
            location=Location(file=text(n + 7), line=n, function=text(n)),
        )
        for n in range(len(texts))
    )
    findings = tuple(
        Finding(
            rule=text(n),
            gate=GateClass.UNROUTED,
            severity=Severity.ERROR,
            title=text(n + 1),
            op=text(n + 2),
            site=text(n + 3),
            location=Location(file=text(n + 4), line=n, function=text(n + 5)),
            evidence=evidence,
            remedy=text(n + 6),
            waiver=text(n) if n % 5 == 0 else None,
        )
        for n in range(len(texts))
    )
    return AuditReport(
        kind="program",
        subject=texts[0],
        created=text(1),
        machine=Machine(
            label=text(8),
            device_id=text(9),
            arch=text(2),
            peak_flops={text(3): 1e15},
            memory_bandwidth=1e12,
        ),
        versions={text(n): text(n + 1) for n in range(12)},
        plan_hash=text(4),
        coverage={text(0): Work(calls=3, flops=2.0, bytes=1.0, time_us=4.0)},
        rows=rows,
        findings=findings,
        variables=(Variable(name=text(1), value=text(9), effect=text(0)),),
        refusals=(Refusal(who=text(0), required=text(1), found=text(2), remedy=text(3)),),
        waivers=(WaiverUse(text=text(0), state="expired"),),
        verification=Verification(
            share=1.0, compared_calls=1, worst=9.0, worst_site=text(0), first_divergence=text(5)
        ),
        notes=tuple(texts),
    )
