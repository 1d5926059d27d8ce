"""The specialisations of the Triton layer norm that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.norm.triton_variants import STEP, WIDTHS, launch_tile

_MODULE = "hal_kernels.layer_norm.triton_kernels"
_STRIDES = ("stride_x", "stride_y", "H")


def _variant(target: Target, dtype: str, width: int, *, is_kept: bool) -> KernelVariant:
    """Of rows padded to that width, or walked in steps of it. As norms without a mean: a thread of
    either has as many values."""
    rows, warps = launch_tile(width, target.warp_size)
    return KernelVariant(
        dtype=dtype,
        config=f"h{width}" if is_kept else "looped",
        pointers=dict.fromkeys(("x_RH_ptr", "weight_H_ptr", "bias_H_ptr", "y_RH_ptr"), dtype),
        scalars={
            **dict.fromkeys((*_STRIDES, *(("R",) if is_kept else ())), "i32"),
            "eps": "fp32",
        },
        divisible=frozenset(_STRIDES),
        constants={
            **({"BLOCK_R": rows} if is_kept else {}),
            "BLOCK_H": width,
            "HAS_BIAS": True,
        },
        num_warps=warps,
    )


def _kept(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(target, dtype, width, is_kept=True)
        for dtype in ACTIVATION_DTYPES
        for width in WIDTHS
    )


def _looped(target: Target) -> Sequence[KernelVariant]:
    return tuple(_variant(target, dtype, STEP, is_kept=False) for dtype in ACTIVATION_DTYPES)


KERNELS = (
    TritonKernel(
        name="layer_norm.rows", op="layer_norm", module=_MODULE,
        function="_layer_norm_kernel", variants=_kept, uses_matrix_unit=False,
    ),
    TritonKernel(
        name="layer_norm.looped", op="layer_norm", module=_MODULE,
        function="_layer_norm_looped_kernel", variants=_looped, uses_matrix_unit=False,
    ),
)  # fmt: skip
