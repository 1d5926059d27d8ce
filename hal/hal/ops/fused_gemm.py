"""A matrix product with what follows it in the same store: clamped gate, residual, rounding to FP8.

The op `gemm` with one more step each that another op would make of its result: saved is the way of
the result through memory, and a rounding of it. What is stored is rounded once, from float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hal.ops import gemm
from hal.ops.checks import one_of, require
from hal.ops.formats import DTYPE_BYTES, QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal.ops.low_precision import quantize_groups
from hal.ops.request import FLOAT_TOLERANCES, PRODUCT_ERRORS, OpFamily, Tolerance

if TYPE_CHECKING:
    import torch

_EIGHT_BITS = ("fp8_e4m3fn", "fp8_e4m3fnuz")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGemmRequest(GemmRequest):
    """As `GemmRequest`: x[T, K] @ weight[N, K].T (+ bias) -> epilogue -> (+ residual) -> y.

    clamp: of a gated epilogue, as in `GatedActivationRequest`: the gate is capped at +c and the
    other half limited to ±c before (0 is none). has_residual: a tensor [T, out_features] of the
    activations' dtype is added. out_group_size: y is stored in `out_dtype`, an FP8 type, with a
    scale per row and so many columns, as the op `quantize` does (0: y is not rounded further);
    out_scale_dtype: of these scales, ue8m0 as uint8 codes.

    Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "fused_gemm"

    clamp: float = 0.0
    has_residual: bool = False
    out_group_size: int = 0
    out_scale_dtype: Literal["float32", "ue8m0"] = "float32"

    def __post_init__(self) -> None:
        group, is_rounded = self.out_group_size, self.out_dtype in _EIGHT_BITS
        require(
            "fused_gemm request",
            one_of("out_scale_dtype", self.out_scale_dtype, ("float32", "ue8m0")),
            ("clamp >= 0", self.clamp, self.clamp >= 0.0),
            (
                "no clamp unless the epilogue is silu_gated",
                self.clamp,
                not self.clamp or self.epilogue == "silu_gated",
            ),
            ("out_group_size >= 0", group, group >= 0),
            (
                f"an out_group_size above 0 for one of {', '.join(_EIGHT_BITS)}, and only there",
                f"{group} for out_dtype {self.out_dtype or self.dtype}",
                bool(group) == is_rounded,
            ),
            (
                f"output features a multiple of out_group_size {group}",
                self.out_features,
                not group or self.out_features % group == 0,
            ),
        )

    def product(self) -> GemmRequest:
        """The product with its bias and epilogue alone, not clamped and not rounded further."""
        return GemmRequest(
            phase=self.phase,
            tokens=self.tokens,
            graph_mode=self.graph_mode,
            n=self.n,
            k=self.k,
            dtype=self.dtype,
            weight_format=self.weight_format,
            has_bias=self.has_bias,
            epilogue=self.epilogue,
            out_dtype="" if self.out_group_size else self.out_dtype,
        )


def reference(
    request: FusedGemmRequest,
    *,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
) -> Callable[..., Any]:
    """Golden: kernel(x[T, K], residual) -> y, or (values, scales) of a rounded result.

    As the golden product, all in float32 (float64 where x is, and then the scales follow from the
    same values in float32). Raises ValueError as it does, and for a residual that the request does
    not name, or the reverse.
    """
    import torch

    from hal.ops.formats import torch_dtype

    out_dtype = torch.float32
    if not request.out_group_size:
        out_dtype = torch_dtype(request.out_dtype or request.dtype)
    exact = dataclasses.replace(request.product(), epilogue="none", out_dtype="float32")
    product = gemm.reference(exact, weight=weight, bias=bias)

    def kernel(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        check_residual(request, residual)
        y = gemm.apply_epilogue(request.epilogue, product(x), request.clamp)
        if residual is not None:
            y = y + residual.to(y.dtype)
        if request.out_group_size:
            return quantize_groups(
                y.to(torch.float32),
                group_size=request.out_group_size,
                element=request.out_dtype,
                scale_kind=request.out_scale_dtype,
            )
        return y if x.dtype == torch.float64 else y.to(out_dtype)

    return kernel


def check_residual(request: FusedGemmRequest, residual: torch.Tensor | None) -> None:
    """Raises ValueError for a residual that the request does not name, or the reverse."""
    if (residual is not None) != request.has_residual:
        raise ValueError(
            f"fused_gemm: required a residual as has_residual={request.has_residual} says, "
            f"found {'none' if residual is None else list(residual.shape)}"
        )


def flops(request: FusedGemmRequest, tokens: int) -> float:
    return gemm.flops(request.product(), tokens)


def bytes_moved(request: FusedGemmRequest, tokens: int) -> float:
    """Of the product, with the residual's rows, and with the eight-bit rows and their scales."""
    product = request.product()
    total = gemm.bytes_moved(product, tokens)
    wide = DTYPE_BYTES[request.dtype]
    if request.has_residual:
        total += tokens * request.out_features * wide
    if request.out_group_size:
        scale = 4 if request.out_scale_dtype == "float32" else 1
        groups = request.out_features // request.out_group_size
        total += tokens * (request.out_features * (1 - wide) + groups * scale)
    return total


def stored_bytes(request: FusedGemmRequest) -> int:
    return gemm.stored_bytes(request)


FAMILY = OpFamily(
    name="fused_gemm",
    request_type=FusedGemmRequest,
    summary="Matrix product with a clamped gate, a residual or rounding to FP8 in its store",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances={
        **FLOAT_TOLERANCES,
        # Of the decoded values in units of their scale: one step, for a tie to the other side.
        "fp8_e4m3fn": Tolerance(2.0**-3, 2.0**-9),
        "fp8_e4m3fnuz": Tolerance(2.0**-3, 2.0**-10),
    },
    # Operands are multiplied as they are, and the sum is rounded once.
    largest_errors=PRODUCT_ERRORS,
    is_weighted=True,
    weight_bytes=stored_bytes,
)
