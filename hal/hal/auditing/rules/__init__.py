"""The rules of the audit: which losses are known, by family. A new rule is an entry of a family.

A rule is a pure function of a trace, so that it is tested on traces without a program.
"""

from __future__ import annotations

from typing import Final

from hal.auditing.document import Finding
from hal.auditing.rules import (
    attention,
    attention_by_hand,
    caches,
    collectives,
    compilation,
    copies,
    environment,
    launches,
    packages,
    precision,
    repetition,
    swallowed,
    torch_settings,
    transfers,
)
from hal.auditing.rules.merging import findings_of
from hal.auditing.rules.rule import Hit, Rule
from hal.auditing.rules.trace_index import TraceIndex
from hal.auditing.trace import Trace
from hal.device import DeviceSpec

__all__ = ["ALL_RULES", "Hit", "Rule", "TraceIndex", "judge"]

ALL_RULES: Final[tuple[Rule, ...]] = (
    *attention.RULES,
    *attention_by_hand.RULES,
    *caches.RULES,
    *precision.RULES,
    *repetition.RULES,
    *copies.RULES,
    *transfers.RULES,
    *launches.RULES,
    *compilation.RULES,
    *torch_settings.RULES,
    *collectives.RULES,
    *environment.RULES,
    *packages.RULES,
    *swallowed.RULES,
)


def judge(trace: Trace, spec: DeviceSpec | None = None) -> list[Finding]:
    """Every loss that the rules see in a trace, one finding per rule and line, dearest first.

    spec: of the device that the program ran on; its rates stand in where the trace has none.
    """
    index = TraceIndex(trace, spec)
    found = [f for rule in ALL_RULES for f in findings_of(rule, rule.check(index), trace.time_us)]
    return sorted(found, key=lambda f: (-(f.time_us or 0.0), f.rule, f.where))
