"""Compares the counters of the ranks: sites that several ranks call are called alike by all."""

from __future__ import annotations

from collections.abc import Sequence

from hal.auditing.document import Evidence, Finding
from hal.auditing.gates import GateClass, Severity
from hal.binding import CallCount

_Key = tuple[str, str, int, int]  # site, phase, token range


def rank_findings(
    first: Sequence[CallCount], others: Sequence[Sequence[CallCount]]
) -> list[Finding]:
    """Where a rank from 1 on called another implementation, or not as often as rank 0.

    first: counters of rank 0. Sites that only one of the two ranks has are the plan's affair.
    """
    wanted = {_key(count): count for count in first}
    findings = []
    for rank, counts in enumerate(others, 1):
        for count in counts:
            of_first = wanted.get(_key(count))
            if of_first is not None and _what(of_first) != _what(count):
                findings.append(_finding(rank, of_first, count))
    return findings


def _key(count: CallCount) -> _Key:
    return count.site, count.phase, count.tokens.low, count.tokens.high


def _what(count: CallCount) -> tuple[str, int]:
    return count.implementation, count.calls


def _finding(rank: int, of_first: CallCount, count: CallCount) -> Finding:
    return Finding(
        rule="ranks-disagree",
        gate=GateClass.LEAF_MISMATCH,
        severity=Severity.ERROR,
        title=f"rank {rank} did not run what rank 0 ran",
        op=count.op,
        site=count.site,
        evidence=(
            Evidence(
                what=f"calls for {count.tokens} tokens",
                required=f"{of_first.calls} of {of_first.implementation}, as on rank 0",
                found=f"{count.calls} of {count.implementation}",
            ),
        ),
        remedy="every rank needs the same versions, environment, settings and devices",
        calls=count.calls,
        rank=rank,
    )
