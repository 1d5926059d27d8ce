"""Rules for copies that a layout needs or seems to need, and for products in disguise."""

from __future__ import annotations

from collections.abc import Iterator

from hal.auditing.gates import GateClass
from hal.auditing.rules.facts import (
    MIN_ELEMENTS,
    calls_of,
    operands,
    shape_text,
    shapes_text,
    time_of,
)
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex, bare_name, frame_of
from hal.auditing.trace import ObservedOp, TensorFact

_LAYOUT_COPIES = frozenset({"clone", "contiguous", "_to_copy", "copy_"})


def _contiguous(index: TraceIndex) -> Iterator[Hit]:
    for ops in index.by_place.values():
        copies = [op for op in ops if _is_layout_copy(op)]
        if not index.is_repeated(calls_of(copies)):
            continue
        for op in copies:
            reader = _reader_of(index, op)
            if reader is None:
                continue
            yield Hit(
                title=f"a copy to make a tensor contiguous for {reader}, which takes it as it is",
                location=op.location,
                op="copy",
                evidence=(
                    evidence("layout", f"any, for {reader}", "made contiguous each step"),
                    evidence("copied", "nothing", f"{op.calls} times {shape_text(op.outputs[0])}"),
                ),
                calls=op.calls,
                time_us=op.time_us,
                cost_us=op.time_us,
                rank=index.rank_of(op),
            )


def _is_layout_copy(op: ObservedOp) -> bool:
    if bare_name(op.name) not in _LAYOUT_COPIES or not op.inputs or not op.outputs:
        return False
    source, made = op.inputs[0], op.outputs[0]
    is_same = source.dtype == made.dtype and source.device == made.device
    is_large = made.num_elements >= MIN_ELEMENTS
    asked = bare_name(op.function) == "contiguous"
    return is_same and is_large and asked and not source.is_contiguous and op.repeats == 0


def _reader_of(index: TraceIndex, copy: ObservedOp) -> str | None:
    """What reads the copy in the same function and would have read the original as well: torch's
    attention if head_dim is contiguous, or a product of a transposed matrix."""
    source, made = copy.inputs[0], copy.outputs[0]
    frame = frame_of(copy.location)
    for call in index.functions.get("scaled_dot_product_attention", []):
        facts = [call.arguments.get(name) for name in ("query", "key", "value")]
        if (
            frame_of(call.location) == frame
            and source.last_stride == 1
            and made.shape in [fact.shape for fact in facts if isinstance(fact, TensorFact)]
        ):
            return "attention"
    is_transposed = len(source.shape) >= 2 and source.last_stride != 1
    for op in index.by_frame.get(frame, []):
        pair = operands(op) if op.op_class == "gemm" else None
        if pair and is_transposed and any(_is_matrix_of(fact, made) for fact in pair):
            return "a product"
    return None


def _is_matrix_of(fact: TensorFact, made: TensorFact) -> bool:
    return fact.num_elements == made.num_elements and fact.shape[-2:] == made.shape[-2:]


MUCH_LARGER = 16


def _product_by_broadcast(index: TraceIndex) -> Iterator[Hit]:
    """x[:, :, None] * y[None] and a sum: all partial products in memory, and no matrix unit."""
    for ops in index.by_place.values():
        for product in ops:
            if bare_name(product.name) != "mul" or len(product.inputs) < 2 or not product.outputs:
                continue
            made = product.outputs[0]
            largest = max(fact.num_elements for fact in product.inputs)
            if made.num_elements < MUCH_LARGER * max(largest, MIN_ELEMENTS // MUCH_LARGER):
                continue
            total = next(
                (op for op in index.by_frame[frame_of(product.location)] if _sums(op, made)), None
            )
            if total is not None:
                yield Hit(
                    title="a matrix product as a broadcast product and a sum, with all partial "
                    "products in memory",
                    location=product.location,
                    op="gemm",
                    evidence=(
                        evidence("values in memory", "none", shape_text(made)),
                        evidence("factors", "torch.matmul", shapes_text(product.inputs[:2])),
                    ),
                    calls=product.calls,
                    time_us=time_of((product, total)),
                    rank=index.rank_of(product),
                )


def _sums(op: ObservedOp, made: TensorFact) -> bool:
    return bare_name(op.name) in ("sum", "mean") and any(f.shape == made.shape for f in op.inputs)


def _cat_with_nothing(index: TraceIndex) -> Iterator[Hit]:
    """cat([empty, x]) is a copy of x: the first step of a cache, or every one that nobody reads."""
    for op in index.by_op_name.get("cat", []):
        filled = [fact for fact in op.inputs if fact.num_elements]
        is_copy = len(filled) == 1 and len(op.inputs) > 1
        if not is_copy or filled[0].num_elements < MIN_ELEMENTS or not index.is_repeated(op.calls):
            continue
        yield Hit(
            title="torch.cat of one tensor and empty ones, which copies it",
            location=op.location,
            op="copy",
            evidence=(evidence("copied", "nothing", f"{op.calls} times {shape_text(filled[0])}"),),
            calls=op.calls,
            time_us=op.time_us,
            cost_us=op.time_us,
            rank=index.rank_of(op),
        )


RULES = (
    Rule(
        id="contiguous-each-step",
        gate=GateClass.LOST_FAST_PATH,
        summary="an explicit .contiguous() that copies each step, for attention or products that "
        "take the layout as it is",
        remedy="leave it out; products take transposed operands, attention takes any "
        "layout with head_dim contiguous",
        check=_contiguous,
    ),
    Rule(
        id="product-by-broadcast",
        gate=GateClass.LOST_FAST_PATH,
        summary="a broadcast multiplication far larger than its factors, then summed: a matrix "
        "product without a matrix unit",
        remedy="torch.matmul, torch.einsum or torch.bmm",
        check=_product_by_broadcast,
    ),
    Rule(
        id="cat-with-nothing",
        gate=GateClass.LOST_FAST_PATH,
        summary="torch.cat of a tensor with empty ones, each step: a copy",
        remedy="take the tensor as it is; where no token follows, keep no cache (use_cache=False)",
        check=_cat_with_nothing,
    ),
)
