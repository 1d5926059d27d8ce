"""The specialisations of the Triton attention with projection that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.attention.triton_variants import CACHED, decode_tiles

_MODULE = "hal_kernels.attention_projection.triton_kernels"
_SOURCES = ("hal_kernels.attention.triton_kernels", *CACHED)
_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")
_CACHE_STRIDES = tuple(
    f"stride_{cache}_{axis}" for cache in "kv" for axis in ("page", "row", "head")
)
_FORMS = (
    ("plain", {"WINDOW": 0, "SOFTCAP": 0.0, "HAS_SINKS": False}),
    ("window-sinks", {"WINDOW": 128, "SOFTCAP": 0.0, "HAS_SINKS": True}),
    ("softcap", {"WINDOW": 0, "SOFTCAP": 50.0, "HAS_SINKS": False}),
)
ROWS = 16  # sequences of one program of the merging kernel: the least of a matrix instruction
SUM_COLUMNS = 512
_FEWER = frozenset({"sm_100", "sm_103"})
_MERGE_WARPS = {64: 4, 128: 8, 256: 8}
_MERGE_WARPS_OF_ONE = {64: 4, 128: 4, 256: 8}
_MERGE_WARPS_OF_CDNA = {64: 2, 128: 4, 256: 8}


def one_pass_tiles(target: Target, head_dim: int) -> dict[str, int]:
    """Tile sizes and launch options of the one-pass kernel: those of a decode, with the columns of
    a tile of the result, fewer where registers would spill: see the evidence."""
    columns = 64 if head_dim <= 128 else 32
    if (_is_rdna(target) and head_dim > 128) or (target.arch in _FEWER and head_dim <= 64):
        columns //= 2
    return decode_tiles(target, head_dim) | {"BLOCK_Y": columns}


def merge_tiles(target: Target, head_dim: int, *, is_one: bool) -> dict[str, int]:
    """Of the kernel that merges splits and multiplies: few columns, so that many programs stream
    the weight. is_one: there is one split only. The numbers keep registers from spilling: see the
    evidence."""
    is_hip, is_wide = target.backend == "hip", head_dim > 128
    warps = _MERGE_WARPS_OF_ONE if is_one or _is_rdna(target) else _MERGE_WARPS
    if is_hip and not _is_rdna(target):
        warps = _MERGE_WARPS_OF_CDNA
    is_narrow = is_wide and (_is_rdna(target) or not (is_hip or is_one))
    stages = (1 if is_narrow else 2) if is_hip else (3 if is_wide else 4)
    return {
        "ROWS": ROWS,
        "BLOCK_Y": 16 if is_narrow else 32,
        "num_warps": next(number for size, number in warps.items() if head_dim <= size),
        "num_stages": stages,
    }


def _is_rdna(target: Target) -> bool:
    return target.backend == "hip" and target.warp_size == 32


def _one_pass(target: Target) -> Sequence[KernelVariant]:
    variants = []
    strides = ("stride_q", "stride_w", "stride_table", *_CACHE_STRIDES)
    for dtype in _DTYPES:
        for head_dim in _HEAD_DIMS:
            tiles = one_pass_tiles(target, head_dim)
            warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
            for form, flags in _FORMS:
                pointers = ("q_TD_ptr", "k_NPKD_ptr", "v_NPKD_ptr", "w_YD_ptr", "sinks_H_ptr")
                variants.append(
                    KernelVariant(
                        dtype=dtype,
                        config=f"d{head_dim}-{form}",
                        pointers={
                            **dict.fromkeys(pointers, dtype),
                            "part_GTY_ptr": "float32",
                            **dict.fromkeys(
                                ("starts_B_ptr", "lengths_B_ptr", "table_BW_ptr"), "int32"
                            ),
                        },
                        scalars={
                            "scale": "fp32",
                            **dict.fromkeys(("tokens", "width", "tiles_each", *strides), "i32"),
                        },
                        divisible=frozenset({"width", "stride_q", "stride_w", *_CACHE_STRIDES}),
                        constants={
                            "GROUP": 4,
                            "BLOCK_H": 16,
                            "HEAD_DIM": head_dim,
                            "V_HEAD_DIM": head_dim,
                            "BLOCK_D": head_dim,
                            "BLOCK_DV": head_dim,
                            "PAGE": 16,
                            **tiles,
                            **flags,
                        },
                        num_warps=warps,
                        num_stages=stages,
                    )
                )
    return variants


def _merge(target: Target) -> Sequence[KernelVariant]:
    """With sinks and a residual, which the other forms leave out."""
    variants = []
    strides = ("stride_w", "stride_y", "stride_residual")
    sizes = ("num_sequences", "num_heads", "num_splits", "tokens", "width")
    for dtype in _DTYPES:
        for head_dim in _HEAD_DIMS:
            for name, is_one in (("one", True), ("many", False)):
                tiles = merge_tiles(target, head_dim, is_one=is_one)
                warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
                typed = ("w_YD_ptr", "y_TY_ptr", "residual_TY_ptr", "sinks_H_ptr")
                floats = ("part_BHSD_ptr", "peak_BHS_ptr", "total_BHS_ptr", "part_GTY_ptr")
                variants.append(
                    KernelVariant(
                        dtype=dtype,
                        config=f"d{head_dim}-{name}",
                        pointers={
                            **dict.fromkeys(typed, dtype),
                            **dict.fromkeys(floats, "float32"),
                            "starts_B_ptr": "int32",
                        },
                        scalars=dict.fromkeys((*sizes, *strides), "i32"),
                        divisible=frozenset({"width", *strides}),
                        constants={
                            "V_HEAD_DIM": head_dim,
                            "BLOCK_DV": head_dim,
                            "GROUPS": 1,
                            "IS_ONE": is_one,
                            "HAS_SINKS": True,
                            "HAS_RESIDUAL": True,
                            **tiles,
                        },
                        num_warps=warps,
                        num_stages=stages,
                    )
                )
    return variants


def _sum(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config="residual",
            pointers={
                "part_GTY_ptr": "float32",
                "y_TY_ptr": dtype,
                "residual_TY_ptr": dtype,
                "starts_B_ptr": "int32",
            },
            scalars=dict.fromkeys(
                ("groups", "tokens", "width", "stride_y", "stride_residual"), "i32"
            ),
            divisible=frozenset({"width", "stride_y", "stride_residual"}),
            constants={"BLOCK_Y": SUM_COLUMNS, "HAS_RESIDUAL": True},
            num_warps=2,
        )
        for dtype in ("bfloat16", "float16")
    )


KERNELS = (
    TritonKernel(
        name="attention_projection.one_pass", op="attention_projection", module=_MODULE,
        function="_attention_project_kernel", variants=_one_pass, uses_matrix_unit=True,
        sources=_SOURCES,
    ),
    TritonKernel(
        name="attention_projection.merge", op="attention_projection", module=_MODULE,
        function="_attention_merge_project_kernel", variants=_merge, uses_matrix_unit=True,
        sources=_SOURCES,
    ),
    TritonKernel(
        name="attention_projection.sum", op="attention_projection", module=_MODULE,
        function="_projection_sum_kernel", variants=_sum, uses_matrix_unit=False, sources=_SOURCES,
    ),
)  # fmt: skip
