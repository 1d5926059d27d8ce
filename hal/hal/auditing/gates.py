"""Which classes of findings there are, and how bad one is: what `--fail-on` is said in."""

from __future__ import annotations

from enum import StrEnum


class GateClass(StrEnum):
    """What kind of loss a finding is. A gate fails on the classes that it was given.

    LOST_FAST_PATH: something slower ran than what the device has. UNROUTED: an attention, product
    or collective outside every bound op. SEMANTIC: other numbers than were asked for, beyond
    rounding. LEAF_MISMATCH: the right wrapper, another kernel inside. UNVERIFIED: nobody saw it
    run, or nothing here can show it. IGNORED_SETTING: somebody set it and nothing obeyed, or it
    changed a decision from outside. ADVICE: worth knowing; never fails a gate.
    """

    LOST_FAST_PATH = "lost-fast-path"
    UNROUTED = "unrouted"
    SEMANTIC = "semantic"
    LEAF_MISMATCH = "leaf-mismatch"
    UNVERIFIED = "unverified"
    IGNORED_SETTING = "ignored-setting"
    ADVICE = "advice"


class Severity(StrEnum):
    """How loudly a finding is shown; SARIF's levels."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


GATE_CLASSES = tuple(gate.value for gate in GateClass if gate is not GateClass.ADVICE)
"""What `--fail-on` takes."""
