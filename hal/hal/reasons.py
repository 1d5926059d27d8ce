"""Why a candidate does not serve a request: always what, the required value and the found value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ReasonKind(StrEnum):
    """What would have to change for the candidate to serve.

    SCOPE: it is for another dtype, format or phase, so nothing is lost by it. HARDWARE: the device
    cannot. ARGUMENT: it is for this kind of request but not for these arguments (a kernel gap).
    SOFTWARE: something is not installed or too old. POLICY: the device's policy disables it.
    MISSING: it is declared and nobody has written it yet. UNVERIFIED: the device may be able to,
    but only an unverified source says so. EXPLICIT: the user chose another. RANKED: it can serve,
    but another is better. CAPTURE: it can serve, but keeps a decode step from being captured, which
    would take less time. SEMANTIC: it would change the numbers beyond rounding, and nothing the
    user asked for allows that.
    """

    SCOPE = "scope"
    HARDWARE = "hardware"
    ARGUMENT = "argument"
    SOFTWARE = "software"
    POLICY = "policy"
    MISSING = "missing"
    UNVERIFIED = "unverified"
    EXPLICIT = "explicit"
    RANKED = "ranked"
    CAPTURE = "capture"
    SEMANTIC = "semantic"

    @property
    def is_attainable(self) -> bool:
        """True if the candidate could serve on this very device once something is fixed."""
        return self in _ATTAINABLE


_ATTAINABLE = frozenset(
    {ReasonKind.ARGUMENT, ReasonKind.SOFTWARE, ReasonKind.MISSING, ReasonKind.UNVERIFIED}
)
# The candidate can serve, and another was preferred for the time it takes: not what decides whether
# two plans are the same.
RANKING_KINDS = frozenset({ReasonKind.RANKED, ReasonKind.CAPTURE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One unmet requirement, e.g. what="head_dim", required="at most 256", found="320"."""

    what: str
    required: str
    found: str
    kind: ReasonKind = ReasonKind.ARGUMENT

    def __str__(self) -> str:
        return f"{self.what}: required {self.required}, found {self.found}"

    def to_dict(self) -> dict[str, str]:
        return {
            "what": self.what,
            "required": self.required,
            "found": self.found,
            "kind": self.kind.value,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Reason:
        return cls(
            what=str(data["what"]),
            required=str(data["required"]),
            found=str(data["found"]),
            kind=ReasonKind(data.get("kind", "argument")),
        )
