"""Rules for what decides from outside of the program: environment variables."""

from __future__ import annotations

from collections.abc import Iterator

from hal.auditing.gates import GateClass
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex


def _overrides(index: TraceIndex) -> Iterator[Hit]:
    for variable in index.trace.variables:
        if not variable.is_slow:
            continue  # the report lists it; many a variable decides something and costs nothing
        yield Hit(
            title=f"{variable.name}={variable.value}: {variable.effect}",
            evidence=(
                evidence(
                    variable.name,
                    "unset, or a value that costs nothing",
                    f"{variable.value}: {variable.effect}",
                ),
            ),
            remedy=f"unset {variable.name}, or waive it",
        )


RULES = (
    Rule(
        id="environment-override",
        gate=GateClass.IGNORED_SETTING,
        summary="an environment variable whose value makes the program slow",
        remedy="unset the variable, or waive it",
        check=_overrides,
    ),
)
