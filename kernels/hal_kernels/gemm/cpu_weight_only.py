"""Weight-only quantised GEMM by torch's packed CPU kernels: bfloat16 activations.

x is rounded to bfloat16 and so is the result, and the scales are bfloat16: `BFLOAT16_ACTIVATIONS`,
`BFLOAT16_SCALES` (semantics.py) belong into a plan that chooses these. (Both operators take
float32 activations too, through a scalar path 10 times slower.) `cpu_generated` changes nothing.

Limits: int8 needs format int8_channel. int4 needs groups of 32, 64 or 128, symmetric or not, N a
multiple of 16, K a multiple of the group (the operator takes 256 too).
"""

from __future__ import annotations

import torch

from hal.ops.formats import QuantizedWeight
from hal_kernels.gemm.cpu_dense import Kernel, Requirements, activate
from hal_kernels.gemm.jit_panel import PanelEpilogue
from hal_kernels.gemm.semantics import BFLOAT16_ACTIVATIONS, BFLOAT16_SCALES, FOLDED_MINIMUM

INT8PACK_FORMATS = ("int8_channel",)
INT4PACK_FORMATS = (
    "int4_g32", "int4_g32_asym", "int4_g64", "int4_g64_zero", "int4_g128", "int4_g128_zero",
)  # fmt: skip
INT4PACK_N_MULTIPLE = 16

INT8PACK_NOTES = (BFLOAT16_ACTIVATIONS, BFLOAT16_SCALES)
INT4PACK_NOTES = (BFLOAT16_ACTIVATIONS, BFLOAT16_SCALES, FOLDED_MINIMUM)


def int8pack_requirements() -> Requirements:
    """Why torch's int8 weight-only product cannot run here; empty if it can."""
    return _missing_operators("_weight_int8pack_mm")


def int4pack_requirements() -> Requirements:
    """Why torch's int4 weight-only product cannot run here; empty if it can."""
    return _missing_operators("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")


def bind_int8pack(
    weight: QuantizedWeight, bias: torch.Tensor | None = None, epilogue: PanelEpilogue = "none"
) -> Kernel:
    """kernel(x[T, K] float32 or bfloat16) -> y[T, N] (gated: [T, N/2]) in x's dtype.

    Raises:
        ValueError: a format other than int8_channel.
    """
    _check_format(weight, INT8PACK_FORMATS)
    data = weight.data.contiguous()
    scale = weight.scale.view(-1).to(torch.bfloat16)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = torch._weight_int8pack_mm(x.to(torch.bfloat16), data, scale).to(x.dtype)
        return activate(epilogue, y if bias is None else y + bias)

    return kernel


def bind_int4pack(
    weight: QuantizedWeight, bias: torch.Tensor | None = None, epilogue: PanelEpilogue = "none"
) -> Kernel:
    """kernel(x[T, K] float32 or bfloat16) -> y[T, N] (gated: [T, N/2]) in x's dtype.

    The operator's value is (q - 8) * scale + zero: zero is 0 for symmetric formats, minimum +
    8 * scale where a minimum is added, and (8 - minimum) * scale where it is a zero point.

    Raises:
        ValueError: another format, or N not a multiple of 16.
    """
    _check_format(weight, INT4PACK_FORMATS)
    n, k = weight.shape
    if n % INT4PACK_N_MULTIPLE:
        raise ValueError(f"int4 GEMM: required N a multiple of {INT4PACK_N_MULTIPLE}, found {n}")
    group = weight.format.group_size or k
    values = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).view(n, k).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    scale = weight.scale.float()
    zero = torch.zeros_like(scale)
    if weight.minimum is not None:
        offset = weight.minimum.float()
        zero = (8 - offset) * scale if weight.format.has_zeros else offset + 8 * scale
    scale_and_zero = torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous().bfloat16()
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = multiply(x.to(torch.bfloat16), packed, group, scale_and_zero).to(x.dtype)
        return activate(epilogue, y if bias is None else y + bias)

    return kernel


def _missing_operators(*names: str) -> Requirements:
    missing = [name for name in names if not hasattr(torch.ops.aten, name)]
    return [("torch operator", f"aten::{name}", "not registered") for name in missing]


def _check_format(weight: QuantizedWeight, formats: tuple[str, ...]) -> None:
    if weight.format.name not in formats:
        raise ValueError(
            f"weight-only GEMM: required a format of {formats}, found {weight.format.name!r}"
        )
