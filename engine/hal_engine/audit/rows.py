"""Rows of a report: each call site and token range with its calls, work, time, leaf and losers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal.auditing.document import Evidence, LeafCheck, Loser, Row, Work
from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.device_group import GroupLink
from hal.kernel_uses import planned_uses
from hal.plan import PlannedOp
from hal.roofline import bound_of_work
from hal.selection import Rejection
from hal.unlocks import unlocks_of
from hal_engine.audit.call_work import CallSize, work_of_call
from hal_engine.audit.observer import SiteRecord, Timing
from hal_engine.audit.step_mode import OutsideOp

OUTSIDE, HOST = "outside", "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Work and time of timed calls, and least time on the device's rates."""

    calls: int
    flops: float
    bytes: float
    us: float
    bound_us: float | None
    bound_by: str | None


def totals_of(
    planned: PlannedOp,
    timed: Mapping[CallSize, Timing],
    device: DeviceSpec,
    link: GroupLink | None,
    candidate: KernelCandidate | None = None,
) -> Totals:
    """Sums over the calls of one site and range. candidate: in place of the chosen one."""
    request = planned.site.request
    flops = moved = us = bound_us = 0.0
    by: dict[str, float] = {}
    is_bounded, calls = bool(timed), 0
    for size, timing in timed.items():
        work = work_of_call(request, size, candidate or planned.choice)
        bound = bound_of_work(request, work, device, link)
        calls += timing.calls
        flops += work.flops * timing.calls
        moved += work.bytes * timing.calls
        us += timing.ns / 1e3
        if bound is None:
            is_bounded = False
        else:
            bound_us += bound.us * timing.calls
            by[bound.by] = by.get(bound.by, 0.0) + bound.us * timing.calls
    return Totals(
        calls=calls,
        flops=flops,
        bytes=moved,
        us=us,
        bound_us=bound_us if is_bounded else None,
        bound_by=max(by, key=lambda name: by[name]) if is_bounded and by else None,
    )


def planned_row(record: SiteRecord, calls: int, device: DeviceSpec, link: GroupLink | None) -> Row:
    """The row of a bound call site and range. calls: by its counter, which misses none.

    Where only some calls were timed, work and time are those of the timed ones, scaled up.
    """
    planned = record.planned
    request, choice = planned.site.request, planned.choice
    totals = totals_of(planned, record.timed, device, link)
    scale = calls / totals.calls if totals.calls else 0.0
    layer = _layer_of(record.site, planned)
    return Row(
        op=request.op,
        phase=request.phase,
        site=record.site,
        layer=layer,
        tokens=(planned.tokens.low, planned.tokens.high),
        arguments=record.arguments,
        implementation=choice.name,
        tier=choice.tier.label,
        state="planned" if calls else "never-exercised",
        calls=calls,
        flops=totals.flops * scale,
        bytes=totals.bytes * scale,
        time_us=round(totals.us * scale, 3) if totals.calls else None,
        bound_us=None if totals.bound_us is None else round(totals.bound_us * scale, 3),
        bound_by=totals.bound_by,
        leaf=with_machine_code(record.tally.check(), planned),
        losers=losers_of(planned, gain_us(record, totals, device, link), totals.us, scale),
    )


def with_machine_code(check: LeafCheck, planned: PlannedOp) -> LeafCheck:
    """With what the stored machine code of the planned kernels proves. It was read when they were
    compiled without a device, so it says what would run and is no proof of what ran."""
    codes = [
        f"{' '.join(filter(None, (use.kernel, use.config)))}: {use.code}"
        + (f" ({use.caveat})" if use.caveat else "")
        for use in planned_uses(planned)
        if use.code
    ]
    if not codes:
        return check
    told = f"machine code of its kernels: {'; '.join(dict.fromkeys(codes))}"
    return check.model_copy(update={"proof": "; ".join(filter(None, (check.proof, told)))})


def _layer_of(site: str, planned: PlannedOp) -> int | None:
    match = re.match(r"layers\.(\d+)\.", site)
    return int(match[1]) if match and planned.site.layers else None


def gain_us(
    record: SiteRecord, totals: Totals, device: DeviceSpec, link: GroupLink | None
) -> float | None:
    """What the better implementation of a lost path would save at least: rooflines' difference."""
    better = record.planned.better
    if better is None or totals.bound_us is None:
        return None
    ideal = totals_of(record.planned, record.timed, device, link, candidate=better)
    return None if ideal.bound_us is None else max(0.0, totals.bound_us - ideal.bound_us)


def losers_of(planned: PlannedOp, gain: float | None, us: float, scale: float) -> tuple[Loser, ...]:
    """Better-ranked implementations that did not run, with what would unlock each.

    gain: of the better implementation of a lost path. us: of the timed calls; scale: all calls
    over timed ones.
    """
    decision = planned.decision
    better = planned.better.name if planned.better is not None else ""
    return tuple(
        Loser(
            name=loser.name,
            tier=loser.tier.label,
            reasons=tuple(
                Evidence(what=r.what, required=r.required, found=r.found) for r in loser.reasons
            ),
            gain_us=_scaled(gain if loser.name == better else _gain(planned, loser, us), scale),
            unlock=unlocks_of(loser.reasons),
        )
        for loser in decision.rejected
        if _is_better(planned, loser)
    )


def _is_better(planned: PlannedOp, loser: Rejection) -> bool:
    if loser.tier != planned.choice.tier:
        return loser.tier > planned.choice.tier
    mine, other = planned.decision.estimate_us, loser.estimate_us
    return other is not None and (mine is None or other < mine)


def _gain(planned: PlannedOp, loser: Rejection, us: float) -> float | None:
    """Of the observed time, the share that measured times of both say would be saved."""
    mine, other = planned.decision.estimate_us, loser.estimate_us
    return None if not mine or other is None else max(0.0, us * (1.0 - other / mine))


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else round(value * scale, 3)


def outside_row(seen: OutsideOp) -> Row:
    """The row of a torch op that no bound op contains."""
    return Row(
        op=seen.name,
        implementation=seen.name,
        tier=HOST if seen.is_host else OUTSIDE,
        state="not-planned" if seen.is_product else "observed",
        calls=seen.calls,
        flops=seen.flops,
        bytes=seen.bytes,
        time_us=round(seen.ns / 1e3, 3),
        location=seen.location,
    )


def host_rows(record: SiteRecord) -> list[Row]:
    """Reads by the host and copies between devices inside of a bound op."""
    return [
        Row(
            op=name,
            phase=record.planned.site.request.phase,
            site=record.site,
            layer=_layer_of(record.site, record.planned),
            implementation=name,
            tier=HOST,
            state="observed",
            calls=calls,
            location=location,
        )
        for (name, location), calls in record.host_ops.items()
    ]


def coverage_of(rows: Sequence[Row]) -> dict[str, Work]:
    """Work by tier, with "outside" and "host"."""
    names = dict.fromkeys(row.tier for row in rows if row.calls)
    return {name: _sum([row for row in rows if row.tier == name]) for name in names}


def _sum(rows: Sequence[Row]) -> Work:
    times = [row.time_us for row in rows if row.time_us is not None]
    return Work(
        calls=sum(row.calls for row in rows),
        flops=sum(row.flops for row in rows),
        bytes=sum(row.bytes for row in rows),
        time_us=round(sum(times), 3) if times else None,
    )
