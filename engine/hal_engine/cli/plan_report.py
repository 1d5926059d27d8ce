"""What a plan costs and what it lacks: steps, lost fast paths with their price, memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.device_group import GroupLink
from hal.memory_need import MemoryNeed
from hal.plan import Plan
from hal.step_costs import Step, StepEstimate, called_ops
from hal.unlocks import unlocks_of
from hal_engine.cli.plan_table import say

_GIB = float(1 << 30)
_MOST_NAMES = 8


def print_report(plan: Plan, console: Console) -> None:
    """Steps, lost fast paths, policy, memory and what is wrong; nothing for what a plan has not."""
    if any(step.is_telling for step in plan.steps):
        console.print(_steps_table(plan))
    losses = collect_losses(plan)
    if losses:
        console.print(_losses_table(plan, losses))
    _print_policy(plan, console)
    if plan.link is not None:
        say(console, Text(link_line(plan.link), style="dim"))
    if plan.memory is not None:
        say(console, Text(memory_line(plan.memory, len(plan.devices)), style="dim"))


def _steps_table(plan: Plan) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title_justify="left",
        title="Least time of a step, by the rates of the device",
    )  # fmt: skip
    table.add_column("step", no_wrap=True)
    for name in ("least ms", "tokens/s", "lost ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most of it")
    for step in plan.steps:
        if not step.is_telling:
            table.add_row(step_name(step), "not known", "", "", "")
            continue
        table.add_row(
            step_name(step),
            f"{step.total_us / 1000:,.2f}{'+' if step.unknown or step.partial else ''}",
            f"{step.tokens * 1e6 / step.total_us:,.0f}" if step.total_us else "",
            f"{step.lost_us / 1000:,.2f}" if step.lost_us else "",
            ", ".join(_largest(step)),
        )
    told = [step for step in plan.steps if step.is_telling]
    captions = [
        f"+ {text}: {', '.join(_short(names))}"
        for text, names in (
            ("not counted, as no rate of them is known", {n for s in told for n in s.unknown}),
            (
                "memory only, as the rate of their arithmetic is not known",
                {n for s in told for n in s.partial},
            ),
        )
        if names
    ]
    if captions:
        table.caption = "\n".join(captions)
        table.caption_justify = "left"
    return table


def _short(sites: Collection[str]) -> list[str]:
    """The first of these sites and how many more, by name without their layer."""
    names = sorted({site.removeprefix("layers.*.") for site in sites})
    return names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"{len(names)} in all"]


def step_name(step: StepEstimate) -> str:
    return f"{step.phase} {step.tokens}"


def _largest(step: StepEstimate) -> list[str]:
    """The three sites that take most, with their share and what bounds them."""
    known = [site for site in step.sites if site.us is not None]
    known.sort(key=lambda site: -(site.us or 0.0))
    return [
        f"{site.site.removeprefix('layers.*.')} {step.share(site.us) or 0:.0%} {site.by}"
        for site in known[:3]
    ]


@dataclass(slots=True)
class Loss:
    """One lost fast path, over every site that shares it. lost_shares: step name -> share of the
    step; a step that does not call it, or whose rates are not known, is not in there."""

    op: str
    choice: str
    tier: str
    better: str
    better_tier: str
    unlock: tuple[str, ...]
    is_waived: bool
    sites: list[str] = field(default_factory=list)
    lost_shares: dict[str, float] = field(default_factory=dict)


def collect_losses(plan: Plan) -> list[Loss]:
    """Lost fast paths, the dearest first; sites with the same loss are one."""
    losses: dict[tuple[str, str, str, tuple[str, ...]], Loss] = {}
    shares = _lost_shares(plan)
    for op in plan.ops:
        lost = op.decision.lost
        if lost is None:
            continue
        unlock = unlocks_of(lost.reasons) or ("a candidate for this device, which none offers",)
        better = lost.better or "anything that is at least"
        key = (op.site.request.label, op.choice.name, better, unlock)
        loss = losses.setdefault(
            key,
            Loss(
                op=op.site.request.label,
                choice=op.choice.name,
                tier=op.choice.tier.label,
                better=better,
                better_tier=lost.better_tier.label,
                unlock=unlock,
                is_waived=op.waiver is not None,
            ),
        )
        if op.site.site not in loss.sites:
            loss.sites.append(op.site.site)
        for step, share in shares.get(id(op), {}).items():
            loss.lost_shares[step] = loss.lost_shares.get(step, 0.0) + share
    return sorted(losses.values(), key=lambda loss: -max(loss.lost_shares.values(), default=0.0))


def _lost_shares(plan: Plan) -> dict[int, dict[str, float]]:
    """id of a planned op -> name of a step that calls it -> share of that step that is lost."""
    shares: dict[int, dict[str, float]] = {}
    for step in plan.steps:
        if not step.is_telling:
            continue
        called = called_ops(plan.ops, Step(phase=step.phase, tokens=step.tokens))
        for op, site in zip(called, step.sites, strict=True):
            if site.lost_us is not None:
                shares.setdefault(id(op), {})[step_name(step)] = site.lost_us / step.total_us
    return shares


def _losses_table(plan: Plan, losses: list[Loss]) -> Table:
    """Costs first and narrow, so that names and remedies have the rest of a terminal's width."""
    names = [step_name(step) for step in plan.steps if step.is_telling]
    title = "Lost fast paths, " + (
        "at least what they cost of a step, and what unlocks them"
        if names
        else "and what unlocks them (too few rates are known for what they cost)"
    )
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title_justify="left", title=title
    )
    for name in names:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("lost path, and what unlocks it", overflow="fold", vertical="bottom")
    for loss in losses:
        table.add_row(*(_share(loss.lost_shares.get(name)) for name in names), _loss_text(loss))
    return table


def _loss_text(loss: Loss) -> Text:
    sites = ", ".join(site.removeprefix("layers.*.") for site in loss.sites)
    return Text.assemble(
        (loss.op, "bold"),
        f": {sites}",
        f"\nruns {loss.choice} ",
        (loss.tier, "red"),
        " (waived)" if loss.is_waived else "",
        f"\nlost {loss.better} ",
        (loss.better_tier, "green"),
        *(f"\n· {step}" for step in loss.unlock),
    )


def _share(share: float | None) -> str:
    if share is None:
        return "–"
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def _print_policy(plan: Plan, console: Console) -> None:
    for feature, reason in plan.policy.get("forced_features", {}).items():
        say(console, Text(f"policy: {feature} is forced on: {reason}", style="cyan"))
    for pattern, reason in plan.policy.get("disabled", {}).items():
        say(console, Text(f"policy: {pattern} is off: {reason}", style="cyan"))


def link_line(link: GroupLink) -> str:
    """What links the group, as far as it is known, in one sentence."""
    pairs = "every pair linked" if link.is_full_mesh else "not every pair linked"
    if not link.is_mesh_known:
        pairs = "which pairs are linked is not known"
    rate = link.bandwidth_bytes_per_s
    parts = [
        link.kind,
        pairs,
        *([f"farthest pair {link.distance}"] if link.distance else []),
        f"peer access {link.p2p}",
        "bandwidth not known" if rate is None else f"{rate / 1e9:,.1f} GB/s",
        *([] if link.latency_us is None else [f"{link.latency_us:,.1f} µs"]),
    ]
    return f"link: {', '.join(parts)}"


def memory_line(need: MemoryNeed, world_size: int) -> str:
    """The need of a rank in one sentence."""
    weights = f"weights {need.weight_bytes / _GIB:,.1f} GiB a rank"
    if need.memory_bytes is None:
        return f"memory: {weights}; the device's memory is not known"
    room = f"of {need.memory_bytes / _GIB:,.1f} GiB"
    if not need.fits:
        least = -(-need.weight_bytes * world_size // int(need.memory_bytes * 0.9))
        return f"memory: {weights} {room}: do not fit; about {least} such devices would hold them"
    tokens = "" if need.kv_tokens is None else f"; {need.kv_tokens:,} tokens of KV cache fit beside"
    return f"memory: {weights} {room}{tokens}"
