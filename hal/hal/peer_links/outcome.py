"""What the check of one pair of devices found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal["verified", "wrong", "none", "unknown", "failed"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOutcome:
    """One pair, by device ids.

    verdict: "verified" (every byte arrived, in both directions), "wrong" (bytes that did not),
    "none" (the platform says that they do not reach each other), "unknown" (it does not say, or
    its runtime cannot be asked), "failed" (no answer: a crash, a deadline, an error).
    detail: in words. bytes_per_s: of the slower direction, None where nothing was copied.
    """

    first: str
    second: str
    verdict: Verdict
    detail: str
    bytes_per_s: float | None = None

    @property
    def is_trouble(self) -> bool:
        """Whether somebody should look into it."""
        return self.verdict in ("wrong", "failed")
