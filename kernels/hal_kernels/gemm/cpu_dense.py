"""Dense GEMM on the CPU by torch: MKL through F.linear, and oneDNN with a packed weight.

Limits: weight float32 or bfloat16 [N, K], x of the same dtype. bfloat16 is only worth choosing on
a CPU with a bfloat16 unit (`bfloat16_requirements`); elsewhere it is emulated, 5 to 10 times
slower than float32. MKL's packed weights (torch.ops.mkl) serve one fixed number of rows and use
F.linear for any other, so they are no candidate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional

from hal_kernels.gemm.isa import cpu_flags
from hal_kernels.gemm.jit_panel import PanelEpilogue

Kernel = Callable[[torch.Tensor], torch.Tensor]
Requirements = list[tuple[str, str, str]]

DTYPES = (torch.float32, torch.bfloat16)


def linear_requirements() -> Requirements:
    """F.linear runs everywhere."""
    return []


def onednn_requirements() -> Requirements:
    """Why the packed oneDNN product cannot run: (what, required, found); empty if it can."""
    if not torch._C._has_mkldnn:
        return [("torch build", "with oneDNN (mkldnn)", "without it")]
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return [("torch operator", "mkldnn::_linear_pointwise", "not registered")]
    return []


def bfloat16_requirements() -> Requirements:
    """Why bfloat16 products are emulated here; empty where the CPU has a unit for them."""
    if {"avx512bf16", "amx-bf16"} & cpu_flags():
        return []
    return [("cpu flags", "avx512bf16 or amx-bf16", "neither")]


def bind_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, epilogue: PanelEpilogue = "none"
) -> Kernel:
    """kernel(x[T, K]) -> y[T, N] (gated: [T, N/2]) by torch.nn.functional.linear."""
    weight = weight.contiguous()
    if epilogue == "none":
        return lambda x: functional.linear(x, weight, bias)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return activate(epilogue, functional.linear(x, weight, bias))

    return kernel


def bind_onednn(
    weight: torch.Tensor, bias: torch.Tensor | None = None, epilogue: PanelEpilogue = "none"
) -> Kernel:
    """kernel(x[T, K]) -> y[T, N] (gated: [T, N/2]) by oneDNN, weight in its blocked layout.

    silu is fused into the product; silu_gated is two products, silu fused into the first and the
    multiplication into the second.

    Raises:
        ValueError: a dtype other than float32 and bfloat16.
    """
    if weight.dtype not in DTYPES:
        raise ValueError(f"oneDNN GEMM: required a weight of {DTYPES}, found {weight.dtype}")
    linear = torch.ops.mkldnn._linear_pointwise
    activation = "none" if epilogue == "none" else "swish"
    if epilogue != "silu_gated":
        packed = _reorder(weight)

        def kernel(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = linear(x, packed, bias, activation, [], "")
            return y

        return kernel
    gate_weight, up_weight = (_reorder(part) for part in weight.chunk(2))
    gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate = linear(x, gate_weight, gate_bias, activation, [], "")
        y: torch.Tensor = linear.binary(x, gate, up_weight, up_bias, "mul")
        return y

    return gated


def activate(epilogue: PanelEpilogue, y: torch.Tensor) -> torch.Tensor:
    """The epilogue as separate torch operators; gated: gate columns, then up columns."""
    if epilogue == "silu_gated":
        gate, up = y.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
    return functional.silu(y) if epilogue == "silu" else y


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    # The layout chosen for a typical batch of a decode step; it serves any number of rows.
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return packed
