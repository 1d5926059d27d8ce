"""Rules for calls of torch's attention: which kernel really ran, and what excluded the others."""

from __future__ import annotations

from collections.abc import Iterator

from hal.auditing.document import Evidence
from hal.auditing.gates import GateClass
from hal.auditing.rules.facts import MIN_ELEMENTS, shape_text
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.sdpa_backends import (
    FUSED_BY_DEVICE,
    AttentionArguments,
    Backend,
    arguments_of,
    backend_of,
    exclusions,
)
from hal.auditing.rules.trace_index import TraceIndex
from hal.auditing.trace import FunctionCall

SDPA = "scaled_dot_product_attention"


def attention_calls(
    index: TraceIndex,
) -> Iterator[tuple[FunctionCall, AttentionArguments, Backend]]:
    """Calls of torch's attention with what decided and the backend that ran."""
    for call in index.functions.get(SDPA, []):
        arguments = arguments_of(call, index.trace.machine.arch)
        if arguments is not None:
            yield call, arguments, backend_of(call.leaves)


def _shapes(arguments: AttentionArguments) -> str:
    return f"q {shape_text(arguments.query)}, k {list(arguments.key.shape)}"


def _math_path(index: TraceIndex) -> Iterator[Hit]:
    for call, arguments, backend in attention_calls(index):
        if backend != "math":
            continue
        if not (arguments.query.num_elements and arguments.key.num_elements):
            continue  # torch takes this path for no values at all: there is nothing to lose
        reasons: list[Evidence] = []
        for fused in FUSED_BY_DEVICE.get(arguments.query.device, ()):
            found = exclusions(fused, arguments)
            unknown = evidence(f"{fused}: not used", "a reason known here", "none found")
            reasons += found.sure or found.doubtful or [unknown]
        seen = evidence("kernel that ran", "a fused attention kernel", f"math ({_leaves(call)})")
        first = reasons[0] if reasons else seen
        yield Hit(
            title=f"attention ran as separate products and softmax (SDPA math path): {first.what} "
            f"required {first.required}, found {first.found}",
            location=call.location,
            op="attention",
            evidence=(*reasons, seen, evidence("arguments", "any", _shapes(arguments))),
            calls=call.calls,
            time_us=call.time_us,
            remedy=_math_remedy(reasons),
            rank=index.rank_of(call),
        )


_MATH_REMEDIES = (
    ("dropout_p", "pass dropout_p=0.0 when not training"),
    ("attn_mask.requires_grad", "detach the mask, or add a learnt bias with flex_attention"),
    ("shape of attn_mask", "give the mask the broadcast shape that the fused kernel takes"),
    ("torch setting", "enable the fused kernels again (sdpa_kernel, enable_flash_sdp)"),
    ("dtype", "run attention in bfloat16, float16 or float32, q, k and v alike"),
    ("stride", "lay q, k and v out so that head_dim is contiguous"),
    ("heads", "pass enable_gqa=True, with heads of k and v that divide those of q"),
    ("dimensions", "give q, k and v four dimensions [batch, heads, length, head_dim]"),
    ("layout", "pad to dense tensors, or run on a device whose fused kernels take nested ones"),
    ("head_dim", "choose a head_dim that the fused kernels take, or pad q, k and v to one"),
    ("batch", "expand k and v to the batch of q"),
)  # fmt: skip


def _math_remedy(reasons: list[Evidence]) -> str:
    """What to change for the reasons that can be changed; "" for none known."""
    found = [text for word, text in _MATH_REMEDIES if any(word in r.what for r in reasons)]
    return "; ".join(found[:2])


def _second_best(index: TraceIndex) -> Iterator[Hit]:
    for call, arguments, backend in attention_calls(index):
        if backend != "efficient" or arguments.query.device != "cuda":
            continue
        reasons = exclusions("flash", arguments).sure
        if reasons:
            yield Hit(
                title=f"the memory-efficient kernel ran and not flash attention: {reasons[0].what}"
                f" required {reasons[0].required}, found {reasons[0].found}",
                location=call.location,
                op="attention",
                evidence=tuple(reasons),
                calls=call.calls,
                time_us=call.time_us,
                rank=index.rank_of(call),
            )


def _needless_mask(index: TraceIndex) -> Iterator[Hit]:
    for call, arguments, _ in attention_calls(index):
        mask = arguments.mask
        if mask is None or not mask.pattern or mask.num_elements < MIN_ELEMENTS:
            continue
        if mask.requires_grad:
            continue  # learnt: it will not stay what it is
        lengths = (arguments.query.shape[-2], arguments.key.shape[-2])
        is_causal = mask.pattern == "causal" and lengths[0] == lengths[1]
        if not is_causal and mask.pattern != "all-true":
            continue
        instead = "is_causal=True" if is_causal else "no mask"
        kind = "a lower triangle" if is_causal else "true everywhere"
        yield Hit(
            title=f"an attention mask that is {kind}: {instead} says the same and is faster",
            location=call.location,
            op="attention",
            evidence=(
                evidence("attn_mask", instead, f"{shape_text(mask)}, {kind}"),
                evidence("arguments", "any", _shapes(arguments)),
            ),
            calls=call.calls,
            time_us=call.time_us,
            remedy=f"pass {instead} instead of attn_mask",
            rank=index.rank_of(call),
        )


def _not_seen(index: TraceIndex) -> Iterator[Hit]:
    for call, arguments, backend in attention_calls(index):
        if backend == "unknown" and call.calls:
            yield Hit(
                title="attention whose kernel nobody saw",
                location=call.location,
                op="attention",
                evidence=(
                    evidence("ops inside", "a fused kernel, or products", _leaves(call)),
                    evidence("arguments", "any", _shapes(arguments)),
                ),
                calls=call.calls,
                time_us=call.time_us,
                rank=index.rank_of(call),
            )


def _leaves(call: FunctionCall) -> str:
    return ", ".join(sorted(call.leaves))[:120] or "none"


def _leaf_by_shape(index: TraceIndex) -> Iterator[Hit]:
    by_place: dict[tuple[str, int, int], list[tuple[FunctionCall, AttentionArguments, Backend]]]
    by_place = {}
    for call, arguments, backend in attention_calls(index):
        if call.location is not None and backend != "unknown":
            key = (call.location.file, call.location.line, call.rank)
            by_place.setdefault(key, []).append((call, arguments, backend))
    for group in by_place.values():
        backends = sorted({backend for _, _, backend in group})
        slow = [(call, arguments) for call, arguments, backend in group if backend == "math"]
        if len(backends) < 2 or not slow:
            continue
        fast = next(entry for entry in group if entry[2] != "math")
        for call, arguments in slow:
            yield Hit(
                title="one line of attention ends in different kernels, by its arguments: "
                + ", ".join(backends),
                location=call.location,
                op="attention",
                evidence=(
                    evidence("kernel", f"{fast[2]}, as for {_shapes(fast[1])}", "math"),
                    evidence("arguments", "any", _shapes(arguments)),
                ),
                calls=call.calls,
                time_us=call.time_us,
                rank=index.rank_of(call),
            )


RULES = (
    Rule(
        id="sdpa-math-path",
        gate=GateClass.LOST_FAST_PATH,
        summary="`scaled_dot_product_attention` ran as separate products and softmax; the evidence "
        "is each constraint that excluded each fused kernel",
        remedy="change the arguments that exclude the fused kernels",
        check=_math_path,
    ),
    Rule(
        id="sdpa-second-best",
        gate=GateClass.ADVICE,
        summary="the memory-efficient kernel ran where flash attention was excluded",
        remedy="use float16 or bfloat16, is_causal instead of a mask, head_dim of at most 256",
        check=_second_best,
    ),
    Rule(
        id="sdpa-needless-mask",
        gate=GateClass.LOST_FAST_PATH,
        summary="an attention mask that is true everywhere, or a lower triangle where `is_causal` "
        "would do",
        remedy="pass no mask, or is_causal=True",
        check=_needless_mask,
    ),
    Rule(
        id="attention-not-seen",
        gate=GateClass.UNVERIFIED,
        summary="a call of `scaled_dot_product_attention` in which no kernel was seen",
        remedy="audit a part of the program that runs on tensors of torch's own",
        check=_not_seen,
    ),
    Rule(
        id="leaf-by-arguments",
        gate=GateClass.LEAF_MISMATCH,
        summary="one line of attention that ends in a fused kernel for some arguments and in the "
        "math path for others",
        remedy="make the arguments of the slower calls like those of the faster ones",
        check=_leaf_by_shape,
    ),
)
