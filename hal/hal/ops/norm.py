"""Root-mean-square norm (https://arxiv.org/abs/1910.07467), with residual add and int8 rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hal.ops.formats import DTYPE_BYTES
from hal.ops.gemm import quantize_rows
from hal.ops.request import FLOAT_TOLERANCES, LARGEST_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormRequest(OpRequest):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last `hidden_size` values.

    rows_per_token: norms per token (heads, for a norm over each head). has_residual: x is first
    added into the residual, which is returned too. quantize: y as (int8 rows, scales).
    """

    op: ClassVar[str] = "norm.rms"

    hidden_size: int
    dtype: str
    rows_per_token: int = 1
    has_residual: bool = False
    quantize: Literal["none", "int8_per_token"] = "none"


def reference(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Callable[..., Any]:
    """Golden norm in float32 (float64 if x is)."""
    import torch

    def norm(x: torch.Tensor) -> Any:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = torch.unflatten(x.to(dtype), -1, (-1, request.hidden_size))
        y = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps) * weight.to(dtype)
        y = y.flatten(-2)
        return quantize_rows(y) if request.quantize != "none" else y.to(x.dtype)

    def norm_residual(x: torch.Tensor, residual: torch.Tensor) -> Any:
        total = x + residual
        return norm(total), total

    return norm_residual if request.has_residual else norm


def flops(request: RmsNormRequest, tokens: int) -> float:
    per_value = 5.0 if request.has_residual else 4.0
    return per_value * tokens * request.rows_per_token * request.hidden_size


def bytes_moved(request: RmsNormRequest, tokens: int) -> float:
    values = tokens * request.rows_per_token * request.hidden_size
    width = DTYPE_BYTES[request.dtype]
    passes = 3 if request.has_residual else 1
    # int8 rows have one scale of the arithmetic's width, float32.
    written = values * width if request.quantize == "none" else values + tokens * 4
    return float(values * passes * width + request.hidden_size * width + written)


FAMILY = OpFamily(
    name="norm.rms",
    request_type=RmsNormRequest,
    summary="Root-mean-square norm, with residual add and quantisation",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    largest_errors={**LARGEST_ERRORS, "float32": 2e-6},
)
