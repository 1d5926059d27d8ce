"""What tests ask of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hal
from hal.auditing.trace import FunctionCall, ObservedOp, Trace


def observe(program: Callable[[], Any]) -> Trace:
    """The trace of a call."""
    with hal.audit() as report:
        program()
    return report.trace


def calls_of(trace: Trace) -> Counter[str]:
    """Calls of each op, by bare name."""
    found: Counter[str] = Counter()
    for op in trace.ops:
        found[op.name.removeprefix("aten::")] += op.calls
    return found


def ops_named(trace: Trace, name: str) -> list[ObservedOp]:
    """Its entries."""
    return [op for op in trace.ops if op.name == f"aten::{name}"]


def function_named(trace: Trace, name: str) -> FunctionCall:
    """The one entry of a torch function."""
    (found,) = [call for call in trace.functions if call.name == name]
    return found
