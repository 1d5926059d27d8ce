"""A matrix product, the addition of its result into the residual and the norm, as one call.

What `gemm` and `norm.rms` with a residual do one after the other between two sublayers of a decoder
on one rank; a kernel that adds the residual where it stores the product writes and reads the sum in
memory once less. Same meaning as `fused_gemm` with a residual and `norm.rms` without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.errors import RequestError
from hal.ops import fused_gemm, gemm, norm
from hal.ops.formats import QuantizedWeight
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import FLOAT_TOLERANCES, PRODUCT_ERRORS, OpFamily

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmNormRequest(GemmRequest):
    """residual += x[T, K] @ weight[N, K].T (+ bias); y = residual / rms(residual) * norm_weight.

    Raises RequestError for an epilogue or a dtype of its own for the result.
    """

    op: ClassVar[str] = "gemm_norm"

    def __post_init__(self) -> None:
        if self.epilogue != "none" or self.out_dtype:
            raise RequestError(
                "gemm_norm request",
                "epilogue='none' and out_dtype=''",
                f"epilogue={self.epilogue!r}, out_dtype={self.out_dtype!r}",
                "correct the request",
            )

    def fused(self) -> FusedGemmRequest:
        """Its first half as a request of its own."""
        return FusedGemmRequest(
            phase=self.phase,
            tokens=self.tokens,
            graph_mode=self.graph_mode,
            n=self.n,
            k=self.k,
            dtype=self.dtype,
            weight_format=self.weight_format,
            has_bias=self.has_bias,
            has_residual=True,
        )

    def norm(self) -> RmsNormRequest:
        """Its second half as a request of its own."""
        return RmsNormRequest(
            hidden_size=self.n, dtype=self.dtype, tokens=self.tokens, graph_mode=self.graph_mode
        )


def reference(
    request: GemmNormRequest,
    *,
    weight: torch.Tensor | QuantizedWeight,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """kernel(x[T, K], residual[T, N]) -> (y, residual), by the two references. The new residual is
    rounded once, from float32. Raises ValueError as they do."""
    add = fused_gemm.reference(request.fused(), weight=weight, bias=bias)
    norm_of = norm.reference(request.norm(), weight=norm_weight, eps=eps)

    def gemm_norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = add(x, residual)
        return norm_of(total), total

    return gemm_norm


def flops(request: GemmNormRequest, tokens: int) -> float:
    return gemm.flops(request, tokens) + norm.flops(request.norm(), tokens)


def bytes_moved(request: GemmNormRequest, tokens: int) -> float:
    parts = fused_gemm.bytes_moved(request.fused(), tokens)
    return parts + norm.bytes_moved(request.norm(), tokens)


# The weight is counted where it is used as a product of its own, as that of `attention_projection`.
FAMILY = OpFamily(
    name="gemm_norm",
    request_type=GemmNormRequest,
    summary="Matrix product, addition into the residual and root-mean-square norm as one call",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    # Operands are multiplied as they are, and the sum is rounded once.
    largest_errors=PRODUCT_ERRORS,
    is_weighted=True,
)
