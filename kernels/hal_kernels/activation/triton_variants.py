"""The specialisations of the Triton gated activation that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel


def row_block(warp_size: int) -> int:
    """Columns of a program: 16 bytes a thread of each half, by four warps."""
    return 32 * warp_size


def _gated(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=config,
            pointers={"x_R2F_ptr": dtype, "y_RF_ptr": dtype},
            scalars={**dict.fromkeys(("stride_x", "stride_y", "F"), "i32"), "clamp": "fp32"},
            divisible=frozenset({"stride_x", "stride_y", "F"}),
            constants={
                "BLOCK_F": row_block(target.warp_size),
                "IS_GELU": is_gelu,
                "HAS_CLAMP": has_clamp,
            },
        )
        for dtype in ACTIVATION_DTYPES
        for config, is_gelu, has_clamp in (
            ("silu", False, False),
            ("silu-clamp", False, True),
            ("gelu", True, False),
            ("gelu-clamp", True, True),
        )
    )


KERNELS = (
    TritonKernel(
        name="activation.gated", op="activation.gated",
        module="hal_kernels.activation.triton_kernels", function="_gated_activation_kernel",
        variants=_gated, uses_matrix_unit=False,
    ),
)  # fmt: skip
