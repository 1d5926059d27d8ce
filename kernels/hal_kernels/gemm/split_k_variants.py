"""The specialisations of split products with quantised weights that targets are compiled for.

Tiles are those of the whole products of few rows. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.triton_variants import configurations, fp8_weight_tiles

_MODULE = "hal_kernels.gemm.split_k_kernels"
# Architectures whose matrix unit multiplies scales of 32 columns in; others take blocks of FP8.
_SCALED_UNITS = frozenset({"sm_100", "sm_103", "sm_120", "gfx950"})
_NO_FP8 = frozenset(
    {"sm_80", "gfx90a", "gfx1100"}
)  # no matrix unit takes it: nothing is split there


@dataclass(frozen=True, slots=True)
class SplitForm:
    """A weight format. kind: as the kernel has it. group: columns that share a scale (0: all)."""

    kind: int
    group: int
    has_minimum: bool = False


FORMS: Mapping[str, SplitForm] = {
    "g128": SplitForm(0, 128),
    "g32": SplitForm(0, 32),
    "weight32": SplitForm(1, 32),
    "fp8g128": SplitForm(2, 128),
    "fp8g32": SplitForm(2, 32),
    "w8": SplitForm(3, 0),
    "w8g32": SplitForm(3, 32),
    "w4g32": SplitForm(4, 32),
    "w4g32-asym": SplitForm(4, 32, has_minimum=True),
}


def split_k_tiles(target: Target, name: str, *, is_gated: bool = False) -> dict[str, Any]:
    """Constants and launch options of a form of `FORMS`."""
    form, gated = FORMS[name], "-gated" * is_gated
    if form.kind == 0:
        given = configurations("gemm_fp8_block", target)[f"{name}{gated}-small"]
    elif form.kind == 1:
        given = configurations("gemm_mxfp8", target)[f"{name}{gated}-small"]
    elif form.kind == 2:
        given = fp8_weight_tiles(target, "small")
    else:
        given = configurations("gemm_weight_only", target)["small"]
    is_square = form.kind in (0, 2)  # blocks as high as they are wide, a step of each
    depth, columns = form.group if is_square else given["BLOCK_K"], given["BLOCK_N"]
    warps = given["num_warps"]
    if name == "fp8g128" and target.arch == "gfx1100":
        warps = 8  # with fewer registers spill
    if form.kind > 1 or (form.kind == 0 and target.arch == "gfx942"):
        # So few warps that each thread reads 16 bytes of the weight at once, and two at least.
        bits = 4 if form.kind == 4 else 8
        columns = max(columns, 2 * 16 * target.warp_size * 8 // bits // depth)
        warps = min(warps, columns * depth * bits // 8 // (16 * target.warp_size))
    return {
        "BLOCK_M": given["BLOCK_M"],
        "BLOCK_N": columns,
        "BLOCK_K": depth,
        "GROUP_K": form.group,
        "SCALE_N": form.group if is_square else given.get("SCALE_N", 1),
        "KIND": form.kind,
        "HAS_MINIMUM": form.has_minimum,
        "IS_GATED": is_gated,
        "num_warps": warps,
        "num_stages": given["num_stages"],
    }


def _variants(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for name, form in FORMS.items():
        if form.kind == 0 and target.arch in _NO_FP8:
            continue
        if form.kind == 1 and target.arch not in _SCALED_UNITS:
            continue
        is_eight_bits = form.kind in (0, 1)
        claims = [target.fp8_dtype] if is_eight_bits else ["bfloat16"]
        if form.kind in (3, 4):
            claims.append("float16")
        for claim in claims:
            for is_gated in (False, True) if is_eight_bits else (False,):
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
        sources=("hal_kernels.kv_write.packed_rows",),
    ),
)  # fmt: skip
