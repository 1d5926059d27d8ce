"""Plans of the large models on four groups of devices: no op without a native or explained path."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from absent_plans import plan, profile
from hal.kernel_uses import planned_uses
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.norm_quantize import NormQuantizeRequest
from hal.ops.quantize import QuantizeRequest
from hal.plan import PlannedOp
from hal.reasons import Reason, ReasonKind
from hal.selection import LostFastPath, Rejection
from hal.tiers import Tier

MODELS = ("deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5")
GROUPS = (
    ("rtx-pro-6000-blackwell-server", 8),
    ("mi300x", 8),
    ("rtx-4090", 8),
    ("radeon-pro-w7900", 1),
)


def unexplained(op: PlannedOp) -> list[str]:
    """What is missing to understand why an op does not run native; empty if nothing is."""
    decision = op.decision
    where = f"{op.site.site} ({op.site.request.phase}) {op.tokens}: {decision.choice.name}"
    if decision.choice.tier is Tier.NATIVE:
        return []
    better = [loser for loser in decision.rejected if loser.tier > decision.choice.tier]
    if not better:
        return [f"{where}: nothing better is known"]
    problems = []
    for loser in better:
        unmet = [reason for reason in loser.reasons if reason.kind is not ReasonKind.RANKED]
        if not unmet:
            problems.append(f"{where}: {loser.name} lost without a reason")
        problems += [
            f"{where}: {loser.name}: {reason.what}: required {reason.required!r}, "
            f"found {reason.found!r}"
            for reason in unmet
            if not (reason.what.strip() and reason.required.strip() and reason.found.strip())
        ]
        # A better one that only lacks what can be had is a loss, and has to be told as one.
        if unmet and all(reason.kind.is_attainable for reason in unmet) and decision.lost is None:
            problems.append(f"{where}: {loser.name} could serve, and no loss is told")
        elif unmet and is_owed(unmet) and not is_told(decision.lost, loser.name, unmet):
            problems.append(f"{where}: {loser.name} is not written, and the row does not owe it")
    return problems


def is_owed(unmet: Sequence[Reason]) -> bool:
    """Whether a kernel that nobody wrote is all that is in the way: that explains nothing."""
    attainable = all(reason.kind.is_attainable for reason in unmet)
    return attainable and any(reason.kind is ReasonKind.MISSING for reason in unmet)


def is_told(lost: LostFastPath | None, name: str, unmet: Sequence[Reason]) -> bool:
    """Whether the loss of a row names a candidate, or one that the same is not written for."""
    if lost is None:
        return False
    missing = {reason for reason in unmet if reason.kind is ReasonKind.MISSING}
    return lost.better == name or missing <= set(lost.reasons)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "tp"), GROUPS, ids=lambda value: str(value))
def test_every_op_is_native_or_says_what_better_ones_lack(model: str, device: str, tp: int) -> None:
    found = plan(model, profile(device), tp)
    assert len(found.ops) > 30
    assert not [v.site for v in found.violations if v.unserved is not None]
    problems = [problem for op in found.ops for problem in unexplained(op)]
    assert not problems, "\n".join(problems)
    for use in (use for op in found.ops for use in planned_uses(op)):
        if use.code and not use.code.startswith("native"):
            assert "nobody has explained" not in use.explanation
            assert any(use.explanation and use.explanation in note for note in found.notes)
    assert found.memory is not None
    if found.memory.weight_bytes > found.memory.memory_bytes:
        assert found.memory.kv_tokens == 0


@pytest.mark.parametrize(("device", "tp"), GROUPS, ids=lambda value: str(value))
def test_a_projection_per_group_has_a_native_product(device: str, tp: int) -> None:
    """Of V4.1, whose rows stay in 16 bits while the weight has blocks of FP8."""
    found = plan("deepseek-v4.1-flash", profile(device), tp)
    products = [op for op in found.ops if op.site.site == "layers.*.o_a_proj"]
    assert products
    assert {op.decision.choice.tier for op in products} == {Tier.NATIVE}


@pytest.mark.parametrize(
    ("device", "element"), [("mi300x", "fp8_e4m3fnuz"), ("h200-sxm", "fp8_e4m3fn")]
)
def test_rows_are_rounded_to_the_fp8_that_the_device_multiplies(device: str, element: str) -> None:
    """So that a product's store can round for the next one, which no other encoding allows."""
    found = plan("deepseek-v4.1-flash", profile(device), 8)
    rounded = {
        op.site.site: str(op.site.request.out_dtype)
        for op in found.ops
        if isinstance(op.site.request, (QuantizeRequest, NormQuantizeRequest, FusedGemmRequest))
    }
    # The indexer's queries meet keys that are cached in e4m3fn on every device.
    assert rounded.pop("layers.*.indexer.q_quantize") == "fp8_e4m3fn"
    assert len(rounded) > 5
    assert set(rounded.values()) == {element}
    stored = [op for op in found.ops if op.site.site == "layers.*.shared.gate_up_quantize"]
    assert stored
    for op in stored:
        assert isinstance(op.site.request, FusedGemmRequest)
        assert op.site.request.out_dtype == element
        assert op.decision.choice.tier is Tier.NATIVE


def test_an_op_without_a_reason_is_found() -> None:
    found = plan("glm-5", profile("rtx-4090"), 8)
    op = next(o for o in found.ops if o.decision.choice.tier is not Tier.NATIVE)
    assert not unexplained(op)
    decision = op.decision
    silent = tuple(dataclasses.replace(loser, reasons=()) for loser in decision.rejected)
    for changed, message in (
        (dataclasses.replace(decision, rejected=silent), "without a reason"),
        (dataclasses.replace(decision, rejected=()), "nothing better is known"),
    ):
        (problem, *_) = unexplained(dataclasses.replace(op, decision=changed))
        assert message in problem


def test_a_kernel_that_nobody_wrote_is_no_reason_unless_the_row_owes_it() -> None:
    found = plan("glm-5", profile("rtx-4090"), 8)
    op = next(o for o in found.ops if o.decision.choice.tier is not Tier.NATIVE)
    owed = Reason(what="kernel", required="one", found="none", kind=ReasonKind.MISSING)
    other = dataclasses.replace(owed, kind=ReasonKind.SOFTWARE)
    loser = Rejection(name="ours", tier=Tier.NATIVE, reasons=(owed,))
    told = LostFastPath(better="ours", better_tier=Tier.NATIVE, reasons=(owed,))
    untold = dataclasses.replace(told, better="theirs", reasons=(other,))
    for lost, message in ((None, "no loss is told"), (untold, "does not owe it"), (told, "")):
        decision = dataclasses.replace(op.decision, rejected=(loser,), lost=lost)
        problems = unexplained(dataclasses.replace(op, decision=decision))
        assert [message in problem for problem in problems] == [True] * bool(message)


def test_what_widens_rounded_rows_on_a100_is_told() -> None:
    found = plan("deepseek-v4-flash", profile("a100-sxm-80g"), 8)
    uses = [use for op in found.ops for use in planned_uses(op)]
    assert any(use.kernel == "grouped_gemm.round_rows" for use in uses)
    assert any("are widened by torch instead" in note for note in found.notes)
