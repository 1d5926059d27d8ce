"""Root-mean-square norm, with residual add, and the rounding of its rows for the product behind it.

What `norm.rms` and `quantize` do one after the other before a product in eight bits: the normed
rows are rounded where they are made, once and from float32. They are stored in the activations'
dtype too only where something else reads them (a router, an indexer's weights).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hal.ops import norm
from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.low_precision import quantize_groups
from hal.ops.norm import RmsNormRequest
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest, Tolerance

if TYPE_CHECKING:
    import torch

EIGHT_BITS = ("fp8_e4m3fn", "fp8_e4m3fnuz", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormQuantizeRequest(OpRequest):
    """y = x / sqrt(mean(x^2) + eps) * weight over rows of `hidden_size`, then y in eight bits.

    has_residual: x is first added into the residual, which is returned too. keeps_rows: y in the
    activations' dtype is returned too. group_size: values that share a scale, 0 for one scale a
    row; scale_dtype as in `QuantizeRequest`, ue8m0 as uint8 codes.

    Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "norm_quantize"

    hidden_size: int
    dtype: str
    out_dtype: Literal["fp8_e4m3fn", "fp8_e4m3fnuz", "int8"]
    group_size: int
    scale_dtype: Literal["float32", "ue8m0"] = "float32"
    has_residual: bool = False
    keeps_rows: bool = False

    def __post_init__(self) -> None:
        require(
            "norm_quantize request",
            one_of("out_dtype", self.out_dtype, EIGHT_BITS),
            one_of("scale_dtype", self.scale_dtype, ("float32", "ue8m0")),
            *positive(hidden_size=self.hidden_size),
            ("group_size >= 0", self.group_size, self.group_size >= 0),
            (
                f"hidden_size a multiple of group_size {self.group_size}",
                self.hidden_size,
                not self.group_size or self.hidden_size % self.group_size == 0,
            ),
        )

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.hidden_size // self.group_size if self.group_size else 1

    def norm(self) -> RmsNormRequest:
        """Its first half as a request of its own."""
        return RmsNormRequest(
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            has_residual=self.has_residual,
            tokens=self.tokens,
            graph_mode=self.graph_mode,
        )


def reference(
    request: NormQuantizeRequest, *, weight: torch.Tensor, eps: float
) -> Callable[..., tuple[Any, ...]]:
    """Golden: kernel(x[T, H]) or kernel(x, residual) -> (values [T, H], scales [T, groups]), then
    y [T, H] with keeps_rows, then the new residual with has_residual.

    The norm is float32 (float64 where x is); scales follow from its values in float32.
    """
    import torch

    rows_of = norm.reference(
        RmsNormRequest(hidden_size=request.hidden_size, dtype="float32"), weight=weight, eps=eps
    )

    def rounded(x: torch.Tensor) -> tuple[Any, ...]:
        y = rows_of(x if x.dtype == torch.float64 else x.to(torch.float32))
        values, scales = quantize_groups(
            y.to(torch.float32),
            group_size=request.group_size,
            element=request.out_dtype,
            scale_kind=request.scale_dtype,
        )
        return (values, scales, y.to(x.dtype)) if request.keeps_rows else (values, scales)

    def norm_residual(x: torch.Tensor, residual: torch.Tensor) -> tuple[Any, ...]:
        total = x + residual
        return *rounded(total), total

    return norm_residual if request.has_residual else rounded


def flops(request: NormQuantizeRequest, tokens: int) -> float:
    """Of the norm, and absolute value, maximum, product and rounding of each value."""
    return norm.flops(request.norm(), tokens) + 4.0 * tokens * request.hidden_size


def bytes_moved(request: NormQuantizeRequest, tokens: int) -> float:
    """Of the norm, its rows in eight bits with their scales, and the rows as they are if kept."""
    rows = tokens * request.hidden_size * DTYPE_BYTES[request.dtype]
    scales = request.groups * (4 if request.scale_dtype == "float32" else 1)
    stored = tokens * (request.hidden_size + scales) + (rows if request.keeps_rows else 0)
    return norm.bytes_moved(request.norm(), tokens) - rows + stored


FAMILY = OpFamily(
    name="norm_quantize",
    request_type=NormQuantizeRequest,
    summary="Root-mean-square norm with its rows rounded for the product behind it",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances={
        **FLOAT_TOLERANCES,
        # Of the decoded values in units of their scale: one step, for a tie to the other side.
        "fp8_e4m3fn": Tolerance(2.0**-3, 2.0**-9),
        "fp8_e4m3fnuz": Tolerance(2.0**-3, 2.0**-10),
        "int8": Tolerance(0.0, 1.0),
    },
)
