"""The specialisations of the Triton norm with rounding that targets are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.quantize.triton_variants import LARGEST

DTYPES = ("bfloat16", "float16")
WIDTHS = (2048, 8192)  # of the padded row; a narrower one has less of everything
# Triton does not convert to e4m3 there, or bit by bit.
NO_FP8 = ("sm_80", "gfx90a", "gfx1100")
# Name in a configuration -> (group, is_ue8m0), of FP8; int8 has one scale a row.
FORMS: Mapping[str, tuple[int, bool]] = MappingProxyType(
    {"g128": (128, False), "g128-ue8m0": (128, True), "g32": (32, False), "g32-ue8m0": (32, True),
     "row": (0, False)}
)  # fmt: skip


def launch_blocks(hidden: int, group: int, warp_size: int) -> tuple[int, int, int]:
    """(columns of a group, groups of a block, warps) for rows of that width, 16 values a thread;
    group 0 is the row."""
    if not group:
        group = 1 << (hidden - 1).bit_length()
    block = 1 << (-(-hidden // group) - 1).bit_length()
    return group, block, max(1, group * block // (16 * warp_size))


def _variants(target: Target) -> Sequence[KernelVariant]:
    rounded = [("int8", "row", 0, False)]
    if target.arch not in NO_FP8:
        rounded += [(target.fp8_dtype, name, *form) for name, form in FORMS.items()]
    return tuple(
        _variant(target, dtype, width, out, name, group, is_ue8m0=is_ue8m0)
        for dtype in DTYPES
        for width in WIDTHS
        for out, name, group, is_ue8m0 in rounded
    )


def _variant(
    target: Target, dtype: str, width: int, out: str, name: str, group: int, *, is_ue8m0: bool
) -> KernelVariant:
    """The one that does everything, with a residual and with the rows kept: the others do less."""
    size, block, warps = launch_blocks(width, group, target.warp_size)
    return KernelVariant(
        dtype=dtype,
        config=f"h{width}-{out.removesuffix('_e4m3fn').removesuffix('_e4m3fnuz')}-{name}",
        pointers={
            **dict.fromkeys(("x_RH_ptr", "residual_RH_ptr", "weight_H_ptr", "y_RH_ptr"), dtype),
            "values_RH_ptr": out,
            "scale_RG_ptr": "uint8" if is_ue8m0 else "float32",
        },
        scalars={
            **dict.fromkeys(("stride_x", "stride_residual", "H", "num_groups"), "i32"),
            "eps": "fp32",
        },
        divisible=frozenset({"stride_x", "stride_residual", "H"}),
        constants={
            "GROUP": size,
            "BLOCK_G": block,
            "HAS_RESIDUAL": True,
            "KEEPS_ROWS": True,
            "LARGEST": LARGEST[out],
            "IS_INTEGER": out == "int8",
            "IS_UE8M0": is_ue8m0,
        },
        num_warps=warps,
    )


KERNELS = (
    TritonKernel(
        name="norm_quantize.rows", op="norm_quantize",
        module="hal_kernels.norm_quantize.triton_kernels", function="_norm_quantize_kernel",
        variants=_variants, uses_matrix_unit=False,
        sources=("hal_kernels.quantize.triton_kernels",),
    ),
)  # fmt: skip
