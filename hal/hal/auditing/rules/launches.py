"""Rules for work in pieces too small for the device: what a call costs is not what it computes."""

from __future__ import annotations

from collections.abc import Iterator

from hal.auditing.gates import GateClass
from hal.auditing.rules.facts import calls_of, operands, shapes_text, time_of
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import HOST_DEVICES, Frame, TraceIndex, bare_name, frame_of
from hal.auditing.trace import ObservedOp

TINY_ELEMENTS = {"cpu": 512}
TINY_ELEMENTS_ACCELERATOR = 16_384
"""What a launch costs is worth so many elements: on a CPU some 1 µs, on an accelerator some 5 µs
while it does more in each."""
MANY_CALLS_A_STEP = 200
"""So many tiny ops in one function and step are a loop over elements, written in Python."""
PRODUCTS_IN_A_LOOP = 8
SMALL_PRODUCT_FLOPS = {"cpu": 2e6}
SMALL_PRODUCT_FLOPS_ACCELERATOR = 2e8

_PICKS = frozenset({"index", "index_select", "gather", "index_add_"})
_TINY_CLASSES = ("elementwise", "reduction", "activation", "copy", "other")


def _tiny_ops(index: TraceIndex) -> Iterator[Hit]:
    for ops in index.by_frame.values():
        tiny = [op for op in ops if _is_tiny(op)]
        # A line that runs once a layer is not a loop over elements, one that runs 30 times is.
        looped = [op for op in tiny if op.calls / index.num_steps >= MANY_CALLS_A_STEP / 8]
        per_step = calls_of(looped) / index.num_steps
        if per_step < MANY_CALLS_A_STEP or calls_of(looped) * 2 < calls_of(ops):
            continue
        worst = max(looped, key=lambda op: op.calls)
        names = sorted({bare_name(op.name) for op in looped})
        yield Hit(
            title=f"{per_step:.0f} ops a step on a few values each: calling them is most of their "
            "time",
            location=worst.location,
            op="elementwise",
            evidence=(
                evidence("ops a step", "a few on whole tensors", f"{per_step:.0f}"),
                evidence("ops", "any", ", ".join(names)[:100]),
                evidence(
                    "size of each", f"> {_limit(worst)} values", shapes_text(worst.inputs[:2])
                ),
            ),
            calls=calls_of(looped),
            time_us=time_of(looped),
            rank=index.rank_of(worst),
        )


def _limit(op: ObservedOp) -> int:
    facts = op.outputs or op.inputs
    device = facts[0].device if facts else "cpu"
    return TINY_ELEMENTS.get(device, TINY_ELEMENTS_ACCELERATOR)


def _is_tiny(op: ObservedOp) -> bool:
    if op.op_class not in _TINY_CLASSES or not op.outputs or op.region != "eager":
        return False
    return max(fact.num_elements for fact in (*op.inputs, *op.outputs)) <= _limit(op)


def _small_products(index: TraceIndex) -> Iterator[Hit]:
    picking = _frames_that_pick(index)
    for frame, ops in index.by_frame.items():
        by_line: dict[int, list[ObservedOp]] = {}
        for op in ops:
            if op.op_class == "gemm" and op.location is not None and _is_small(op):
                by_line.setdefault(op.location.line, []).append(op)
        for group in by_line.values():
            length = run_length(group)
            frames = [frame, *(frame_of(outer) for outer in group[0].stack[:4])]
            length = max([length, *(picking[f] for f in frames if f in picking)])
            if length < PRODUCTS_IN_A_LOOP or calls_of(group) < PRODUCTS_IN_A_LOOP:
                continue
            worst = max(group, key=lambda op: op.calls)
            yield Hit(
                title=f"a loop of {length:.0f} small products over parts of one tensor",
                location=worst.location,
                op="gemm",
                evidence=(
                    evidence("products", "1 batched or grouped", f"{length:.0f} in a row"),
                    evidence("arguments", "any", shapes_text(operands(worst) or worst.inputs)),
                ),
                calls=calls_of(group),
                time_us=time_of(group),
                rank=index.rank_of(worst),
            )


def run_length(ops: list[ObservedOp]) -> float:
    """How many calls in a row, on average, read from the same tensor. A call that repeats another
    is no part of a loop: `same-product-again` finds those."""
    calls = calls_of(ops) - sum(op.repeats for op in ops)
    return calls / max(1, calls - sum(op.shared_inputs for op in ops))


def _frames_that_pick(index: TraceIndex) -> dict[Frame, float]:
    """Functions that take parts out of one tensor, again and again (x[rows] for each expert), and
    how often in a row."""
    found: dict[Frame, float] = {}
    for frame, ops in index.by_frame.items():
        picks = [op for op in ops if bare_name(op.name) in _PICKS]
        for op in picks:
            # One pick a step is the batch that a training loop takes out of its data.
            length = min(run_length([op]), op.calls / index.num_steps)
            if length >= PRODUCTS_IN_A_LOOP:
                found[frame] = max(found.get(frame, 0.0), length)
    return found


def _is_small(op: ObservedOp) -> bool:
    device = op.inputs[0].device if op.inputs else "cpu"
    limit = (
        SMALL_PRODUCT_FLOPS["cpu"] if device in HOST_DEVICES else SMALL_PRODUCT_FLOPS_ACCELERATOR
    )
    return op.flops <= limit * max(1, op.calls) and bool(op.inputs)


RULES = (
    Rule(
        id="tiny-ops",
        gate=GateClass.LOST_FAST_PATH,
        summary="hundreds of ops a step on a few values each in one function: a loop over elements "
        "in Python",
        remedy="write the loop as ops on whole tensors, or compile the function",
        check=_tiny_ops,
    ),
    Rule(
        id="loop-of-small-products",
        gate=GateClass.LOST_FAST_PATH,
        summary="eight or more small products in a row at one line over parts of one tensor: "
        "a loop over experts or heads",
        remedy="one torch.bmm, torch._grouped_mm or einsum over all of them",
        check=_small_products,
    ),
)
