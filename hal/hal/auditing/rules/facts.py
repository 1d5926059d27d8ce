"""Facts of observed ops that several rules ask for: operands of products, widths of dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from hal.auditing.rules.trace_index import bare_name
from hal.auditing.trace import FunctionCall, ObservedOp, TensorFact

FLOAT_BITS: Final[Mapping[str, int]] = {
    "float64": 64,
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
}
QUANTISED_DTYPES: Final = frozenset(
    {"int8", "uint8", "int4", "uint4", "quint8", "qint8", "quint4x2", "uint16", "int16"}
)
MIN_ELEMENTS: Final = 1024
"""Tensors smaller than this are not worth a finding of their own: a copy of one costs less than
the call that makes it."""

COPY_NAMES: Final = frozenset({"_to_copy", "clone", "copy_", "contiguous", "to"})
SOFTMAX_NAMES: Final = frozenset({"_softmax", "softmax", "_safe_softmax", "special_softmax"})
# Products whose first input is what is added to the product.
_ADDING = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "sspaddmm"})


def operands(op: ObservedOp) -> tuple[TensorFact, TensorFact] | None:
    """The two factors of a product; None if it has not two tensors."""
    inputs = op.inputs[1:] if bare_name(op.name) in _ADDING else op.inputs
    return (inputs[0], inputs[1]) if len(inputs) >= 2 else None


def is_quantised(dtype: str) -> bool:
    """Whether a dtype is one that weights are quantised to."""
    return dtype in QUANTISED_DTYPES or dtype.startswith(("float8", "float4"))


def narrower_origins(fact: TensorFact) -> list[str]:
    """Floating dtypes narrower than the tensor's own that it was made from, narrowest first."""
    own = FLOAT_BITS.get(fact.dtype, 0)
    found = [d for d in fact.origin_dtypes if FLOAT_BITS.get(d, 64) < own]
    return sorted(found, key=lambda dtype: (FLOAT_BITS[dtype], dtype))


def is_inside_attention(op: ObservedOp) -> bool:
    """Whether an op is a part of torch's own attention function."""
    return op.function == "scaled_dot_product_attention"


def tensors(arguments: Mapping[str, Any]) -> list[TensorFact]:
    """The tensors among a call's arguments, lists of them too."""
    found: list[TensorFact] = []
    for value in arguments.values():
        if isinstance(value, TensorFact):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, TensorFact)]
    return found


def first_argument(call: FunctionCall) -> TensorFact | None:
    """The first tensor of a call, however its parameter is called."""
    found = tensors(call.arguments)
    return found[0] if found else None


def shape_text(fact: TensorFact) -> str:
    """ "float32[2, 8, 64]"."""
    return f"{fact.dtype}{list(fact.shape)}"


def shapes_text(facts: Iterable[TensorFact]) -> str:
    return ", ".join(shape_text(fact) for fact in facts)


def time_of(ops: Iterable[ObservedOp]) -> float:
    """µs, summed."""
    return sum(op.time_us for op in ops)


def calls_of(ops: Iterable[ObservedOp]) -> int:
    return sum(op.calls for op in ops)
