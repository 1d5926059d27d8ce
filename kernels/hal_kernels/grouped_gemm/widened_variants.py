"""The products per expert of two FP8 operands that are decoded to 16 bits, as targets are compiled
for them, and their tiles: those of `hal_kernels.gemm.widened_variants`. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.triton_variants import WIDENED_UNITS
from hal_kernels.gemm.widened_variants import GROUPS, widened_tiles
from hal_kernels.grouped_gemm.triton_variants import CLAMP, EXPERTS, FEW_ROWS

_STRIDES = (
    "stride_xm", "stride_xs", "stride_we", "stride_wn", "stride_wse", "stride_wsn", "stride_ym",
)  # fmt: skip


def widened_expert_tiles(
    target: Target, group: int, rows: int, *, is_gated: bool
) -> dict[str, int]:
    """Tile sizes and launch options for so many rows per expert. group: columns that share a
    scale."""
    size = "small" if rows <= FEW_ROWS else "large"
    tiles = widened_tiles(target, group, size, is_wide=is_gated)
    tiles.pop("GROUP_M")
    return tiles


def _variants(target: Target) -> Sequence[KernelVariant]:
    if target.arch not in WIDENED_UNITS:
        return ()
    return tuple(
        _variant(target, group, size, rows, is_gated=is_gated)
        for group in GROUPS
        for size, rows in (("small", 1), ("large", 64))
        for is_gated in (False, True)
    )


def _variant(target: Target, group: int, size: str, rows: int, *, is_gated: bool) -> KernelVariant:
    constants = widened_expert_tiles(target, group, rows, is_gated=is_gated)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    return KernelVariant(
        dtype=target.fp8_dtype,
        config=f"g{group}-{size}{'-gated' if is_gated else ''}",
        pointers={
            "x_MK_ptr": "uint8",
            "x_scale_MG_ptr": "float32",
            "w_ENK_ptr": "uint8",
            "w_scale_ptr": "float32",
            "y_MN_ptr": "bfloat16",
            "offsets_E_ptr": "int64",
        },
        scalars=dict.fromkeys(("N", "K", *_STRIDES), "i32"),
        divisible=frozenset({"N", "K", "stride_xm", "stride_we", "stride_wn", "stride_ym"}),
        constants={
            "E": EXPERTS, "BLOCK_E": EXPERTS, "IS_GATED": is_gated, "CLAMP": CLAMP * is_gated,
            **constants,
        },
        num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


KERNELS = (
    TritonKernel(
        name="grouped_gemm.fp8_widened", op="grouped_gemm",
        module="hal_kernels.grouped_gemm.widened_kernels",
        function="_grouped_gemm_fp8_widened_kernel", variants=_variants, uses_matrix_unit=True,
        sources=(
            "hal_kernels.grouped_gemm.triton_kernels",
            "hal_kernels.gemm.widened_kernels",
            "hal_kernels.gemm.triton_kernels",
            "hal_kernels.gemm.epilogues",
        ),
    ),
)  # fmt: skip
