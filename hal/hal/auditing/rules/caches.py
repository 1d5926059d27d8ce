"""Rules for caches of keys and values that are copied as a whole at each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hal.auditing.gates import GateClass
from hal.auditing.rules.facts import FLOAT_BITS, MIN_ELEMENTS, calls_of, shape_text, time_of
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import Place, TraceIndex, place_of
from hal.auditing.trace import ObservedOp

MIN_GROWTHS = 4
"""So many lengths of one concatenation are growth, and not a few batches of different size."""


def _growing_cat(index: TraceIndex) -> Iterator[Hit]:
    pairs = [op for op in index.by_op_name.get("cat", []) if len(op.inputs) == 2]
    for ops in _by_line(op for op in pairs if len(op.inputs[0].shape) >= 3):
        ops.sort(key=lambda op: op.inputs[0].num_elements)
        grown = [op for op in ops if op.inputs[0].num_elements > op.inputs[1].num_elements]
        sizes = {op.outputs[0].num_elements for op in grown if op.outputs}
        largest = ops[-1].inputs[0]
        is_float = largest.dtype in FLOAT_BITS
        if len(sizes) < MIN_GROWTHS or not is_float or largest.num_elements < MIN_ELEMENTS:
            continue
        yield Hit(
            title="a cache that grows by concatenation: each step copies all that was there before",
            location=ops[-1].location,
            op="copy",
            evidence=(
                evidence("bytes moved", "those of the new part", "those of the whole, each step"),
                evidence(
                    "largest",
                    shape_text(ops[-1].inputs[1]),
                    f"{shape_text(largest)}, grown in {len(sizes)} steps",
                ),
            ),
            calls=calls_of(ops),
            time_us=time_of(ops),
            rank=index.rank_of(ops[-1]),
        )


def _reordered(index: TraceIndex) -> Iterator[Hit]:
    """Beam search that sorts the rows of its caches: every row is copied, also one that stays."""
    names = ("index_select", "index")
    picks = [op for name in names for op in index.by_op_name.get(name, []) if _keeps_shape(op)]
    for ops in _by_line(picks):
        steps = _longest_growth({op.inputs[0].shape for op in ops})
        largest = max(ops, key=lambda op: op.inputs[0].num_elements)
        is_large = largest.inputs[0].num_elements >= MIN_ELEMENTS
        # Data that is shuffled comes in any size; a cache grows by one position at a time.
        if steps < MIN_GROWTHS or not is_large:
            continue
        yield Hit(
            title="a cache whose rows are put in another order: each step copies all of it",
            location=largest.location,
            op="copy",
            evidence=(
                evidence("copied", "indices of rows", f"{shape_text(largest.inputs[0])}, whole"),
                evidence("lengths seen", "any", f"grown in {steps} steps"),
            ),
            calls=calls_of(ops),
            time_us=time_of(ops),
            rank=index.rank_of(largest),
        )


def _longest_growth(shapes: set[tuple[int, ...]]) -> int:
    """How many of the shapes follow each other, one dimension larger by 1 each time."""
    longest = 0
    for shape in shapes:
        for dim, size in enumerate(shape):
            count = 1
            while (*shape[:dim], size + count, *shape[dim + 1 :]) in shapes:
                count += 1
            longest = max(longest, count)
    return longest


def _keeps_shape(op: ObservedOp) -> bool:
    if not op.inputs or not op.outputs:
        return False
    source = op.inputs[0]
    is_cache = source.dtype in FLOAT_BITS and len(source.shape) >= 3 and not source.is_constant
    return is_cache and op.outputs[0].shape == source.shape


def _by_line(ops: Iterable[ObservedOp]) -> list[list[ObservedOp]]:
    groups: dict[tuple[Place, int], list[ObservedOp]] = {}
    for op in ops:
        groups.setdefault((place_of(op.location), op.rank), []).append(op)
    return list(groups.values())


RULES = (
    Rule(
        id="kv-cache-concatenated",
        gate=GateClass.LOST_FAST_PATH,
        summary="a tensor that grows by torch.cat at one line, step by step",
        remedy="allocate the cache once for the longest sequence and write into it",
        check=_growing_cat,
    ),
    Rule(
        id="kv-cache-reordered",
        gate=GateClass.LOST_FAST_PATH,
        summary="a growing tensor whose rows are all copied into another order, step by step: "
        "beam search on a cache",
        remedy="keep the rows in place and read them through a table of indices; leave out what "
        "all beams of a sequence share, as the keys and values of an encoder",
        check=_reordered,
    ),
)
