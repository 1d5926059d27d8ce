"""The specialisations of the Triton products per expert whose weights alone are quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.grouped_gemm.triton_variants import CLAMP, EXPERTS, FEW_ROWS

# How weights are stored: configuration -> rows of a weight, and columns, that share a scale.
FORMS: dict[str, tuple[int, int]] = {"g128": (128, 128), "g32": (32, 32), "mxfp4": (1, 32)}


def weight_only_tiles(
    target: Target, form: str, rows: int, *, is_gated: bool = False
) -> dict[str, Any]:
    """Tile sizes and launch options for so many rows per expert. form: of `FORMS`. The columns of a
    step share a float32 scale, or each 32 have one."""
    few, is_hip = rows <= FEW_ROWS, target.backend == "hip"
    is_rdna3, is_rdna = target.arch.startswith("gfx11"), is_hip and target.warp_size == 32
    # Of few rows so many warps that each thread reads 16 bytes of the weight at once.
    warps = (2 if is_hip else 4) if few else (8 if is_rdna else 4)
    return {
        "BLOCK_M": 16 if few else 64,
        "BLOCK_N": 32 if few or is_gated or is_rdna3 else 64,
        # Of 128 columns registers spill beside many rows, and on RDNA beside few.
        "BLOCK_K": 128 if form == "g128" and few and not is_rdna else 64,
        "SCALE_N": FORMS[form][0],
        "IS_FP4": form == "mxfp4",
        "num_warps": warps,
        "num_stages": 2 if is_hip or not few else 4,
    }


def _variants(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(target, form, size, rows, is_gated=is_gated)
        for form in FORMS
        for size, rows in (("small", 1), ("large", 64))
        for is_gated in (False, True)
    )


def _variant(target: Target, form: str, size: str, rows: int, *, is_gated: bool) -> KernelVariant:
    constants = weight_only_tiles(target, form, rows, is_gated=is_gated)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    strides = ("stride_xm", "stride_we", "stride_wn", "stride_wse", "stride_wsn", "stride_ym")
    return KernelVariant(
        dtype="bfloat16",
        config=f"{form}-{size}{'-gated' if is_gated else ''}",
        pointers={
            "x_MK_ptr": "bfloat16",
            "w_ENK_ptr": "uint8",
            "w_scale_ptr": "float32" if form == "g128" else "uint8",
            "y_MN_ptr": "bfloat16",
            "offsets_E_ptr": "int64",
        },
        scalars=dict.fromkeys(("N", "K", *strides), "i32"),
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
        name="grouped_gemm.weight_only", op="grouped_gemm",
        module="hal_kernels.grouped_gemm.weight_only_kernels",
        function="_grouped_gemm_weight_only_kernel", variants=_variants, uses_matrix_unit=True,
        sources=("hal_kernels.grouped_gemm.triton_kernels", "hal_kernels.kv_write.packed_rows"),
    ),
)  # fmt: skip
