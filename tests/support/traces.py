"""Traces written by hand, for rules: ops and calls of a program that nobody ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hal.auditing.document import Finding, Location, Machine
from hal.auditing.gates import GateClass
from hal.auditing.rules import judge
from hal.auditing.trace import FunctionCall, ObservedOp, TensorFact, Trace

CPU = Machine(label="a CPU", device_id="cpu:0", arch="x86_64_v4")
HOPPER = Machine(
    label="a GPU",
    device_id="cuda:0",
    arch="sm_90",
    peak_flops={"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
    memory_bandwidth=3.35e12,
)


def line(number: int, function: str = "forward", file: str = "model.py") -> Location:
    return Location(file=file, line=number, function=function)


def tensor(*shape: int, dtype: str = "float32", device: str = "cpu", **facts: Any) -> TensorFact:
    """A tensor made from nothing but itself; origins are added to its own dtype and device."""
    dtypes = frozenset({dtype, *facts.pop("made_from", ())})
    devices = frozenset({device, *facts.pop("came_from", ())})
    return TensorFact(
        shape=shape,
        dtype=dtype,
        device=device,
        origin_dtypes=dtypes,
        origin_devices=devices,
        **facts,
    )


_CLASSES = {
    "mm": "gemm",
    "bmm": "gemm",
    "addmm": "gemm",
    "convolution": "convolution",
    "all_reduce_": "collective",
    "_softmax": "activation",
    "clone": "copy",
    "_to_copy": "copy",
    "copy_": "copy",
    "cat": "copy",
    "index": "copy",
    "index_select": "copy",
    "sum": "reduction",
    "_local_scalar_dense": "copy",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
}


def op(
    name: str,
    inputs: Sequence[TensorFact],
    output: TensorFact | None = None,
    *,
    at: Location | None = None,
    calls: int = 4,
    **facts: Any,
) -> ObservedOp:
    """An op of torch's dispatcher, 10 µs a call."""
    return ObservedOp(
        name=f"aten::{name}",
        op_class=facts.pop("op_class", _CLASSES.get(name, "elementwise")),
        inputs=tuple(inputs),
        outputs=() if output is None else (output,),
        location=at or line(10),
        calls=calls,
        time_us=facts.pop("time_us", 10.0 * calls),
        **facts,
    )


def product(a: TensorFact, b: TensorFact, **facts: Any) -> ObservedOp:
    """a [m, k] times b [k, n] at 1 GFLOP a call."""
    result = dataclasses.replace(a, shape=(*a.shape[:-1], b.shape[-1]), origin_dtypes=frozenset())
    calls = facts.get("calls", 4)
    return op("mm", [a, b], result, flops=facts.pop("flops", 1e9 * calls), **facts)


def attention(
    query: TensorFact,
    key: TensorFact | None = None,
    value: TensorFact | None = None,
    *,
    leaf: str = "aten::_scaled_dot_product_attention_math",
    at: Location | None = None,
    settings: dict[str, str] | None = None,
    rank: int = 0,
    calls: int = 4,
    **arguments: Any,
) -> FunctionCall:
    """A call of torch's attention; keys and values are as queries by default."""
    key = query if key is None else key
    return FunctionCall(
        name="scaled_dot_product_attention",
        arguments={"query": query, "key": key, "value": value or key, **arguments},
        location=at or line(20),
        leaves={leaf: calls},
        settings=settings or {},
        rank=rank,
        calls=calls,
        time_us=50.0 * calls,
    )


def call(
    name: str, at: Location | None = None, *, calls: int = 4, **arguments: Any
) -> FunctionCall:
    """A call of another torch function."""
    settings = arguments.pop("settings", {})
    return FunctionCall(
        name=name,
        arguments=arguments,
        location=at or line(30),
        settings=settings,
        calls=calls,
        time_us=5.0 * calls,
    )


def trace(
    *ops: ObservedOp,
    functions: Sequence[FunctionCall] = (),
    machine: Machine = CPU,
    **facts: Any,
) -> Trace:
    return Trace(machine=machine, ops=list(ops), functions=list(functions), **facts)


def findings(seen: Trace, rule: str) -> list[Finding]:
    """What one rule finds in a trace."""
    return [finding for finding in judge(seen) if finding.rule == rule]


def only(seen: Trace, rule: str) -> Finding:
    """The one finding of a rule."""
    found = findings(seen, rule)
    assert len(found) == 1, [f.title for f in judge(seen)]
    return found[0]


def gated(seen: Trace) -> list[str]:
    """Rules with findings that a gate can fail on."""
    return [f.rule for f in judge(seen) if f.gate is not GateClass.ADVICE]
