"""The sums of an observer as `ObservedOp`s and `FunctionCall`s."""

from __future__ import annotations

from typing import Any

from hal.auditing.observer import Observer
from hal.auditing.observer_facts import Fact, plain, tensor_fact
from hal.auditing.observer_sums import FunctionEntry, OpEntry, ThreadSums
from hal.auditing.trace import FunctionCall, ObservedOp, SwallowedError, Trace


def fill_trace(trace: Trace, observer: Observer) -> None:
    """Adds what all threads did; each function call gets its number in `trace.functions`."""
    rank = observer.rank or 0
    numbers: dict[int, int] = {}
    for sums in list(observer.threads):
        for entry in list(sums.functions.values()):
            numbers[id(entry)] = len(trace.functions)
            trace.functions.append(_function_call(observer, entry, rank))
        for op in list(sums.ops.values()):
            call = None if op.function is None else numbers.get(id(op.function))
            trace.ops.append(_observed_op(observer, sums, op, call, rank))
    trace.settings.update(observer.settings.seen)
    for (kind, text, raised_by, location), calls in observer.errors.items():
        trace.swallowed.append(
            SwallowedError(
                kind=kind, text=text, raised_by=raised_by, location=location, calls=calls
            )
        )


def _function_call(observer: Observer, entry: FunctionEntry, rank: int) -> FunctionCall:
    stack = observer.frames.locations(entry.stack)
    return FunctionCall(
        name=entry.name,
        arguments={name: _argument(value) for name, value in entry.arguments},
        location=stack[0] if stack else None,
        stack=stack,
        leaves=dict(entry.leaves),
        module=entry.module,
        settings=dict(entry.settings or ()),
        rank=rank,
        calls=entry.calls,
        time_us=entry.time_ns / 1e3,
    )


def _observed_op(
    observer: Observer, sums: ThreadSums, op: OpEntry, call: int | None, rank: int
) -> ObservedOp:
    stack = observer.frames.locations(op.stack)
    return ObservedOp(
        name=op.name,
        op_class=op.op_class,
        inputs=tuple(tensor_fact(fact) for fact in op.inputs),
        outputs=tuple(tensor_fact(fact) for fact in op.outputs),
        values={name: _json(value) for name, value in op.values},
        location=stack[0] if stack else None,
        stack=stack,
        function="" if op.function is None else op.function.name,
        call=call,
        region=op.region,
        thread=sums.name,
        rank=rank,
        calls=op.calls,
        time_us=op.time_ns / 1e3,
        flops=op.flops * op.calls,
        bytes=op.bytes * op.calls,
        repeats=op.repeats,
        shared_inputs=op.shared_inputs,
    )


def _argument(value: Any) -> Any:
    kind, content = value
    if kind == "tensor":
        return tensor_fact(content)
    if kind == "tensors":
        return [_argument(part) if _is_fact(part) else _json(part) for part in content]
    return _json(content)


def _is_fact(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], Fact)


def _json(value: Any) -> Any:
    return [_json(part) for part in value] if isinstance(value, tuple) else plain(value)
