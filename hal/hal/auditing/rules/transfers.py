"""Rules for data that leaves its device, or torch, in the middle of the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hal.auditing.gates import GateClass
from hal.auditing.rules.facts import (
    COPY_NAMES,
    MIN_ELEMENTS,
    first_argument,
    shape_text,
    shapes_text,
)
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import HOST_DEVICES, TraceIndex, bare_name, place_of
from hal.auditing.trace import FunctionCall

SCALARS_IN_A_LOOP = 64
"""So many reads of single values at one line and in one step are a loop over elements."""
_SCALAR_READS = ("item", "__float__", "__int__", "__bool__", "__index__")
_WORK = ("gemm", "attention", "convolution", "norm", "activation", "elementwise", "reduction")


def _cpu_ops(index: TraceIndex) -> Iterator[Hit]:
    if not index.accelerators:
        return
    accelerator = min(index.accelerators)
    for op in index.trace.ops:
        facts = (*op.inputs, *op.outputs)
        if op.op_class not in _WORK or not facts:
            continue
        is_host = all(fact.device in HOST_DEVICES for fact in facts)
        largest = max(fact.num_elements for fact in facts)
        came_from = {d for fact in op.inputs for d in fact.origin_devices} - HOST_DEVICES
        # What sets up a model runs on the host once: only work of each step counts.
        is_stepwise = index.is_repeated(op.calls) or bool(came_from)
        if is_host and is_stepwise and largest >= MIN_ELEMENTS:
            yield Hit(
                title=f"{bare_name(op.name)} on the CPU in a program that runs on {accelerator}",
                location=op.location,
                op=op.op_class,
                evidence=(
                    evidence("device", accelerator, "cpu"),
                    evidence("arguments", "any", shapes_text(op.inputs[:3])),
                ),
                calls=op.calls,
                time_us=op.time_us,
                rank=index.rank_of(op),
            )


def _device_copies(index: TraceIndex) -> Iterator[Hit]:
    for op in index.trace.ops:
        if bare_name(op.name) not in COPY_NAMES or not op.inputs or not op.outputs:
            continue
        source, made = op.inputs[-1], op.outputs[0]
        if bare_name(op.name) != "copy_":
            source = op.inputs[0]
        is_crossing = (source.device in HOST_DEVICES) != (made.device in HOST_DEVICES)
        is_large = made.num_elements >= MIN_ELEMENTS
        if not is_crossing or not is_large or not index.is_repeated(op.calls):
            continue
        # Inputs have to come from the host; what comes back, or comes again, need not.
        if made.device not in HOST_DEVICES and not op.repeats and not source.is_constant:
            continue
        yield Hit(
            title=f"copied from {source.device} to {made.device} at each step",
            location=op.location,
            op="copy",
            evidence=(
                evidence("copies between devices", "none", f"{op.calls} of {shape_text(source)}"),
            ),
            calls=op.calls,
            time_us=op.time_us,
            cost_us=op.time_us,
            rank=index.rank_of(op),
        )


def _numpy(index: TraceIndex) -> Iterator[Hit]:
    for name in ("numpy", "__array__"):
        for calls in _by_line(index.functions.get(name, [])):
            total = sum(call.calls for call in calls)
            fact = first_argument(calls[-1])
            if not index.is_repeated(total) or fact is None or fact.num_elements < MIN_ELEMENTS:
                continue
            yield replace(
                _left_torch(index, calls, "numpy arrays", shape_text(fact)),
                gate=GateClass.ADVICE if _is_result(index, calls) else None,
            )


def _is_result(index: TraceIndex, calls: list[FunctionCall]) -> bool:
    """Whether a program that has modules takes tensors out of torch outside of all of them: what
    they computed, as far as anybody can tell."""
    return index.trace.steps > 0 and not any(call.module for call in calls)


def _lists(index: TraceIndex) -> Iterator[Hit]:
    for calls in _by_line(index.functions.get("tolist", [])):
        fact = first_argument(calls[-1])
        if fact is not None and fact.num_elements >= MIN_ELEMENTS:
            yield _left_torch(index, calls, "Python lists", shape_text(fact))
    for name in _SCALAR_READS:
        for calls in _by_line(index.functions.get(name, [])):
            per_step = sum(call.calls for call in calls) / index.num_steps
            if per_step >= SCALARS_IN_A_LOOP:
                yield _left_torch(index, calls, "Python numbers", f"{per_step:.0f} values a step")


def _by_line(calls: list[FunctionCall]) -> list[list[FunctionCall]]:
    groups: dict[tuple[str, int], list[FunctionCall]] = {}
    for call in calls:
        groups.setdefault(place_of(call.location), []).append(call)
    return list(groups.values())


def _left_torch(index: TraceIndex, calls: list[FunctionCall], into: str, found: str) -> Hit:
    total = sum(call.calls for call in calls)
    return Hit(
        title=f"tensors become {into} in the loop",
        location=calls[-1].location,
        op="copy",
        evidence=(evidence("data in torch", "all of it", f"{found}, {total} times"),),
        calls=total,
        time_us=sum(call.time_us for call in calls),
        rank=index.rank_of(calls[-1]),
    )


def _host_reads(index: TraceIndex) -> Iterator[Hit]:
    """Single values read from an accelerator: each waits until all work before it is done."""
    for op in index.by_op_name.get("_local_scalar_dense", []):
        is_waiting = any(fact.device not in HOST_DEVICES for fact in op.inputs)
        if is_waiting and index.is_repeated(op.calls):
            yield Hit(
                title="a value read from the accelerator at each step: the host waits for it",
                location=op.location,
                op="copy",
                evidence=(evidence("values read in the loop", "none", f"{op.calls}"),),
                calls=op.calls,
                time_us=op.time_us,
                rank=index.rank_of(op),
            )


RULES = (
    Rule(
        id="cpu-op",
        gate=GateClass.LOST_FAST_PATH,
        summary="work on the CPU, each step or on data of the accelerator, in a program that runs "
        "on one",
        remedy="create the tensors on the accelerator, and leave out .cpu()",
        check=_cpu_ops,
    ),
    Rule(
        id="device-copy",
        gate=GateClass.LOST_FAST_PATH,
        summary="data that goes back to the host at each step, or weights that come from it again",
        remedy="keep the data where it is computed; load weights once",
        check=_device_copies,
    ),
    Rule(
        id="numpy-in-the-loop",
        gate=GateClass.UNVERIFIED,
        summary="tensors turned into numpy arrays each step: what happens to them there no audit "
        "of torch sees; advice outside of modules",
        remedy="write that part in torch; nothing is lost if only results leave",
        check=_numpy,
    ),
    Rule(
        id="python-values-in-the-loop",
        gate=GateClass.LOST_FAST_PATH,
        summary="tensors read element by element into Python: tolist() of a large one, or many "
        "item() a step",
        remedy="write that part with tensor ops",
        check=_lists,
    ),
    Rule(
        id="host-waits",
        gate=GateClass.LOST_FAST_PATH,
        summary="a single value read from an accelerator at each step",
        remedy="keep the decision on the device (torch.where), or read it every so many steps",
        check=_host_reads,
    ),
)
