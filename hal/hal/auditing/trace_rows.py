"""Rows of a program's report: one per line, op class and implementation, with its tier and bound.

The tier of an observed op is decided here, by what can be told from a trace:

- native: torch's fused attention; a product, convolution or collective by the device's own library
  in the number format of its data.
- portable: the same work by something slower: the math path of attention; float64 or float32 made
  from something narrower; a CPU op in a program that runs on an accelerator; a collective of
  accelerator tensors through the host.
- unknown: everything else. What a single elementwise kernel could be, nothing here can say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hal.auditing.document import Location, Row
from hal.auditing.rules.attention import SDPA
from hal.auditing.rules.facts import narrower_origins, operands, shape_text
from hal.auditing.rules.sdpa_backends import backend_of
from hal.auditing.rules.trace_index import HOST_DEVICES, TraceIndex, bare_name
from hal.auditing.trace import ObservedOp, TensorFact, Trace

_Key = tuple[str, int, str, str, str, str]

_MAX_ARGUMENTS = 90
_RATED: Final = frozenset({"gemm", "convolution", "attention"})
"""Classes whose tier a trace can tell."""


def rows_of(trace: Trace) -> list[Row]:
    """Rows, dearest first. Parts of one call of torch's attention are one row of attention."""
    index = TraceIndex(trace)
    groups: dict[_Key, list[ObservedOp]] = {}
    for op in trace.ops:
        groups.setdefault(_key(index, op), []).append(op)
    rows = [_row(index, key, ops) for key, ops in groups.items()]
    return sorted(rows, key=lambda row: (-(row.time_us or 0.0), row.op, row.implementation))


def _key(index: TraceIndex, op: ObservedOp) -> _Key:
    place = op.location or Location(file="", line=0)
    is_attention = op.function == SDPA
    return (
        place.file,
        place.line,
        "attention" if is_attention else op.op_class,
        _implementation(index, op),
        op.region,
        tier_of(index, op),
    )


def _implementation(index: TraceIndex, op: ObservedOp) -> str:
    if op.function != SDPA:
        return op.name
    return f"sdpa: {_backend(index, op)}"


def _backend(index: TraceIndex, op: ObservedOp) -> str:
    """Backend of the attention call that an op is a part of."""
    functions = index.trace.functions
    if op.call is not None and 0 <= op.call < len(functions):
        return backend_of(functions[op.call].leaves)
    return backend_of([op.name])


def tier_of(index: TraceIndex, op: ObservedOp) -> str:
    """ "native", "portable" or "unknown", by the rule in this file's docstring."""
    facts = (*op.inputs, *op.outputs)
    is_host = bool(facts) and all(fact.device in HOST_DEVICES for fact in facts)
    if index.accelerators and is_host and op.op_class in _RATED:
        return "portable"
    if op.function == SDPA or op.op_class == "attention":
        backend = _backend(index, op)
        return {"math": "portable", "unknown": "unknown"}.get(backend, "native")
    if op.op_class == "collective":
        is_gloo = "gloo" in str(op.values.get("backend", ""))
        return "portable" if is_gloo and not is_host else "native"
    if op.op_class not in _RATED:
        return "unknown"
    pair = operands(op)
    if pair is None:
        return "unknown"
    return "portable" if any(narrower_origins(fact) for fact in pair) else "native"


def _row(index: TraceIndex, key: _Key, ops: list[ObservedOp]) -> Row:
    _, _, op_class, implementation, _, tier = key
    worst = max(ops, key=lambda op: (op.time_us, op.calls))
    flops, moved = sum(op.flops for op in ops), sum(op.bytes for op in ops)
    bound = bound_us(index, worst, flops, moved)
    return Row(
        op=op_class,
        arguments=_arguments(ops, worst),
        implementation=implementation,
        tier=tier,
        calls=_calls(index, ops),
        flops=flops,
        bytes=moved,
        time_us=max(0.0, sum(op.time_us for op in ops)),
        bound_us=bound[0] if bound else None,
        bound_by=bound[1] if bound else None,
        location=worst.location,
    )


def _calls(index: TraceIndex, ops: list[ObservedOp]) -> int:
    """Calls of the op, or of the attention function that the ops are parts of."""
    if ops[0].function != SDPA:
        return sum(op.calls for op in ops)
    functions = index.trace.functions
    numbers = {op.call for op in ops if op.call is not None and 0 <= op.call < len(functions)}
    if numbers:
        return sum(functions[number].calls for number in numbers)
    return max(op.calls for op in ops)


def _arguments(ops: list[ObservedOp], worst: ObservedOp) -> str:
    text = _shapes(worst.inputs)
    others = len({tuple(fact.shape for fact in op.inputs) for op in ops}) - 1
    is_one_op = len({bare_name(op.name) for op in ops}) == 1
    return text + (f" and {others} more" if others and is_one_op else "")


def _shapes(facts: Iterable[TensorFact]) -> str:
    text = ", ".join(shape_text(fact) for fact in list(facts)[:4])
    return text if len(text) <= _MAX_ARGUMENTS else text[: _MAX_ARGUMENTS - 1] + "…"


def bound_us(
    index: TraceIndex, op: ObservedOp, flops: float, moved: float
) -> tuple[float, str] | None:
    """Roofline time of all calls in µs and what sets it, on the rates of the machine; None where
    one that is needed is not known."""
    bandwidth = index.trace.machine.memory_bandwidth
    if not bandwidth or op.op_class == "collective":
        return None
    memory = moved / bandwidth * 1e6
    if not flops:
        return memory, "memory"
    dtype = op.inputs[-1].dtype if op.inputs else "float32"
    rate = index.rate(dtype)
    if rate is None:
        return None
    compute = flops / rate * 1e6
    return (memory, "memory") if memory >= compute else (compute, "compute")
