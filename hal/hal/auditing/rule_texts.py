"""What a rule is, for people who meet its id in a report: its summary, its class, what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hal.auditing.document import Finding
from hal.auditing.gates import GateClass

GATE_MEANINGS: Final[Mapping[GateClass, str]] = {
    GateClass.LOST_FAST_PATH: "Something slower ran than what the device has.",
    GateClass.UNROUTED: "A matrix product, attention or collective ran outside every bound op.",
    GateClass.SEMANTIC: "Other numbers than were asked for, beyond rounding.",
    GateClass.LEAF_MISMATCH: "The right implementation was called, and another kernel ran in it.",
    GateClass.UNVERIFIED: "Nobody saw it run, or nothing here can show it.",
    GateClass.IGNORED_SETTING: "A setting that nothing obeyed, or that decided from outside.",
    GateClass.ADVICE: "Worth knowing; it never fails a gate.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleText:
    """A rule for people. level: SARIF's, of a finding that is not gated."""

    id: str
    gate: GateClass
    summary: str
    help: str
    level: str

    @property
    def gate_meaning(self) -> str:
        """What findings of its class have in common."""
        return GATE_MEANINGS[self.gate]


def rule_text(rule: str, example: Finding) -> RuleText:
    """The text of a rule: as it describes itself, else as a finding of it says."""
    summary, remedy = _described().get(rule, (example.title, example.remedy))
    meaning = GATE_MEANINGS[example.gate]
    return RuleText(
        id=rule,
        gate=example.gate,
        summary=summary.strip().rstrip(".") or rule,
        help=" ".join(part for part in (meaning, remedy) if part),
        level=example.severity.value,
    )


def _described() -> Mapping[str, tuple[str, str]]:
    """Rule -> (summary, remedy), of the rules that judge programs."""
    from hal.auditing.rules import ALL_RULES

    return {rule.id: (rule.summary, rule.remedy) for rule in ALL_RULES}
