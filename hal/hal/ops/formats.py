"""Number formats: dtype names; formats and quantised weights are imported from here by everyone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hal.ops.quantized_weight import QuantizedWeight, quantize_weight
from hal.ops.weight_formats import FORMATS, ActivationRounding, Element, WeightFormat

if TYPE_CHECKING:
    import torch

DType = Literal[
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "int8",
    "uint8",
    "int32",
    "int64",
]

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises KeyError for a name that is not a `DType`."""
    import torch

    if name not in DTYPE_BYTES:
        raise KeyError(f"formats: required one of {sorted(DTYPE_BYTES)}, found {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


__all__ = [
    "DTYPE_BYTES",
    "FORMATS",
    "ActivationRounding",
    "DType",
    "Element",
    "QuantizedWeight",
    "WeightFormat",
    "quantize_weight",
    "torch_dtype",
]
