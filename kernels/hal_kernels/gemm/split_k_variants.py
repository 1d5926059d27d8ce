"""The specialisations of split products with quantised weights that targets are compiled for.

Tiles are those of the whole products of few rows. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.triton_variants import SCALED_UNITS, configurations
from hal_kernels.gemm.weight_only_variants import (
    WEIGHT_FORMS,
    WeightForm,
    weight_only_tiles,
    with_wide_loads,
)

_MODULE = "hal_kernels.gemm.split_k_kernels"
_NO_FP8 = frozenset(
    {"sm_80", "gfx90a", "gfx1100"}
)  # no matrix unit takes it: nothing is split there

FORMS: Mapping[str, WeightForm] = {
    "g128": WeightForm(0, 128),
    "g32": WeightForm(0, 32),
    "weight32": WeightForm(1, 32),
    **WEIGHT_FORMS,
}


def split_k_tiles(target: Target, name: str, *, is_gated: bool = False) -> dict[str, Any]:
    """Constants and launch options of a form of `FORMS`."""
    form, gated = FORMS[name], "-gated" * is_gated
    if form.kind == 0:
        given = configurations("gemm_fp8_block", target)[f"{name}{gated}-small"]
    elif form.kind == 1:
        given = configurations("gemm_mxfp8", target)[f"{name}{gated}-small"]
    else:
        given = weight_only_tiles(target, name, "small", is_gated=is_gated)
    depth, columns = form.group if form.is_square else given["BLOCK_K"], given["BLOCK_N"]
    warps = given["num_warps"]
    if form.kind == 0 and target.arch == "gfx942":
        columns, warps = with_wide_loads(
            target, columns=columns, depth=depth, bits=form.bits, warps=warps
        )
    return {
        "BLOCK_M": given["BLOCK_M"],
        "BLOCK_N": columns,
        "BLOCK_K": depth,
        "GROUP_K": form.group,
        "SCALE_N": form.group if form.is_square else given.get("SCALE_N", 1),
        "KIND": form.kind,
        "HAS_MINIMUM": form.minimum_kind,
        "IS_GATED": is_gated,
        "num_warps": warps,
        "num_stages": given["num_stages"],
    }


def _variants(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for name, form in FORMS.items():
        if form.kind == 0 and target.arch in _NO_FP8:
            continue
        if form.kind == 1 and target.arch not in SCALED_UNITS:
            continue
        is_eight_bits = form.kind in (0, 1)
        claims = [target.fp8_dtype] if is_eight_bits else ["bfloat16"]
        if form.kind in (3, 4):
            claims.append("float16")
        for claim in claims:
            for is_gated in (False, True):
                variants.append(_variant(target, name, claim, is_gated=is_gated))
    return variants


def _variant(target: Target, name: str, dtype: str, *, is_gated: bool) -> KernelVariant:
    form = FORMS[name]
    constants = split_k_tiles(target, name, is_gated=is_gated)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    scale = {1: "uint8", 4: "float16"}.get(form.kind, "float32")
    scale = "float16" if name == "w8g32" else scale
    scalars = ("M", "N", "K", "stride_xm", "stride_xs", "stride_wn", "stride_ws")
    return KernelVariant(
        dtype=dtype,
        config=name + "-gated" * is_gated,
        pointers={
            "x_MK_ptr": dtype,
            "x_scale_MG_ptr": scale if form.kind in (0, 1) else dtype,
            "w_ptr": {0: dtype, 1: dtype, 3: "int8"}.get(form.kind, "uint8"),
            "w_scale_ptr": scale,
            "minimum_ptr": scale,
            "part_SMN_ptr": "float32",
        },
        scalars=dict.fromkeys(scalars, "i32"),
        divisible=frozenset({"N", "K", "stride_xm", "stride_wn"}),
        constants=constants,
        num_warps=warps,
        num_stages=stages,
    )


KERNELS = (
    TritonKernel(
        name="gemm.split_k", op="gemm", module=_MODULE, function="_gemm_split_k_kernel",
        variants=_variants, uses_matrix_unit=True,
        sources=("hal_kernels.gemm.weight_only_kernels", "hal_kernels.kv_write.packed_rows"),
    ),
)  # fmt: skip
