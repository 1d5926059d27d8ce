"""Rules for attention that does not go through torch's attention, and for what surrounds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hal.auditing.document import Location
from hal.auditing.gates import GateClass
from hal.auditing.rules.attention import attention_calls
from hal.auditing.rules.facts import (
    FLOAT_BITS,
    MIN_ELEMENTS,
    SOFTMAX_NAMES,
    is_inside_attention,
    operands,
    shape_text,
    time_of,
)
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex, bare_name
from hal.auditing.trace import ObservedOp, TensorFact


@dataclass(frozen=True, slots=True)
class WrittenAttention:
    """softmax(q @ k) @ v, found as three ops of one function. scores: [..., length, length]."""

    scores: ObservedOp
    softmax: ObservedOp
    result: ObservedOp

    @property
    def location(self) -> Location | None:
        return self.softmax.location

    @property
    def head_dim(self) -> int:
        pair = operands(self.scores)
        return pair[0].shape[-1] if pair else 0


def written_attention(index: TraceIndex) -> Iterator[WrittenAttention]:
    """Attention written by hand: softmax over the result of a product of two activations, and a
    product with the outcome, in one function."""
    for ops in index.by_frame.values():
        own = [op for op in ops if not is_inside_attention(op)]
        products = [op for op in own if op.op_class == "gemm" and op.outputs]
        for softmax in own:
            if bare_name(softmax.name) not in SOFTMAX_NAMES or not softmax.inputs:
                continue
            scores = softmax.inputs[0]
            first = next((op for op in products if _makes(op, scores)), None)
            second = next((op for op in products if _takes(op, scores) and op is not first), None)
            if first is not None and second is not None:
                yield WrittenAttention(first, softmax, second)


def _makes(op: ObservedOp, scores: TensorFact) -> bool:
    pair = operands(op)
    if pair is None or any(f.is_constant and len(f.shape) < 3 for f in pair):
        return False
    return _is_same(op.outputs[0], scores)


def _takes(op: ObservedOp, scores: TensorFact) -> bool:
    pair = operands(op)
    if pair is None or (pair[1].is_constant and len(pair[1].shape) < 3):
        return False
    return _is_same(pair[0], scores)


def _is_same(fact: TensorFact, scores: TensorFact) -> bool:
    """Whether two tensors are one but for how their leading dimensions are folded."""
    return fact.num_elements == scores.num_elements and fact.shape[-2:] == scores.shape[-2:]


def _by_hand(index: TraceIndex) -> Iterator[Hit]:
    for found in written_attention(index):
        parts = (found.scores, found.softmax, found.result)
        scores = found.softmax.inputs[0]
        yield Hit(
            title="attention written by hand: product, softmax and product in one function, with "
            "the scores of all pairs in memory",
            location=found.location,
            op="attention",
            evidence=(
                evidence(
                    "ops", "one fused attention", ", ".join(bare_name(op.name) for op in parts)
                ),
                evidence("scores in memory", "none", shape_text(scores)),
            ),
            calls=found.softmax.calls,
            time_us=time_of(parts),
            rank=index.rank_of(found.softmax),
        )


def _branching_wrapper(index: TraceIndex) -> Iterator[Hit]:
    """A function that calls fused attention for some head_dims, and its own for others."""
    fused: dict[tuple[str, str], set[int]] = {}
    for call, arguments, backend in attention_calls(index):
        if call.location is not None and backend not in ("math", "unknown"):
            key = (call.location.file, call.location.function)
            fused.setdefault(key, set()).add(arguments.query.shape[-1])
    for found in written_attention(index):
        if found.location is None or found.location.function == "<module>":
            continue  # lines of a script are no wrapper
        dims = fused.get((found.location.file, found.location.function), set())
        if dims and found.head_dim not in dims:
            yield Hit(
                title=f"{found.location.function} ends in a fused kernel or in attention by hand, "
                "depending on head_dim",
                location=found.location,
                op="attention",
                evidence=(
                    evidence("head_dim", f"one of {sorted(dims)}, which are fused", found.head_dim),
                ),
                calls=found.softmax.calls,
                time_us=time_of((found.scores, found.softmax, found.result)),
                rank=index.rank_of(found.softmax),
            )


_MASKED_ON_CUDA = (
    "on CUDA flash attention takes grouped heads, but not with a mask: leave the mask out "
    "(is_causal, sequences without padding) and pass enable_gqa=True, or use flex_attention"
)


def _expanded_heads(index: TraceIndex) -> Iterator[Hit]:
    keys: dict[tuple[int, ...], str] = {}
    for _, arguments, _ in attention_calls(index):
        is_masked = arguments.mask is not None and arguments.query.device == "cuda"
        if is_masked or arguments.key.shape not in keys:
            keys[arguments.key.shape] = _MASKED_ON_CUDA if is_masked else ""
    for op in index.trace.ops:
        if is_inside_attention(op) or not op.inputs or not op.outputs:
            continue
        groups = _groups_of_copy(op.inputs[0], op.outputs[0], bare_name(op.name), set(keys))
        if groups < 2 or op.outputs[0].num_elements < MIN_ELEMENTS:
            continue
        yield Hit(
            title=f"heads of keys and values are copied {groups} times before attention, which can "
            "share them",
            location=op.location,
            op="copy",
            evidence=(
                evidence(
                    "heads of k and v",
                    "as they are, with enable_gqa=True",
                    f"each copied {groups} times: {shape_text(op.outputs[0])}",
                ),
            ),
            calls=op.calls,
            time_us=op.time_us,
            cost_us=op.time_us,
            remedy=keys.get(_folded(op.outputs[0].shape), ""),
            rank=index.rank_of(op),
        )


def _folded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[batch, heads, length, head_dim] of heads that are still apart in groups."""
    return (shape[0], shape[1] * shape[2], *shape[3:]) if len(shape) == 5 else shape


def _groups_of_copy(
    source: TensorFact, made: TensorFact, name: str, keys: set[tuple[int, ...]]
) -> int:
    """How many times heads were repeated to the keys of an attention call; 0 if they were not."""
    if name in ("clone", "_unsafe_view", "copy_") and len(source.shape) == 5:
        batch, heads, groups, length, dim = source.shape
        is_key = (batch, heads * groups, length, dim) in keys
        return groups if is_key and not source.is_contiguous else 0
    if name in ("repeat_interleave", "index_select", "repeat") and made.shape in keys:
        is_heads = len(source.shape) == 4 and source.shape[2:] == made.shape[2:]
        return made.shape[1] // max(1, source.shape[1]) if is_heads else 0
    return 0


def _softmax_upcast(index: TraceIndex) -> Iterator[Hit]:
    for found in written_attention(index):
        scores = found.softmax.inputs[0]
        narrow = sorted(d for d in scores.origin_dtypes if FLOAT_BITS.get(d) == 16)
        if scores.dtype == "float32" and narrow:
            yield Hit(
                title=f"softmax of attention in float32 from {narrow[0]}: a fused kernel does so "
                "without writing the scores",
                location=found.location,
                op="attention",
                evidence=(evidence("dtype of scores", narrow[0], scores.dtype),),
                calls=found.softmax.calls,
                time_us=found.softmax.time_us,
                rank=index.rank_of(found.softmax),
            )


RULES = (
    Rule(
        id="attention-by-hand",
        gate=GateClass.LOST_FAST_PATH,
        summary="product, softmax and product in one function: attention that no fused kernel sees",
        remedy="call torch.nn.functional.scaled_dot_product_attention (MultiheadAttention: "
        "need_weights=False)",
        check=_by_hand,
    ),
    Rule(
        id="wrapper-branches-by-head-dim",
        gate=GateClass.LEAF_MISMATCH,
        summary="one function that ends in a fused kernel for some head_dims and in attention by "
        "hand for others",
        remedy="let the fused kernel take every head_dim that it supports, or refuse the others",
        check=_branching_wrapper,
    ),
    Rule(
        id="kv-heads-expanded",
        gate=GateClass.LOST_FAST_PATH,
        summary="keys and values copied to as many heads as there are queries, before attention",
        remedy="pass enable_gqa=True and the heads as they are",
        check=_expanded_heads,
    ),
    Rule(
        id="softmax-upcast",
        gate=GateClass.ADVICE,
        summary="softmax of attention by hand in float32 while its inputs are 16-bit",
        remedy="a fused attention kernel accumulates in float32 by itself",
        check=_softmax_upcast,
    ),
)
