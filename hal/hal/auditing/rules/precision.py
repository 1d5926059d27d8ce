"""Rules for number formats: products wider than their data, float64 by accident."""

from __future__ import annotations

from collections.abc import Iterator

from hal.auditing.document import Evidence
from hal.auditing.gates import GateClass
from hal.auditing.rules.facts import (
    FLOAT_BITS,
    MIN_ELEMENTS,
    calls_of,
    is_inside_attention,
    narrower_origins,
    operands,
    shape_text,
    shapes_text,
    time_of,
)
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex, bare_name, place_of
from hal.auditing.trace import ObservedOp

MUCH_BETTER = 1.5
"""A unit that is so many times as fast is worth changing a program for."""
MIN_COMPUTE_US = 10.0
"""Operations that take less than this at the device's rate are not what a product takes."""
ROWS_BOUND_BY_MEMORY = 8
"""A product of up to so many rows takes as long as reading its weights, in any number format."""

_PRODUCTS = ("gemm", "convolution")


def _widened(index: TraceIndex) -> Iterator[Hit]:
    for op in index.trace.ops:
        pair = operands(op) if op.op_class in _PRODUCTS else None
        if pair is None or is_inside_attention(op):
            continue
        for fact in pair:
            narrow = narrower_origins(fact)
            if fact.dtype != "float32" or not narrow or fact.num_elements < MIN_ELEMENTS:
                continue
            is_worth_it, why = _is_narrow_better(index, op, narrow[0])
            yield Hit(
                title=f"product in float32 of what was {narrow[0]} before",
                location=op.location,
                op=op.op_class,
                evidence=(
                    evidence("dtype of the operand", narrow[0], f"{shape_text(fact)}, widened"),
                    evidence("arguments", "any", shapes_text(pair)),
                    why,
                ),
                calls=op.calls,
                time_us=op.time_us,
                gate=None if is_worth_it else GateClass.ADVICE,
                rank=index.rank_of(op),
            )
            break


def _is_narrow_better(index: TraceIndex, op: ObservedOp, narrow: str) -> tuple[bool, Evidence]:
    """Whether the product would be faster in the narrower format, and why. A format whose rate
    nobody knows is taken to be, since it is half to read."""
    pair = operands(op)
    rows = pair[0].num_elements // max(1, pair[0].shape[-1]) if pair and pair[0].shape else 1
    if rows <= ROWS_BOUND_BY_MEMORY:
        return True, evidence("bytes of the weights", "2 per value", f"4, read for {rows} rows")
    fast, slow = index.rate(narrow), index.rate("float32")
    if fast is None or slow is None:
        return True, evidence("bytes per value", "2", "4")
    found = f"{slow:.3g} in float32, {fast:.3g} in {narrow}"
    return fast >= slow / MUCH_BETTER, evidence("operations/s of the device", narrow, found)


def _float64_product(index: TraceIndex) -> Iterator[Hit]:
    for op in index.trace.ops:
        if op.op_class not in (*_PRODUCTS, "attention"):
            continue
        facts = [fact for fact in op.inputs if fact.dtype == "float64"]
        narrow = sorted({d for fact in facts for d in narrower_origins(fact)})
        if facts and narrow and max(fact.num_elements for fact in facts) >= MIN_ELEMENTS:
            yield Hit(
                title=f"product in float64 of what was {narrow[0]} before",
                location=op.location,
                op=op.op_class,
                evidence=(
                    evidence("dtype of the operands", narrow[0], f"{shapes_text(facts)}, widened"),
                ),
                calls=op.calls,
                time_us=op.time_us,
                rank=index.rank_of(op),
            )


def _float64_promotion(index: TraceIndex) -> Iterator[Hit]:
    for op in index.trace.ops:
        if op.op_class not in ("elementwise", "activation", "reduction", "norm", "other"):
            continue
        made = next((fact for fact in op.outputs if fact.dtype == "float64"), None)
        if made is None or made.num_elements < MIN_ELEMENTS:
            continue
        # A tensor without dimensions promotes nothing: the other one sets the dtype.
        wide = [f for f in op.inputs if f.dtype == "float64" and f.shape]
        narrow = [f for f in op.inputs if FLOAT_BITS.get(f.dtype, 64) < 64 and f.shape]
        # A table made of constants, once, may be as precise as it likes.
        is_table = all(f.is_constant for f in op.inputs) and op.calls < max(2, index.trace.steps)
        if wide and narrow and not is_table:
            yield Hit(
                title=f"a float64 tensor turns {narrow[0].dtype} into float64 from here on",
                location=op.location,
                op=op.op_class,
                evidence=(
                    evidence("dtype of the result", narrow[0].dtype, shape_text(made)),
                    evidence("float64 operand", narrow[0].dtype, shape_text(wide[0])),
                ),
                calls=op.calls,
                time_us=op.time_us,
                rank=index.rank_of(op),
            )


def _slow_unit(index: TraceIndex) -> Iterator[Hit]:
    """One finding for the program, at its dearest line: every product is in the same format."""
    slow, fast = index.rate("float32"), index.rate("bfloat16") or index.rate("float16")
    if slow is None or fast is None or fast < 2 * slow:
        return
    groups: dict[tuple[bool, int], list[ObservedOp]] = {}
    for op in index.trace.ops:
        if _is_slow_product(index, op, slow):
            groups.setdefault((op.inputs[0].device == "cpu", op.rank), []).append(op)
    for (is_cpu, _), ops in groups.items():
        worst = max(ops, key=lambda op: op.time_us)
        found = f"{slow:.3g} in float32, {fast:.3g} in 16 bits"
        num_lines = len({place_of(op.location) for op in ops})
        gain = sum(op.flops for op in ops) * (1 / slow - 1 / fast) * 1e6
        yield Hit(
            title="products in float32 on a device whose 16-bit units are "
            f"{fast / slow:.0f} times as fast",
            location=worst.location,
            op=worst.op_class,
            evidence=(
                evidence("operations/s of the device", "those of 16 bits", found),
                evidence("lines with such products", "any", num_lines),
                evidence("arguments here", "any", shapes_text(operands(worst) or worst.inputs)),
            ),
            calls=calls_of(ops),
            time_us=time_of(ops),
            cost_us=min(gain, time_of(ops) * (1 - slow / fast)),
            gate=GateClass.ADVICE if is_cpu else None,
            rank=index.rank_of(worst),
        )


def _is_slow_product(index: TraceIndex, op: ObservedOp, slow: float) -> bool:
    """Whether a product takes its time for its operations. Few rows wait for their weights, small
    products for being called: another number format makes those no faster."""
    pair = operands(op) if op.op_class in _PRODUCTS else None
    if pair is None or any(fact.dtype != "float32" for fact in pair):
        return False
    if any(narrower_origins(fact) for fact in pair) or is_inside_attention(op):
        return False
    rows = pair[0].num_elements // max(1, pair[0].shape[-1]) if pair[0].shape else 1
    # On a CPU experts are multiplied one by one.
    is_split = bare_name(op.name) == "_grouped_mm" and pair[0].device == "cpu"
    parts = pair[1].shape[0] if is_split else 1
    is_few = op.op_class == "gemm" and rows <= ROWS_BOUND_BY_MEMORY * parts
    if is_few or op.flops / slow * 1e6 < MIN_COMPUTE_US * op.calls * parts:
        return False
    tf32 = index.rate("tfloat32") or index.rate("tf32")
    is_tf32_on = index.trace.settings.get("float32_matmul_precision") not in (None, "highest")
    return not (pair[0].device != "cpu" and tf32 and is_tf32_on)


def _outside_autocast(index: TraceIndex) -> Iterator[Hit]:
    """Products in float32 in a program whose other products run under autocast."""
    calls = index.trace.functions
    under: set[str] = set()
    outside: list[ObservedOp] = []
    for op in index.trace.ops:
        if op.op_class not in _PRODUCTS or op.call is None or not 0 <= op.call < len(calls):
            continue
        cast = calls[op.call].settings.get("autocast")
        if cast:
            under.add(cast)
        elif all(fact.dtype == "float32" for fact in op.inputs) and "backward" not in op.function:
            outside.append(op)
    for op in outside if under else ():
        if index.is_repeated(op.calls) and op.inputs and not is_inside_attention(op):
            yield Hit(
                title=f"a product in float32 outside of autocast, others run in {min(under)}",
                location=op.location,
                op=op.op_class,
                evidence=(
                    evidence("autocast", f"on ({min(under)}), as for other products", "off"),
                    evidence("arguments", "any", shapes_text(op.inputs[:3])),
                ),
                calls=op.calls,
                time_us=op.time_us,
                rank=index.rank_of(op),
            )


RULES = (
    Rule(
        id="widened-product",
        gate=GateClass.LOST_FAST_PATH,
        summary="a product in float32 one of whose operands was made from a 16-bit tensor",
        remedy="multiply in the weights' own dtype; torch accumulates in float32",
        check=_widened,
    ),
    Rule(
        id="float64-product",
        gate=GateClass.LOST_FAST_PATH,
        summary="a product, convolution or attention in float64 of what was narrower before",
        remedy="keep constants in the dtype of the data, and call .double() on no operand",
        check=_float64_product,
    ),
    Rule(
        id="float64-promotion",
        gate=GateClass.LOST_FAST_PATH,
        summary="an op that mixes float64 with a narrower tensor, so that all after it is float64",
        remedy="make the constant in the dtype of the data: torch.from_numpy(a).to(x.dtype)",
        check=_float64_promotion,
    ),
    Rule(
        id="outside-autocast",
        gate=GateClass.LOST_FAST_PATH,
        summary="a float32 product outside of autocast in a program that runs others under it",
        remedy="move the call into the autocast block",
        check=_outside_autocast,
    ),
    Rule(
        id="slow-unit",
        gate=GateClass.LOST_FAST_PATH,
        summary="float32 products on a device whose 16-bit units are twice as fast or more; advice "
        "on a CPU",
        remedy="run these under torch.autocast or in bfloat16, or "
        'torch.set_float32_matmul_precision("high"); products of few rows gain nothing by it',
        check=_slow_unit,
    ),
)
