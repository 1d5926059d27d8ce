"""Matrix products: dense and quantised weights, with bias and fused activation; grouped for MoE.

Weights are [N, K] (rows are output features). The gated epilogue computes silu(g) * u, SwiGLU of
https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.formats import DTYPE_BYTES, FORMATS, QuantizedWeight, WeightFormat
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

Epilogue = Literal["none", "silu", "silu_gated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRequest(OpRequest):
    """x[T, K] @ weight[N, K].T (+ bias) -> epilogue -> y[T, N], or y[T, N/2] when gated."""

    op: ClassVar[str] = "gemm"

    n: int
    k: int
    dtype: str  # of x and y
    weight_format: WeightFormat
    has_bias: bool = False
    epilogue: Epilogue = "none"
    out_dtype: str = ""  # "" is dtype

    @property
    def out_features(self) -> int:
        return self.n // 2 if self.epilogue == "silu_gated" else self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemmRequest(OpRequest):
    """One product per expert: rows of x sorted by expert, weight [E, N, K]."""

    op: ClassVar[str] = "grouped_gemm"

    num_experts: int
    experts_per_token: int
    n: int
    k: int
    dtype: str
    weight_format: WeightFormat
    epilogue: Epilogue = "none"


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row: (q int8 [T, K], scale [T, 1]); a zero row has scale 1."""
    import torch

    peak = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(peak > 0, peak / 127.0, torch.ones_like(peak))
    return torch.round(x / scale).clamp(-127, 127).to(torch.int8), scale


def apply_epilogue(epilogue: Epilogue, y: torch.Tensor) -> torch.Tensor:
    """The activation on a float32 or float64 product; gated ones halve the last dimension."""
    import torch.nn.functional as functional

    if epilogue == "silu":
        return functional.silu(y)
    if epilogue == "silu_gated":
        gate, up = y.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return y


def reference(
    request: GemmRequest,
    *,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Golden product: the exact stored weight values, accumulated in float32 (float64 if x is)."""
    import torch

    from hal.ops.formats import torch_dtype

    exact = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    rounds = request.weight_format.activation == "int8_per_token"
    out_dtype = torch_dtype(request.out_dtype or request.dtype)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = x.to(dtype)
        if rounds:
            q, scale = quantize_rows(rows)
            rows = q.to(dtype) * scale
        y = rows @ exact.to(dtype).T
        if bias is not None:
            y = y + bias.to(dtype)
        return apply_epilogue(request.epilogue, y).to(out_dtype if x.dtype != dtype else dtype)

    return kernel


def flops(request: GemmRequest, tokens: int) -> float:
    return 2.0 * tokens * request.n * request.k


def bytes_moved(request: GemmRequest, tokens: int) -> float:
    weight = request.weight_format.weight_bytes(request.n, request.k)
    width = DTYPE_BYTES[request.dtype]
    return weight + tokens * width * (request.k + request.out_features)


def grouped_reference(
    request: GroupedGemmRequest, *, weight: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Golden grouped product: kernel(x[M, K], expert_offsets int64 [E+1]) -> y[M, N]."""
    import torch

    def kernel(x: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        offsets = expert_offsets.tolist()
        parts = [
            apply_epilogue(
                request.epilogue, x[offsets[e] : offsets[e + 1]].to(dtype) @ weight[e].to(dtype).T
            )
            for e in range(request.num_experts)
        ]
        return torch.cat(parts).to(x.dtype)

    return kernel


def _experts_touched(request: GroupedGemmRequest, tokens: int) -> float:
    """Expected number of distinct experts that a batch reads, with uniform routing."""
    miss = 1.0 - request.experts_per_token / request.num_experts
    return float(request.num_experts * (1.0 - miss**tokens))


def grouped_flops(request: GroupedGemmRequest, tokens: int) -> float:
    return 2.0 * tokens * request.experts_per_token * request.n * request.k


def grouped_bytes_moved(request: GroupedGemmRequest, tokens: int) -> float:
    weight = request.weight_format.weight_bytes(request.n, request.k)
    rows = tokens * request.experts_per_token * DTYPE_BYTES[request.dtype]
    return _experts_touched(request, tokens) * weight + rows * (request.k + request.n)


FAMILY = OpFamily(
    name="gemm",
    request_type=GemmRequest,
    summary="Matrix product with a dense or quantised weight, bias and fused activation",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    is_weighted=True,
)

GROUPED_FAMILY = OpFamily(
    name="grouped_gemm",
    request_type=GroupedGemmRequest,
    summary="One matrix product per expert (mixture of experts)",
    reference=grouped_reference,
    flops=grouped_flops,
    bytes_moved=grouped_bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    is_weighted=True,
)

__all__ = ["FAMILY", "FORMATS", "GROUPED_FAMILY", "GemmRequest", "GroupedGemmRequest"]
