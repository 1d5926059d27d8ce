"""Variables of others that change what runs, or make it slow: which are set, and with what effect.

The list is data (`foreign_variables.toml`). What is set and concerns the devices at hand is
listed in audit reports, `hal doctor`, `hal lock` and `hal settings`; plans do not have it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from hal.auditing.document import Evidence, Finding, Variable
from hal.auditing.foreign_variable_table import ForeignVariable, foreign_variable_table
from hal.auditing.gates import GateClass, Severity
from hal.variables import PREFIX

SLOW_RULE: Final = "environment-override"
_MAX_VALUE = 200
# Nothing that grants access is shown, wherever it stands.
_SECRET = ("*TOKEN*", "*SECRET*", "*PASSWORD*", "*API_KEY", "*CREDENTIAL*")


def known_variable(name: str) -> ForeignVariable | None:
    """What is known of a variable: an entry of that name wins over one with a pattern. None for one
    that is not known, or known to decide nothing."""
    table = foreign_variable_table()
    found = next((entry for entry in table if entry.name == name), None)
    if found is None:
        found = next((entry for entry in table if fnmatchcase(name, entry.name)), None)
    return None if found is None or found.is_ignored else found


def foreign_variables(
    environment: Mapping[str, str] | None = None, *, device_type: str = ""
) -> tuple[Variable, ...]:
    """The known variables that are set, sorted by name.

    environment: that of this process by default. device_type: torch's ("cuda", "cpu", "npu", …):
    leaves out what concerns other devices only; "" for all.
    """
    environment = os.environ if environment is None else environment
    found = []
    for name in sorted(environment):
        entry = known_variable(name)
        if entry is None or (device_type and not entry.concerns(device_type)):
            continue
        value = environment[name]
        found.append(
            Variable(
                name=name,
                value=shown_value(name, value),
                effect=entry.effect,
                changes_decision=entry.changes_decision,
                is_slow=entry.is_slow(value),
                source=entry.owner,
            )
        )
    return tuple(found)


def locked_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """`HAL_*` and the known variables of others as a lock has them, secrets masked."""
    environment = os.environ if environment is None else environment
    return {
        name: shown_value(name, environment[name])
        for name in sorted(environment)
        if name.startswith(PREFIX) or known_variable(name) is not None
    }


def shown_value(name: str, value: str) -> str:
    """The value for a report: short, fit to be written, and none that grants access."""
    if any(fnmatchcase(name.upper(), pattern) for pattern in _SECRET):
        return "(set; not shown)"
    text = value.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"


def variable_findings(variables: Iterable[Variable]) -> list[Finding]:
    """An ignored setting for each variable whose value makes it slow: nothing in the program says
    so, and nothing of halstack asked for it."""
    return [
        Finding(
            rule=SLOW_RULE,
            gate=GateClass.IGNORED_SETTING,
            severity=Severity.WARNING,
            title=f"{variable.name}={variable.value} makes it slow",
            evidence=(
                Evidence(
                    what=variable.name,
                    required="unset, or a value that costs nothing",
                    found=f"{variable.value}: {variable.effect}",
                ),
            ),
            remedy=f"unset {variable.name} ({variable.source})",
        )
        for variable in variables
        if variable.is_slow
    ]
