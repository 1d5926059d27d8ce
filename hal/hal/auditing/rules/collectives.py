"""Rules for collectives and for ranks of one group."""

from __future__ import annotations

from collections.abc import Iterator

from hal.auditing.document import Location
from hal.auditing.gates import GateClass
from hal.auditing.rules.attention import SDPA, attention_calls
from hal.auditing.rules.facts import calls_of, shapes_text, time_of
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import HOST_DEVICES, Place, TraceIndex, bare_name, place_of
from hal.auditing.trace import ObservedOp

SMALL_BYTES = 1 << 20
"""A collective of less than a MiB costs its latency and not its bytes."""
MANY_A_STEP = 8

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
_NO_WORK = frozenset({"barrier", "wait", "wait_tensor", "monitored_barrier_", "barrier_"})


def _collectives(index: TraceIndex) -> list[ObservedOp]:
    found = [op for op in index.trace.ops if op.op_class == "collective"]
    return [op for op in found if bare_name(op.name) not in _NO_WORK]


def _through_host(index: TraceIndex) -> Iterator[Hit]:
    for op in _collectives(index):
        facts = op.inputs or op.outputs
        came_from = {device for fact in facts for device in fact.origin_devices} - HOST_DEVICES
        on_device = {fact.device for fact in facts} - HOST_DEVICES
        backend = str(op.values.get("backend", ""))
        is_gloo = bool(on_device) and "gloo" in backend
        if not is_gloo and not (came_from and not on_device):
            continue
        device = min(on_device or came_from)
        yield Hit(
            title=f"a collective of {device} tensors goes through the host",
            location=op.location,
            op="collective",
            evidence=(
                evidence("backend", f"one of {device}", backend or "tensors copied to the cpu"),
                evidence("tensors", device, shapes_text(facts[:2])),
            ),
            calls=op.calls,
            time_us=op.time_us,
            rank=index.rank_of(op),
        )


def _one_by_one(index: TraceIndex) -> Iterator[Hit]:
    groups: dict[tuple[Place, int], list[ObservedOp]] = {}
    for op in _collectives(index):
        groups.setdefault((place_of(op.location), op.rank), []).append(op)
    for ops in groups.values():
        small = [op for op in ops if _bytes_of(op) < SMALL_BYTES]
        per_step = calls_of(small) / index.num_steps
        if per_step < MANY_A_STEP:
            continue
        yield Hit(
            title=f"{per_step:.0f} small collectives a step from one line",
            location=ops[0].location,
            op="collective",
            evidence=(
                evidence("collectives a step", "a few of whole buckets", f"{per_step:.0f}"),
                evidence(
                    "size", f"≥ {SMALL_BYTES} bytes", f"at most {max(map(_bytes_of, small))} bytes"
                ),
            ),
            calls=calls_of(small),
            time_us=time_of(small),
        )


def _bytes_of(op: ObservedOp) -> int:
    facts = op.inputs or op.outputs
    return sum(fact.num_elements * _BYTES.get(fact.dtype, 1) for fact in facts)


def _disagreement(index: TraceIndex) -> Iterator[Hit]:
    """Ranks whose calls of one line end in different kernels or number formats."""
    seen: dict[tuple[Place, str], dict[int, set[str]]] = {}
    lines: dict[Place, Location | None] = {}
    time_us: dict[Place, float] = {}
    calls: dict[Place, int] = {}
    for call, arguments, backend in attention_calls(index):
        place = place_of(call.location)
        leaf = f"attention by {backend} in {arguments.query.dtype}"
        seen.setdefault((place, SDPA), {}).setdefault(call.rank, set()).add(leaf)
        lines[place] = call.location
        time_us[place] = time_us.get(place, 0.0) + call.time_us
        calls[place] = calls.get(place, 0) + call.calls
    for op in index.trace.ops:
        if op.op_class not in ("gemm", "convolution") or not op.inputs:
            continue
        if op.function == SDPA:
            continue
        place = place_of(op.location)
        leaf = f"{op.op_class} in {op.inputs[-1].dtype}"
        seen.setdefault((place, op.op_class), {}).setdefault(op.rank, set()).add(leaf)
        lines[place] = op.location
        time_us[place] = time_us.get(place, 0.0) + op.time_us
        calls[place] = calls.get(place, 0) + op.calls
    for (place, what), by_rank in seen.items():
        if len(by_rank) < 2 or len({frozenset(leaves) for leaves in by_rank.values()}) < 2:
            continue
        first = min(by_rank)
        found = [
            evidence(
                f"rank {rank}",
                f"as rank {first}: {', '.join(sorted(by_rank[first]))}",
                ", ".join(sorted(leaves)),
            )
            for rank, leaves in sorted(by_rank.items())
            if leaves != by_rank[first]
        ]
        yield Hit(
            title="ranks of one group run this line with different kernels",
            location=lines[place],
            op="attention" if what == SDPA else what,
            evidence=tuple(found),
            calls=calls[place],
            time_us=time_us[place],
        )


RULES = (
    Rule(
        id="collective-through-host",
        gate=GateClass.LOST_FAST_PATH,
        summary="a collective of accelerator tensors by gloo, or of copies of them on the CPU",
        remedy="initialise the process group with the accelerator's own backend (nccl, rccl, hccl)",
        check=_through_host,
    ),
    Rule(
        id="collectives-one-by-one",
        gate=GateClass.LOST_FAST_PATH,
        summary="eight or more collectives of less than a MiB a step from one line",
        remedy="put the tensors into one flat bucket, or use DistributedDataParallel, which does",
        check=_one_by_one,
    ),
    Rule(
        id="ranks-disagree",
        gate=GateClass.LEAF_MISMATCH,
        summary="ranks of one process group end in different kernels or number formats at one line",
        remedy="give every rank the same packages, settings, dtypes and shapes",
        check=_disagreement,
    ),
)
