"""Quantisation of activations in groups along a row: FP8, int8, MXFP4, NVFP4.

Scales: `amax / largest` in float32; as ue8m0 the next power of two that does not saturate; as e4m3
rounded to nearest. Formats: https://arxiv.org/abs/2209.05433 (FP8), OCP Microscaling v1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.low_precision import quantize_groups
from hal.ops.request import OpFamily, OpRequest, Tolerance

if TYPE_CHECKING:
    import torch

QuantizedDtype = Literal["fp8_e4m3fn", "fp8_e4m3fnuz", "int8", "mxfp4", "nvfp4"]
ScaleDtype = Literal["float32", "ue8m0", "e4m3"]
_DTYPES = ("fp8_e4m3fn", "fp8_e4m3fnuz", "int8", "mxfp4", "nvfp4")
# Of the decoded values in units of their scale: one step, for a tie that fell to the other side.
_ONE_STEP = {
    "fp8_e4m3fn": Tolerance(2.0**-3, 2.0**-9),
    "fp8_e4m3fnuz": Tolerance(2.0**-3, 2.0**-10),
    "int8": Tolerance(0.0, 1.0),
    "mxfp4": Tolerance(0.5, 0.5),
    "nvfp4": Tolerance(0.5, 0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest(OpRequest):
    """x[T, width] -> (values, scales [T, width / group_size]).

    values: [T, width] in 8 bits, or uint8 [T, width / 2] with the even column in the low nibble.
    group_size 0: one scale per row. Scales in ue8m0 are uint8 codes. Raises RequestError if
    inconsistent.
    """

    op: ClassVar[str] = "quantize"

    group_size: int
    out_dtype: QuantizedDtype
    scale_dtype: ScaleDtype
    width: int
    dtype: str

    def __post_init__(self) -> None:
        four_bits = {"mxfp4": "ue8m0", "nvfp4": "e4m3"}
        require(
            "quantize request",
            one_of("out_dtype", self.out_dtype, _DTYPES),
            one_of("scale_dtype", self.scale_dtype, ("float32", "ue8m0", "e4m3")),
            *positive(width=self.width),
            ("group_size >= 0", self.group_size, self.group_size >= 0),
            (
                f"width a multiple of group_size {self.group_size}",
                self.width,
                not self.group_size or self.width % self.group_size == 0,
            ),
            (
                f"{four_bits.get(self.out_dtype)} scales for {self.out_dtype}",
                self.scale_dtype,
                four_bits.get(self.out_dtype, self.scale_dtype) == self.scale_dtype,
            ),
            (
                "an even width for four bits",
                self.width,
                self.out_dtype not in four_bits or self.width % 2 == 0,
            ),
        )

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.width // self.group_size if self.group_size else 1


def reference(
    request: QuantizeRequest,
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Golden quantisation by the rules of `hal.ops.low_precision`, in float32."""
    element = "fp4_e2m1" if request.out_dtype in ("mxfp4", "nvfp4") else request.out_dtype

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_groups(
            x,
            group_size=request.group_size,
            element=element,
            scale_kind=request.scale_dtype,
        )

    return kernel


def flops(request: QuantizeRequest, tokens: int) -> float:
    """Absolute value, maximum, product and rounding of each value."""
    return 4.0 * tokens * request.width


def bytes_moved(request: QuantizeRequest, tokens: int) -> float:
    bits = 4 if request.out_dtype in ("mxfp4", "nvfp4") else 8
    scales = request.groups * (4 if request.scale_dtype == "float32" else 1)
    read = request.width * DTYPE_BYTES[request.dtype]
    return float(tokens * (read + request.width * bits // 8 + scales))


FAMILY = OpFamily(
    name="quantize",
    request_type=QuantizeRequest,
    summary="Quantisation of activations with a scale per group",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=_ONE_STEP,
)
