"""The specialisations of the Triton layer norm that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

# Widest padded row of so many warps -> the warps; a narrower one has less of everything.
WIDTHS = {128: 1, 1024: 4, 8192: 8}


def _layer_norm(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"h{width}",
            pointers=dict.fromkeys(("x_RH_ptr", "weight_H_ptr", "bias_H_ptr", "y_RH_ptr"), dtype),
            scalars={"stride_x": "i32", "stride_y": "i32", "H": "i32", "eps": "fp32"},
            divisible=frozenset({"stride_x", "stride_y", "H"}),
            constants={"BLOCK_H": width, "HAS_BIAS": True},
            num_warps=warps,
        )
        for dtype in ACTIVATION_DTYPES
        for width, warps in WIDTHS.items()
    )


KERNELS = (
    TritonKernel(
        name="layer_norm.rows", op="layer_norm", module="hal_kernels.layer_norm.triton_kernels",
        function="_layer_norm_kernel", variants=_layer_norm, uses_matrix_unit=False,
    ),
)  # fmt: skip
