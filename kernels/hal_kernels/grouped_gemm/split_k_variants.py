"""The specialisations of split products per expert that targets are compiled for, and their sums.

Tiles are those of the whole products of few rows. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.split_k_schedule import SPLITS
from hal_kernels.gemm.triton_variants import WIDENED_UNITS
from hal_kernels.gemm.weight_only_variants import with_wide_loads
from hal_kernels.grouped_gemm.triton_variants import CLAMP, EXPERTS, tiles
from hal_kernels.grouped_gemm.weight_only_variants import FORMS as WEIGHT_ONLY_FORMS
from hal_kernels.grouped_gemm.weight_only_variants import weight_only_tiles

_MODULE = "hal_kernels.grouped_gemm.split_k_kernels"
_DENSE, _FP8, _MXFP4, _WEIGHT_ONLY = range(4)  # kinds, as the kernel has them
SUM_COLUMNS = 1024  # at most, of a program that sums


@dataclass(frozen=True, slots=True)
class SplitForm:
    """How the weights of a split product are stored. kind: of the kernel. group: columns that share
    a scale, 0 without. stored: the form of `weight_only_variants`, "" for others."""

    kind: int
    group: int = 0
    stored: str = ""


FORMS: Mapping[str, SplitForm] = {
    "dense": SplitForm(_DENSE),
    "g128": SplitForm(_FP8, 128),
    "g32": SplitForm(_FP8, 32),
    "mxfp4": SplitForm(_MXFP4, 32),
    **{
        f"weight-{name}": SplitForm(_WEIGHT_ONLY, group, name)
        for name, (_, group) in WEIGHT_ONLY_FORMS.items()
    },
}


def split_expert_tiles(target: Target, name: str, *, is_gated: bool = False) -> dict[str, Any]:
    """Constants and launch options of a form of `FORMS`."""
    form = FORMS[name]
    if form.kind == _WEIGHT_ONLY:
        given = weight_only_tiles(target, form.stored, 1, is_gated=is_gated)
    else:
        kind = {_DENSE: "dense", _FP8: "fp8", _MXFP4: "mxfp4"}[form.kind]
        group = form.group if form.kind == _FP8 else 0
        given = tiles(target, kind, 1, is_gated=is_gated, group=group)
    scale_rows = form.group if form.kind == _FP8 else given.get("SCALE_N", 1)
    depth = form.group if form.kind == _FP8 else given["BLOCK_K"]
    columns, warps = given["BLOCK_N"], given["num_warps"]
    if target.warp_size == 64 and depth == 32:
        # A step is so short that four waves would load less than 16 bytes a thread.
        bits = 4 if form.kind == _MXFP4 else 8
        columns, warps = with_wide_loads(
            target, columns=columns, depth=depth, bits=bits, warps=warps
        )
    return {
        "BLOCK_M": given["BLOCK_M"],
        "BLOCK_N": columns,
        "BLOCK_K": depth,
        "SCALE_N": scale_rows,
        "KIND": form.kind,
        "IS_FP4": given.get("IS_FP4", False),
        "UNPACKS": given.get("UNPACKS", False),
        "IS_FNUZ": given.get("IS_FNUZ", False),
        "IS_GATED": is_gated,
        "num_warps": warps,
        "num_stages": given["num_stages"],
    }


def _variants(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for name, form in FORMS.items():
        claims = ["bfloat16"]
        if form.kind in (_FP8, _MXFP4):
            # What no matrix unit takes is widened, and stays whole.
            claims = [] if target.arch in WIDENED_UNITS else [target.fp8_dtype]
        elif form.kind == _DENSE:
            claims.append("float16")
        for claim in claims:
            for is_gated in (False, True):
                variants.append(_variant(target, name, claim, is_gated=is_gated))
    return variants


def _variant(target: Target, name: str, dtype: str, *, is_gated: bool) -> KernelVariant:
    form = FORMS[name]
    constants = split_expert_tiles(target, name, is_gated=is_gated)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    is_ue8m0 = form.kind == _MXFP4 or (form.kind == _WEIGHT_ONLY and form.stored != "g128")
    scale = dtype if form.kind == _DENSE else "uint8" if is_ue8m0 else "float32"
    strides = ("stride_xm", "stride_xs", "stride_we", "stride_wn", "stride_wse", "stride_wsn")
    return KernelVariant(
        dtype=dtype,
        config=name + "-gated" * is_gated,
        pointers={
            "x_MK_ptr": dtype,
            "x_scale_MG_ptr": scale if form.kind in (_FP8, _MXFP4) else dtype,
            "w_ENK_ptr": "uint8" if form.kind in (_MXFP4, _WEIGHT_ONLY) else dtype,
            "w_scale_ptr": scale,
            "part_SMN_ptr": "float32",
            "offsets_E_ptr": "int64",
        },
        scalars=dict.fromkeys(("M", "N", "K", *strides), "i32"),
        divisible=frozenset({"N", "K", "stride_xm", "stride_we", "stride_wn"}),
        constants={"E": EXPERTS, "BLOCK_E": EXPERTS, **constants},
        num_warps=warps,
        num_stages=stages,
    )


def sum_config(splits: int, dtype: str, *, is_gated: bool) -> str:
    """The name of the variant that sums so many parts into rows of a dtype."""
    return f"split{splits}{'-gated' * is_gated}{'-float16' * (dtype == 'float16')}"


def _sums(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="",
            config=sum_config(splits, dtype, is_gated=is_gated),
            pointers={"part_SMN_ptr": "float32", "y_MN_ptr": dtype},
            scalars=dict.fromkeys(("M", "N", "stride_ym"), "i32"),
            divisible=frozenset({"N", "stride_ym"}),
            constants={
                "BLOCK_N": SUM_COLUMNS,
                "SPLITS": splits,
                "IS_GATED": is_gated,
                "CLAMP": CLAMP * is_gated,
            },
        )
        for dtype in ("bfloat16", "float16")
        for splits in SPLITS
        for is_gated in (False, True)
    )


_SOURCES = (
    "hal_kernels.grouped_gemm.triton_kernels",
    "hal_kernels.grouped_gemm.weight_only_kernels",
    "hal_kernels.kv_write.packed_rows",
)
KERNELS = (
    TritonKernel(
        name="grouped_gemm.split_k", op="grouped_gemm", module=_MODULE,
        function="_grouped_gemm_split_k_kernel", variants=_variants, uses_matrix_unit=True,
        sources=_SOURCES,
    ),
    TritonKernel(
        name="grouped_gemm.split_k_sum", op="grouped_gemm", module=_MODULE,
        function="_grouped_split_sum_kernel", variants=_sums, uses_matrix_unit=False,
        sources=_SOURCES,
    ),
)  # fmt: skip
