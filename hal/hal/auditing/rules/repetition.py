"""Rules for work that was done before: products, conversions and copies of unchanged tensors.

An op's `repeats` are calls whose inputs were the very same tensors, unchanged, as in an earlier
call: what they give is known already.
"""

from __future__ import annotations

from collections.abc import Iterator

from hal.auditing.gates import GateClass
from hal.auditing.rules.attention import attention_calls
from hal.auditing.rules.facts import (
    COPY_NAMES,
    FLOAT_BITS,
    MIN_ELEMENTS,
    is_quantised,
    shape_text,
    shapes_text,
)
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex, bare_name
from hal.auditing.trace import ObservedOp, TensorFact


def _share_of_repeats(op: ObservedOp) -> float:
    """µs of the calls that were repetitions."""
    return op.time_us * op.repeats / max(1, op.calls)


def _repeated_copies(index: TraceIndex) -> Iterator[tuple[ObservedOp, TensorFact, TensorFact]]:
    """Copies and conversions that were made before: op, from, to."""
    for op in index.trace.ops:
        if op.repeats and op.inputs and op.outputs and bare_name(op.name) in COPY_NAMES:
            source, made = op.inputs[0], op.outputs[0]
            if made.num_elements >= MIN_ELEMENTS and source.device == made.device:
                yield op, source, made


def _same_product(index: TraceIndex) -> Iterator[Hit]:
    for op in index.trace.ops:
        if op.op_class not in ("gemm", "convolution", "attention") or not op.repeats:
            continue
        if max((fact.num_elements for fact in op.inputs), default=0) < MIN_ELEMENTS:
            continue
        yield Hit(
            title=f"the same {_word(op)} of the same tensors computed again",
            location=op.location,
            op=op.op_class,
            evidence=(
                evidence("calls with these tensors", "1 each", f"{op.repeats} more"),
                evidence("arguments", "any", shapes_text(op.inputs[:3])),
            ),
            calls=op.repeats,
            time_us=_share_of_repeats(op),
            cost_us=_share_of_repeats(op),
            # Gradient checkpointing computes again on purpose, to save memory.
            gate=GateClass.ADVICE if index.is_training else None,
            rank=index.rank_of(op),
        )


def _word(op: ObservedOp) -> str:
    return {"gemm": "product"}.get(op.op_class, op.op_class)


def _weight_cast(index: TraceIndex) -> Iterator[Hit]:
    for op, source, made in _repeated_copies(index):
        if source.dtype == made.dtype or is_quantised(source.dtype):
            continue
        if source.dtype not in FLOAT_BITS or made.dtype not in FLOAT_BITS:
            continue
        is_autocast = bool(index.trace.settings.get("autocast")) and op.function not in COPY_NAMES
        yield Hit(
            title=f"an unchanged tensor converted from {source.dtype} to {made.dtype} again and "
            "again",
            location=op.location,
            op="copy",
            evidence=(
                evidence(
                    "conversions", "1, before the loop", f"{op.calls} of {shape_text(source)}"
                ),
                *(
                    (evidence("converted by", "nobody", f"autocast inside {op.function}"),)
                    if is_autocast
                    else ()
                ),
            ),
            calls=op.calls,
            time_us=op.time_us,
            cost_us=_share_of_repeats(op),
            remedy=(
                f"convert the weights once (model.to(torch.{made.dtype})), or enter autocast once "
                "around the loop"
                if is_autocast
                else ""
            ),
            rank=index.rank_of(op),
        )


def _dequantised(index: TraceIndex) -> Iterator[Hit]:
    products = [op for op in index.trace.ops if op.op_class in ("gemm", "convolution")]
    quantised = {
        d for op in products for f in op.inputs for d in f.origin_dtypes if is_quantised(d)
    }
    for op in index.trace.ops:
        if not op.repeats or op.op_class in ("gemm", "convolution", "attention", "embedding"):
            continue
        source = next((f for f in op.inputs if is_quantised(f.dtype)), None)
        made = next(iter(op.outputs), None)
        # Packed weights are taken apart first: uint8 to uint8, and floats after that.
        if source is None or made is None or source.dtype not in quantised:
            continue
        if source.num_elements < MIN_ELEMENTS:
            continue
        become = "taken apart" if made.dtype == source.dtype else f"turned into {made.dtype}"
        yield Hit(
            title=f"a weight of {source.dtype} {become} at each call, before its product",
            location=op.location,
            op="gemm",
            evidence=(
                evidence(
                    "product",
                    f"a kernel that reads {source.dtype}",
                    f"{op.calls} conversions of {shape_text(source)}",
                ),
            ),
            calls=op.calls,
            time_us=op.time_us,
            cost_us=_share_of_repeats(op),
            rank=index.rank_of(op),
        )


def _constant_copied(index: TraceIndex) -> Iterator[Hit]:
    for op, source, made in _repeated_copies(index):
        if not index.is_repeated(op.calls):
            continue
        # x.clone() is a snapshot, or a model that is copied: what is meant is the copy.
        if source.dtype != made.dtype or (
            bare_name(op.function) == "clone" and source.is_contiguous
        ):
            continue
        how = "laid out anew" if not source.is_contiguous else "copied"
        yield Hit(
            title=f"the same unchanged tensor {how} again",
            location=op.location,
            op="copy",
            evidence=(
                evidence("copies of one tensor", "1", f"{op.repeats} more of {shape_text(source)}"),
            ),
            calls=op.calls,
            time_us=op.time_us,
            cost_us=_share_of_repeats(op),
            rank=index.rank_of(op),
        )


def _mask_again(index: TraceIndex) -> Iterator[Hit]:
    masks = {
        (mask.shape, mask.dtype)
        for _, arguments, _ in attention_calls(index)
        if (mask := arguments.mask) is not None and mask.num_elements >= MIN_ELEMENTS
    }
    for op in index.trace.ops:
        if not op.repeats or op.op_class != "elementwise" or not op.outputs:
            continue
        made = op.outputs[0]
        if (made.shape, made.dtype) in masks and index.is_repeated(op.calls):
            yield Hit(
                title="an attention mask put together again from the same tensors",
                location=op.location,
                op="attention",
                evidence=(
                    evidence("masks of these tensors", "1", f"{op.repeats} more"),
                    evidence("made of", "any", shapes_text(op.inputs[:3])),
                ),
                calls=op.calls,
                time_us=op.time_us,
                cost_us=_share_of_repeats(op),
                rank=index.rank_of(op),
            )


RULES = (
    Rule(
        id="same-product-again",
        gate=GateClass.LOST_FAST_PATH,
        summary="a product, convolution or attention of the very same tensors, unchanged, computed "
        "more than once; advice in training, where checkpointing does so on purpose",
        remedy="compute it once and keep the result",
        check=_same_product,
    ),
    Rule(
        id="cast-each-call",
        gate=GateClass.LOST_FAST_PATH,
        summary="an unchanged tensor, mostly a weight, converted to another float dtype each call",
        remedy="convert it once, when the model is loaded",
        check=_weight_cast,
    ),
    Rule(
        id="dequantised-each-call",
        gate=GateClass.LOST_FAST_PATH,
        summary="a quantised weight (int8, uint8, float8…) turned into floats at each call of its "
        "product",
        remedy="use a product that reads the quantised weight (torch._int_mm, "
        "_weight_int8pack_mm, _scaled_mm, a kernel library), or dequantise once",
        check=_dequantised,
    ),
    Rule(
        id="constant-copied-each-call",
        gate=GateClass.LOST_FAST_PATH,
        summary="an unchanged tensor copied or made contiguous at each call",
        remedy="copy or transpose it once, before the loop and before all that read it",
        check=_constant_copied,
    ),
    Rule(
        id="mask-made-again",
        gate=GateClass.LOST_FAST_PATH,
        summary="an attention mask put together from the same tensors again, mostly layer by layer",
        remedy="make the mask once in a forward pass and hand it to every layer",
        check=_mask_again,
    ),
)
