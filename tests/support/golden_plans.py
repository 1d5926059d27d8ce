"""Golden plans: DeepSeek-V4.1-Flash on groups of accelerators, in a form that people can review.

`python tests/support/golden_plans.py` writes tests/golden/plans. A line per call site and range of
tokens: what runs and how good it is, then what is lost and of what kind the gap is. Times have two
digits, so that a change of a line is a change of the plan. Versions and hashes are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from absent_plans import plan, profile
from hal.plan import Plan, PlannedOp
from hal.reasons import ReasonKind
from hal.step_costs import StepEstimate
from hal_engine.cli.plan_report import memory_line

FOLDER = Path(__file__).parents[1] / "golden" / "plans"
MODEL = "deepseek-v4.1-flash"
WORLD_SIZE = 8
DEVICES = (
    "rtx-pro-6000-blackwell-server",
    "rtx-4090",
    "h200-sxm",
    "mi300x",
    "ascend-910b2",
    "metax-c550",
    "bi-v150",
)
_WIDTHS = (40, 8, 58)  # the same in every plan, so that a changed name changes its own line only
# Ways of losing that are about somebody's decision; the others follow from the request alone.
_KIND_WORDS = {
    ReasonKind.SOFTWARE: "install",
    ReasonKind.MISSING: "write",
    ReasonKind.UNVERIFIED: "verify",
    ReasonKind.ARGUMENT: "extend",
}


def golden_path(device: str) -> Path:
    return FOLDER / f"{MODEL}-{device}-x{WORLD_SIZE}.txt"


def golden_text(device: str) -> str:
    """The plan of the group as text."""
    return "\n".join(_lines(plan(MODEL, profile(device), WORLD_SIZE))) + "\n"


def _lines(found: Plan) -> Iterator[str]:
    yield f"{MODEL} on {WORLD_SIZE} × {found.devices[0]['name']}"
    settings = found.settings
    yield (
        f"{settings['dtype']} activations, {settings['kv_dtype']} KV cache, "
        f"{found.kv_bytes_per_token:,} KV bytes a token"
    )
    yield _link(found)
    if found.memory is not None:
        yield memory_line(found.memory, WORLD_SIZE)
    yield from (_step(step) for step in found.steps)
    yield ""
    yield from (f"note: {note}" for note in found.notes)
    for feature, why in found.policy["forced_features"].items():
        yield f"forced: {feature}: {why}"
    yield from (f"off: {pattern}" for pattern in sorted(found.policy["disabled"]))
    yield from (f"refused for its meaning: {line}" for line in sorted(_refusals(found)))
    yield from (
        f"unserved: {v.site} {v.label} {v.tokens}"
        for v in found.violations
        if v.unserved is not None
    )
    yield ""
    for op in found.ops:
        cells = (_site(op), str(op.tokens), _choice(op))
        row = "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
        yield f"{row}  {_lost(op)}".rstrip()


def _link(found: Plan) -> str:
    link = found.link
    assert link is not None
    rate = (
        "unknown" if link.bandwidth_bytes_per_s is None else _two(link.bandwidth_bytes_per_s / 1e9)
    )
    latency = "unknown" if link.latency_us is None else _two(link.latency_us)
    mesh = "every pair linked" if link.is_full_mesh else "not every pair linked"
    if not link.is_mesh_known:
        mesh = "not known which pairs are linked"
    return (
        f"link: {link.kind}, {mesh}, P2P {link.p2p}, {rate} GB/s, {latency} µs "
        f"({link.evidence.confidence.value})"
    )


def _step(step: StepEstimate) -> str:
    if not step.is_telling:
        return f"{step.phase} {step.tokens}: not known, {len(step.unknown)} sites without a bound"
    largest = sorted(step.sites, key=lambda site: -(site.us or 0.0))[:3]
    shares = ", ".join(
        f"{site.site.removeprefix('layers.*.')} {site.by} {_two(site.us / 1000)}"
        for site in largest
        if site.us is not None
    )
    unknown = f"; {len(step.unknown)} sites unknown" if step.unknown else ""
    unknown += f"; {len(step.partial)} sites memory only" if step.partial else ""
    return (
        f"{step.phase} {step.tokens}: at least {_two(step.total_us / 1000)} ms, of which lost "
        f"{_two(step.lost_us / 1000)} ms{unknown}; most: {shares}"
    )


def _refusals(found: Plan) -> set[str]:
    return {
        f"{loser.name}: {', '.join(notes)}"
        for op in found.ops
        for loser in op.decision.rejected
        if (notes := [r.what for r in loser.reasons if r.kind is ReasonKind.SEMANTIC])
        and all(r.kind is ReasonKind.SEMANTIC for r in loser.reasons)
    }


def _site(op: PlannedOp) -> str:
    phase = op.site.request.phase
    return op.site.label().removeprefix("layers.") + ("" if phase == "any" else f" ({phase})")


def _choice(op: PlannedOp) -> str:
    notes = "".join(f" [{note.name}]" for note in op.decision.semantic_notes)
    return f"{op.choice.tier.label} {op.choice.name}{notes}"


def _lost(op: PlannedOp) -> str:
    lost = op.decision.lost
    if lost is None:
        return ""
    if not lost.better:
        return f"< any {lost.better_tier.label}"
    kinds = dict.fromkeys(
        _KIND_WORDS.get(reason.kind, reason.kind.value) for reason in lost.reasons
    )
    return f"< {lost.better_tier.label} {lost.better.split('.')[-1]}: {', '.join(kinds)}"


def _two(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{float(f'{value:.2g}'):,g}"


def main() -> int:
    """Write every golden plan, and remove those of devices that are gone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = {golden_path(device) for device in DEVICES}
    for path in set(FOLDER.glob("*.txt")) - wanted:
        path.unlink()
    for device in DEVICES:
        golden_path(device).write_text(golden_text(device), encoding="utf-8")
    print(f"{len(DEVICES)} plans in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
