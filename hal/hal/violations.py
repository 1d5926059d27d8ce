"""What is wrong with a plan: lost fast paths without a waiver, requests that nothing serves.

A plan is strict: it raises for any of these. A report on hardware that is not here shows them all
beside what would run, and then fails as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal.errors import PlanError, SelectionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One call site and token range whose choice is not allowed, or has none.

    text: what is lost. waiver: the stanza that would allow it, "" where none can. unserved: the
    error of a request that no candidate may serve.
    """

    site: str
    label: str
    tokens: str
    text: str
    waiver: str = ""
    unserved: SelectionError | None = None

    def line(self) -> str:
        return f"{self.site} ({self.label}, {self.tokens} tokens): {self.text}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "site": self.site,
            "op": self.label,
            "tokens": self.tokens,
            "kind": "lost fast path" if self.unserved is None else "unserved",
            "text": self.text,
        }


def violation_error(device: str, violations: Sequence[Violation]) -> PlanError:
    """All of them as one error about `device`, with the waivers that would allow them."""
    lines = dict.fromkeys(violation.line() for violation in violations)
    stanzas = dict.fromkeys(v.waiver for v in violations if v.waiver)
    allow = "; or allow it in the waiver file:\n" + "\n\n".join(stanzas) if stanzas else ""
    return PlanError(
        f"plan for {device}",
        "the best tier known for this device at every call site",
        "lost fast paths:\n    - " + "\n    - ".join(lines),
        f"install or enable what the reasons name{allow}",
    )
