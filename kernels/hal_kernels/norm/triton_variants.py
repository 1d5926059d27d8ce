"""The specialisations of the Triton norms that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

WIDTHS = (1024, 8192)  # of the padded row; a narrower one has less of everything
# Name in a configuration -> (residual, int8): the one with int8 has a residual too.
_FORMS = {"plain": (False, False), "residual": (True, False), "int8": (True, True)}


def launch_warps(block: int) -> int:
    """Of the program of a row of so many columns, padded to a power of two."""
    return 4 if block <= 1024 else 8


def _rms_norm(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"h{width}-{form}",
            pointers={
                **dict.fromkeys(("x_RH_ptr", "residual_RH_ptr", "weight_H_ptr"), dtype),
                "y_RH_ptr": "int8" if is_quantised else dtype,
                "scale_R_ptr": "float32",
            },
            scalars={
                **dict.fromkeys(("stride_x", "stride_residual", "stride_y", "H"), "i32"),
                "eps": "fp32",
            },
            divisible=frozenset({"stride_x", "stride_residual", "stride_y", "H"}),
            constants={
                "BLOCK_H": width,
                "HAS_RESIDUAL": has_residual,
                "IS_QUANTISED": is_quantised,
            },
            num_warps=launch_warps(width),
        )
        for dtype in ACTIVATION_DTYPES
        for width in WIDTHS
        for form, (has_residual, is_quantised) in _FORMS.items()
    )


KERNELS = (
    TritonKernel(
        name="norm.rms", op="norm.rms", module="hal_kernels.norm.triton_kernels",
        function="_rms_norm_kernel", variants=_rms_norm, uses_matrix_unit=False,
    ),
)  # fmt: skip
