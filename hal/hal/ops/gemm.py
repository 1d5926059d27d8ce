"""Matrix products: dense and quantised weights, with bias and fused activation; grouped for MoE.

Weights are [N, K] (rows are output features). The gated epilogue computes silu(g) * u, SwiGLU of
https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.errors import RequestError
from hal.ops.formats import DTYPE_BYTES, FORMATS, QuantizedWeight, WeightFormat
from hal.ops.low_precision import round_activations
from hal.ops.request import FLOAT_TOLERANCES, PRODUCT_ERRORS, OpFamily, OpRequest

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
    """One product per expert: rows of x sorted by expert, weight [E, N, K] or one per expert.

    clamp: of a gated epilogue, as in `GatedActivationRequest`: the gate is capped at +c and the
    other half limited to ±c before (0 is none). Raises RequestError for a clamp of nothing gated.
    """

    op: ClassVar[str] = "grouped_gemm"

    num_experts: int
    experts_per_token: int
    n: int
    k: int
    dtype: str
    weight_format: WeightFormat
    epilogue: Epilogue = "none"
    clamp: float = 0.0

    def __post_init__(self) -> None:
        if self.clamp < 0.0 or (self.clamp and self.epilogue != "silu_gated"):
            raise RequestError(
                "grouped_gemm request",
                "clamp >= 0, and 0 unless the epilogue is silu_gated",
                f"clamp={self.clamp}, epilogue={self.epilogue}",
                "correct the request",
            )

    @property
    def out_features(self) -> int:
        return self.n // 2 if self.epilogue == "silu_gated" else self.n


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row: (q int8 [T, K], scale [T, 1]); a zero row has scale 1."""
    import torch

    peak = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(peak > 0, peak / 127.0, torch.ones_like(peak))
    return torch.round(x / scale).clamp(-127, 127).to(torch.int8), scale


def apply_epilogue(epilogue: Epilogue, y: torch.Tensor, clamp: float = 0.0) -> torch.Tensor:
    """The activation on a float32 or float64 product; gated ones halve the last dimension.

    clamp: caps the gate from above and the other half on both sides before; 0 is none.
    """
    import torch.nn.functional as functional

    if epilogue == "silu":
        return functional.silu(y)
    if epilogue == "silu_gated":
        gate, up = y.chunk(2, dim=-1)
        if clamp:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        return functional.silu(gate) * up
    return y


def reference(
    request: GemmRequest,
    *,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Golden product: the exact stored weight values, accumulated in float32.

    With float64 x everything is float64, the result too. Raises ValueError if weight or bias are
    not what the request says.
    """
    import torch

    from hal.ops.formats import torch_dtype

    exact = _exact_weight(request.weight_format, (request.n, request.k), weight)
    if (bias is not None) != request.has_bias:
        raise ValueError(
            f"gemm: required a bias as has_bias={request.has_bias} says, "
            f"found {'none' if bias is None else list(bias.shape)}"
        )
    out_dtype = torch_dtype(request.out_dtype or request.dtype)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = _product(request.weight_format, x, exact)
        if bias is not None:
            y = y + bias.to(y.dtype)
        y = apply_epilogue(request.epilogue, y)
        return y if x.dtype == torch.float64 else y.to(out_dtype)

    return kernel


def _exact_weight(
    weight_format: WeightFormat, shape: tuple[int, int], weight: torch.Tensor | QuantizedWeight
) -> torch.Tensor:
    found = weight.format if isinstance(weight, QuantizedWeight) else None
    # The activation is not part of how a weight is stored: w8 and w8a8 share weights.
    stored = None if found is None else _storage(found)
    wanted = None if weight_format.is_dense else _storage(weight_format)
    if stored != wanted or tuple(weight.shape) != shape:
        raise ValueError(
            f"weight: required {weight_format.name} {list(shape)}, "
            f"found {'dense' if found is None else found.name} {list(weight.shape)}"
        )
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def _storage(f: WeightFormat) -> tuple[object, ...]:
    """How a format stores weights. Integers' scales may come in another float dtype."""
    scale = "" if f.element == "int" else f.scale_dtype
    return f.bits, f.group_size, f.is_symmetric, f.has_zeros, f.element, f.block_n, scale


def _product(weight_format: WeightFormat, x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """x @ exact.T in float32 (float64 if x is), with x rounded first where the format says so."""
    import torch

    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.to(dtype)
    if weight_format.activation == "int8_per_token":
        q, scale = quantize_rows(rows)
        rows = q.to(dtype) * scale
    elif weight_format.activation != "float":
        rows = round_activations(rows, weight_format.activation).to(dtype)
    return rows @ exact.to(dtype).T


def flops(request: GemmRequest, tokens: int) -> float:
    return 2.0 * tokens * request.n * request.k


def bytes_moved(request: GemmRequest, tokens: int) -> float:
    weight = request.weight_format.weight_bytes(request.n, request.k)
    read = tokens * request.k * DTYPE_BYTES[request.dtype]
    written = tokens * request.out_features * DTYPE_BYTES[request.out_dtype or request.dtype]
    bias = request.n * DTYPE_BYTES[request.dtype] if request.has_bias else 0
    return float(weight + bias + read + written)


def grouped_reference(
    request: GroupedGemmRequest, *, weight: torch.Tensor | Sequence[QuantizedWeight]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Golden grouped product: kernel(x[M, K], expert_offsets int64 [E+1]) -> y[M, N].

    Raises ValueError if the weights are not what the request says, or the offsets leave out rows.
    """
    import torch

    shape = (request.n, request.k)
    if len(weight) != request.num_experts:
        raise ValueError(
            f"grouped_gemm: required {request.num_experts} experts, found {len(weight)}"
        )
    exact = [
        _exact_weight(request.weight_format, shape, weight[e]) for e in range(request.num_experts)
    ]

    def kernel(x: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
        offsets = expert_offsets.tolist()
        if offsets[0] != 0 or offsets[-1] != x.shape[0] or len(offsets) != len(exact) + 1:
            raise ValueError(
                f"grouped_gemm: required {len(exact) + 1} offsets from 0 to {x.shape[0]}, "
                f"found {offsets}"
            )
        parts = [
            apply_epilogue(
                request.epilogue,
                _product(request.weight_format, x[offsets[e] : offsets[e + 1]], exact[e]),
                request.clamp,
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
    return _experts_touched(request, tokens) * weight + rows * (request.k + request.out_features)


def stored_bytes(request: GemmRequest) -> int:
    return request.weight_format.weight_bytes(request.n, request.k)


def grouped_stored_bytes(request: GroupedGemmRequest) -> int:
    return request.num_experts * request.weight_format.weight_bytes(request.n, request.k)


FAMILY = OpFamily(
    name="gemm",
    request_type=GemmRequest,
    summary="Matrix product with a dense or quantised weight, bias and fused activation",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    # Operands are multiplied as they are, and the sum is rounded once.
    largest_errors=PRODUCT_ERRORS,
    is_weighted=True,
    weight_bytes=stored_bytes,
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
    weight_bytes=grouped_stored_bytes,
)

__all__ = ["FAMILY", "FORMATS", "GROUPED_FAMILY", "GemmRequest", "GroupedGemmRequest"]
