"""Products of two activations: index scores, mixed streams, attention that a model writes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.checks import require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedGemmRequest(OpRequest):
    """a [..., M, K] @ b [..., K, N] -> [..., M, N], as torch.matmul broadcasts, or an equation of
    two operands as torch.einsum reads it.

    n, k: 0 where they differ from call to call; context_tokens is what estimates take for them. A
    call's number of tokens is that of rows of the result. Raises RequestError for negative sizes.
    """

    op: ClassVar[str] = "batched_gemm"

    n: int
    k: int
    dtype: str
    equation: str = ""
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        require("batched_gemm request", ("n, k >= 0", (self.n, self.k), min(self.n, self.k) >= 0))


def reference(request: BatchedGemmRequest) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Golden product in float32 (float64 for float64 inputs)."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        import torch

        dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
        wide = (a.to(dtype), b.to(dtype))
        y: torch.Tensor
        y = torch.einsum(request.equation, *wide) if request.equation else torch.matmul(*wide)
        return y.to(a.dtype)

    return kernel


def _sizes(request: BatchedGemmRequest) -> tuple[int, int]:
    return request.n or request.context_tokens, request.k or request.context_tokens


def flops(request: BatchedGemmRequest, tokens: int) -> float:
    n, k = _sizes(request)
    return 2.0 * tokens * n * k


def bytes_moved(request: BatchedGemmRequest, tokens: int) -> float:
    """One b for all rows: how many there are differs from call to call."""
    n, k = _sizes(request)
    return float((tokens * (n + k) + n * k) * DTYPE_BYTES[request.dtype])


FAMILY = OpFamily(
    name="batched_gemm",
    request_type=BatchedGemmRequest,
    summary="Batched product of two activations",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
