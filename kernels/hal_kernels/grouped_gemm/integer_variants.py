"""The specialisations of the Triton products per expert whose weights are integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.grouped_gemm.triton_variants import CLAMP, EXPERTS, FEW_ROWS


@dataclass(frozen=True, slots=True)
class IntegerForm:
    """How a weight is stored. group: columns that share a scale, 0 for one scale of a row."""

    bits: int
    group: int = 0
    has_minimum: bool = False


INTEGER_FORMS: Mapping[str, IntegerForm] = {
    "w8": IntegerForm(8),
    "w8g32": IntegerForm(8, 32),
    "w4g32": IntegerForm(4, 32),
    "w4g32_asym": IntegerForm(4, 32, has_minimum=True),
}
# Number format -> how its weights are stored.
INTEGER_FORMATS: Mapping[str, str] = {
    "int8_channel": "w8",
    "int8_g32": "w8g32",
    "int4_g32": "w4g32",
    "int4_g32_asym": "w4g32_asym",
}


def integer_tiles(
    target: Target, name: str, rows: int, *, is_gated: bool = False
) -> dict[str, Any]:
    """Tile sizes and launch options for so many rows per expert. name: of `INTEGER_FORMS`."""
    form, few, is_hip = INTEGER_FORMS[name], rows <= FEW_ROWS, target.backend == "hip"
    is_rdna3, is_rdna = target.arch.startswith("gfx11"), is_hip and target.warp_size == 32
    # Of few rows so many warps that each thread reads 16 bytes of the weight at once.
    warps = (2 if is_hip else 4) if few else (8 if is_rdna else 4)
    return {
        "BLOCK_M": 16 if few else 64,
        "BLOCK_N": 32 if few or is_gated or is_rdna3 else 64,
        # Of 128 columns the registers of RDNA spill beside two sums.
        "BLOCK_K": 128 if few and form.bits == 4 and not is_rdna else 64,
        "BITS": form.bits,
        "GROUP_K": form.group,
        "HAS_MINIMUM": form.has_minimum,
        "num_warps": warps,
        "num_stages": 2 if is_hip or not few else 4,
    }


def _variants(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(target, name, dtype, size, rows, is_gated=is_gated)
        for dtype in ("bfloat16", "float16")
        for name in INTEGER_FORMS
        for size, rows in (("small", 1), ("large", 64))
        for is_gated in (False, True)
    )


def _variant(
    target: Target, name: str, dtype: str, size: str, rows: int, *, is_gated: bool
) -> KernelVariant:
    constants = integer_tiles(target, name, rows, is_gated=is_gated)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    form = INTEGER_FORMS[name]
    scale = "float16" if form.group else "float32"
    strides = ("stride_xm", "stride_we", "stride_wn", "stride_se", "stride_sn", "stride_ym")
    return KernelVariant(
        dtype=dtype,
        config=f"{name}-{size}{'-gated' * is_gated}",
        pointers={
            "x_MK_ptr": dtype,
            "w_ENK_ptr": "int8" if form.bits == 8 else "uint8",
            "scale_ENG_ptr": scale,
            "minimum_ENG_ptr": scale,
            "y_MN_ptr": dtype,
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
        name="grouped_gemm.integer", op="grouped_gemm",
        module="hal_kernels.grouped_gemm.integer_kernels",
        function="_grouped_gemm_integer_kernel", variants=_variants, uses_matrix_unit=True,
        sources=("hal_kernels.grouped_gemm.triton_kernels",),
    ),
)  # fmt: skip
