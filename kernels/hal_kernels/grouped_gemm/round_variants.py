"""The rounding of rows before products with MXFP4 weights where no unit and no compiler takes FP8.

Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.quantize.triton_variants import converts_in_integers, group_block, launch_warps

GROUP = 32  # columns that share a scale
ROUND_CONFIG = "g32"


def rounds_in_integers(arch: str) -> bool:
    """Whether rows of an MXFP4 product are rounded here: where Triton has no FP8 (sm_80)."""
    return converts_in_integers(arch, "fp8_e4m3fn")


def _variants(target: Target) -> Sequence[KernelVariant]:
    if not rounds_in_integers(target.arch):
        return ()
    block = group_block(GROUP, 1 << 16)
    return (
        KernelVariant(
            dtype="",
            config=ROUND_CONFIG,
            pointers={"x_RK_ptr": "bfloat16", "y_RK_ptr": "bfloat16"},
            scalars=dict.fromkeys(("stride_x", "stride_y", "K"), "i32"),
            divisible=frozenset({"stride_x", "stride_y", "K"}),
            constants={"GROUP": GROUP, "BLOCK_G": block},
            num_warps=launch_warps(GROUP, block),
        ),
    )


KERNELS = (
    TritonKernel(
        name="grouped_gemm.round_rows", op="grouped_gemm",
        module="hal_kernels.grouped_gemm.round_kernels", function="_round_rows_kernel",
        variants=_variants, uses_matrix_unit=False,
        caveat="made for rows as they are; rows that a call before it has rounded are widened by "
        "torch instead, exactly and with one pass more",
        sources=(
            "hal_kernels.kv_write.packed_rows",
            "hal_kernels.quantize.code_kernels",
            "hal_kernels.quantize.triton_kernels",
        ),
    ),
)  # fmt: skip
