"""The specialisations of the Triton products per expert that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.triton_variants import WIDENED_UNITS
from hal_kernels.grouped_gemm.round_variants import rounds_in_integers

_MODULE = "hal_kernels.grouped_gemm.triton_kernels"
FEW_ROWS = 16  # per expert, up to which the small tiles are used
# Of the compiled gated variants: three instructions more than without one, so they stand for both.
CLAMP = 10.0
EXPERTS = 256  # of the compiled variants; the number only sizes the search for a tile's expert


# Architectures where Triton has the matrix unit multiply scales of 32 columns in by itself for
# these tiles, and of these the one that takes FP4 beside FP8 as it is. All others multiply FP8 and
# scale the sums; so do sm_100 and sm_103, whose scaled instruction Triton does not emit here.
_SCALED_UNITS = frozenset({"sm_120", "gfx950"})
_MIXED_UNITS = frozenset({"gfx950"})
# With fewer than 64 rows in a tile Triton leaves wgmma and tcgen05 for mma.sync, and there widens
# FP8 to 16 bits without a word: the evidence shows it.
NEEDS_64_ROWS = frozenset({"sm_90", "sm_100", "sm_103"})


def tiles(
    target: Target, kind: str, rows: int, *, is_gated: bool = False, group: int = 0
) -> dict[str, Any]:
    """Tile sizes and launch options for so many rows per expert: a decode has one or two. group:
    columns that share a scale. The exceptions keep registers from spilling: see the evidence."""
    few = rows <= FEW_ROWS and (kind == "dense" or target.arch not in NEEDS_64_ROWS)
    columns = 32 if is_gated and group == 128 and not few else 64
    stages = 2 if target.backend == "hip" else 3
    base: dict[str, Any] = {
        "BLOCK_M": 16 if few else 64,
        "BLOCK_N": columns,
        "num_warps": 4,
        "num_stages": stages,
    }
    is_tall = rows > FEW_ROWS and not is_gated
    if kind == "dense":
        return base | _dense_tiles(target, is_few=few, is_tall=is_tall)
    if is_tall and group == 128 and (target.backend == "cuda" or target.arch.startswith("gfx9")):
        # Twice the columns for the same rows: a quarter less is read, by as many registers.
        base |= {"BLOCK_N": 128, "num_warps": 8}
    if kind == "mxfp4":
        is_scaled = target.arch in _SCALED_UNITS
        is_wide = is_gated and not few  # two accumulators of 64 rows
        is_narrow = is_wide or (is_scaled and target.backend == "cuda")
        return base | {
            "BLOCK_K": (64 if is_wide and target.backend == "cuda" else 128) if is_scaled else 32,
            "UNPACKS": target.arch not in _MIXED_UNITS,
            "IS_FNUZ": target.fp8_dtype == "fp8_e4m3fnuz",
            "BLOCK_N": 32 if is_narrow else columns,
            "num_stages": 2,
        }
    return base


def _dense_tiles(target: Target, *, is_few: bool, is_tall: bool) -> dict[str, Any]:
    """What differs from the other kinds. Of few rows more warps wait for the same tile. A tall tile
    has 256 columns and as many more warps: the rows are read a quarter as often as by 64."""
    is_cuda = target.backend == "cuda"
    depth = {"BLOCK_K": 32 if not is_cuda and target.warp_size == 32 else 64}
    if is_few:
        return depth | {"num_warps": 8 if is_cuda else 4}
    if not is_tall:
        return depth
    if target.arch in ("sm_100", "sm_103"):
        # Of 256 columns the tensor memory holds two blocks, of eight warps each and no more.
        return depth | {"BLOCK_N": 128, "num_warps": 8}
    wide = {"BLOCK_N": 256, "num_warps": 16}
    if not is_cuda:
        return wide | {"BLOCK_K": 32}
    # wgmma reads all buffers of the loop where they are, mma.sync one less than there are stages.
    return depth | wide | {"num_stages": 2 if target.arch == "sm_90" else 3}


def _variant(target: Target, kind: str, config: str, rows: int, **fields: Any) -> KernelVariant:
    flags = fields.pop("constants")
    is_gated, group = flags.get("IS_GATED", False), flags.get("GROUP_K", 0)
    constants = tiles(target, kind, rows, is_gated=is_gated, group=group) | flags
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    return KernelVariant(
        config=config,
        constants={"E": EXPERTS, "BLOCK_E": EXPERTS, **constants},
        num_warps=warps,
        num_stages=stages,
        **fields,
    )


_SIZES = (("small", 1), ("large", 64))


def _dense(target: Target) -> Sequence[KernelVariant]:
    strides = ("stride_xm", "stride_we", "stride_wn", "stride_ym")
    return tuple(
        _variant(
            target,
            "dense",
            f"{size}{'-gated' if gated else ''}",
            rows,
            dtype=dtype,
            pointers={
                **dict.fromkeys(("x_MK_ptr", "w_ENK_ptr", "y_MN_ptr"), dtype),
                "offsets_E_ptr": "int64",
            },
            scalars=dict.fromkeys(("N", "K", *strides), "i32"),
            divisible=frozenset({"N", "K", *strides}),
            constants={"IS_GATED": gated, "CLAMP": CLAMP * gated},
        )
        for dtype in ("bfloat16", "float16")
        for size, rows in _SIZES
        for gated in (False, True)
    )


_QUANTISED_STRIDES = (
    "stride_xm", "stride_xs", "stride_we", "stride_wn", "stride_wse", "stride_wsn", "stride_ym",
)  # fmt: skip


def _fp8(target: Target) -> Sequence[KernelVariant]:
    if target.arch in WIDENED_UNITS:
        return ()
    fp8 = target.fp8_dtype
    return tuple(
        _variant(
            target,
            "fp8",
            f"g{group}-{size}{'-gated' if gated else ''}",
            rows,
            dtype=fp8,
            pointers={
                "x_MK_ptr": fp8,
                "x_scale_MG_ptr": "float32",
                "w_ENK_ptr": fp8,
                "w_scale_ptr": "float32",
                "y_MN_ptr": "bfloat16",
                "offsets_E_ptr": "int64",
            },
            scalars=dict.fromkeys(("N", "K", *_QUANTISED_STRIDES), "i32"),
            divisible=frozenset({"N", "K", "stride_xm", "stride_we", "stride_wn", "stride_ym"}),
            constants={
                "GROUP_K": group,
                "SCALE_N": group,
                "IS_GATED": gated,
                "CLAMP": CLAMP * gated,
            },
        )
        for group in (128, 32)
        for size, rows in _SIZES
        for gated in (False, True)
    )


def _mxfp4(target: Target) -> Sequence[KernelVariant]:
    if rounds_in_integers(target.arch):
        return ()  # Triton has no FP8 there: both operands are decoded to 16 bits, by other kernels
    fp8 = target.fp8_dtype
    return tuple(
        _variant(
            target,
            "mxfp4",
            f"{size}{'-gated' if gated else ''}",
            rows,
            dtype=fp8,
            pointers={
                "x_MK_ptr": fp8,
                "x_scale_MG_ptr": "uint8",
                "w_ENK_ptr": "uint8",
                "w_scale_ENG_ptr": "uint8",
                "y_MN_ptr": "bfloat16",
                "offsets_E_ptr": "int64",
            },
            scalars=dict.fromkeys(("N", "K", *_QUANTISED_STRIDES), "i32"),
            divisible=frozenset({"N", "K", "stride_xm", "stride_we", "stride_wn", "stride_ym"}),
            constants={"IS_GATED": gated, "CLAMP": CLAMP * gated},
        )
        for size, rows in _SIZES
        for gated in (False, True)
    )


KERNELS = (
    TritonKernel(
        name="grouped_gemm.dense", op="grouped_gemm", module=_MODULE,
        function="_grouped_gemm_kernel", variants=_dense, uses_matrix_unit=True,
    ),
    TritonKernel(
        name="grouped_gemm.fp8_block", op="grouped_gemm", module=_MODULE,
        function="_grouped_gemm_fp8_kernel", variants=_fp8, uses_matrix_unit=True,
    ),
    TritonKernel(
        name="grouped_gemm.mxfp4", op="grouped_gemm", module=_MODULE,
        function="_grouped_gemm_mxfp4_kernel", variants=_mxfp4, uses_matrix_unit=True,
    ),
)  # fmt: skip
