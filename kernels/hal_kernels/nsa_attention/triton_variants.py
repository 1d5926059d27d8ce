"""The specialisations of the Triton kernels of native sparse attention that targets compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.attention.triton_variants import merge_heads
from hal_kernels.block_sparse_attention.triton_variants import (
    CACHE_STRIDES,
    GROUPED_ROWS,
    LEAST_TILE,
    power_of_two,
    tiles,
)

_MODULE = "hal_kernels.nsa_attention.triton_kernels"
SELECTION = "hal_kernels.nsa_attention.selection"
SPLIT_ENTRIES = 512  # of one split of a decode, as are the next two
SPLIT_KEYS = 512
SPLIT_BLOCKS = 128
HEAD_DIMS = (128, 256)  # padded to one of them, so that the code is that of the evidence
PLACES = (16, 32)  # of a list
_GROUP = 16
_PAGE = 64
_INTEGERS = ("starts_B_ptr", "lengths_B_ptr", "table_BW_ptr")


def padded(count: int, sizes: Sequence[int]) -> int:
    """The least of the sizes that is not smaller."""
    return next(size for size in sizes if count <= size)


def row_tiles(
    target: Target, head_dim: int, group: int, *, is_query: bool, key_block: int = 64
) -> dict[str, int]:
    """Tile sizes of a branch; is_query: of tiles of one query."""
    block = 1 if is_query else 1 << 16
    options = tiles(target, head_dim, group, query_block=block, key_block=key_block)
    if is_query and target.arch == "gfx1100":
        options["num_warps"] = 4  # eight spill in heads of more than 128 values
    return options


# Keys of a tile of entries by architecture and head size, where those of a window would spill.
_ENTRY_KEYS = {("sm_100", 256): 64, ("sm_103", 256): 64, ("sm_120", 128): 32}


def entry_tiles(target: Target, head_dim: int, group: int, *, is_query: bool) -> dict[str, int]:
    """As `row_tiles`, of entries."""
    options = row_tiles(target, head_dim, group, is_query=is_query)
    if not is_query:
        options["BLOCK_N"] = _ENTRY_KEYS.get((target.arch, head_dim), options["BLOCK_N"])
    return options


def list_tiles(target: Target, places: int) -> dict[str, int]:
    """Query rows of a program that makes lists, and its warps: of short lists as many rows as give
    each thread two keys, 16 bytes. A long one is compared by four warps, or registers are few."""
    if places > PLACES[0]:
        return {"BLOCK_T": 1, "num_warps": 4}
    return {"BLOCK_T": 2 * target.warp_size // places, "num_warps": 1}


def select_tiles(
    target: Target, head_dim: int, group: int, *, ratio: int, overlap: int, places: int
) -> dict[str, int]:
    """Tile sizes of the choice: ratio entries begin in a block, which are multiplied at once for
    BLOCK_S blocks; overlap: strides of an entry."""
    is_long = places > PLACES[0]
    # Places times blocks are compared at once: with AMD's layouts, of one query.
    is_query = is_long and target.backend == "hip"
    options = row_tiles(target, head_dim, group, is_query=is_query)
    if is_long:
        options["num_warps"] = 8
    entries = max(LEAST_TILE, options.pop("BLOCK_N"), ratio)
    blocks = entries // ratio
    halo = max(power_of_two(max(overlap - 1, 1)), LEAST_TILE // blocks)
    return {"BLOCK_S": blocks, "HALO": halo, "BLOCK_C": places, **options}


def _variant(
    dtype: str,
    config: str,
    head_dim: int,
    options: dict[str, int],
    *,
    pointers: dict[str, str],
    integers: Sequence[str],
    scalars: Sequence[str],
    divisible: Sequence[str],
    constants: dict[str, Any],
) -> KernelVariant:
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={**pointers, **dict.fromkeys(integers, "int32")},
        scalars={"scale": "fp32", **dict.fromkeys((*scalars, *divisible), "i32")},
        divisible=frozenset(divisible),
        constants={
            "HEADS": 64,
            "GROUP": _GROUP,
            "HEAD_DIM": head_dim,
            "BLOCK_D": head_dim,
            "PAGE": _PAGE,
            **options,
            **constants,
        },
        num_warps=warps,
        num_stages=stages,
    )


def _sums(dtype: str, out: str, *tensors: str) -> dict[str, str]:
    """Dtypes of what a branch reads, writes and sums up."""
    return {
        **dict.fromkeys(tensors, dtype),
        **dict.fromkeys(("peak_THS_ptr", "total_THS_ptr"), "float32"),
        "out_ptr": out,
    }


def _entries(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            dtype,
            f"d{head_dim}-{'whole' if is_whole else 'split'}",
            head_dim,
            entry_tiles(target, head_dim, _GROUP, is_query=not is_whole),
            pointers=_sums(
                dtype, dtype if is_whole else "float32",
                "q_TD_ptr", "gates_TH_ptr", "k_NPKD_ptr", "v_NPKD_ptr",
            ),
            integers=_INTEGERS,
            scalars=("num_splits", "num_parts", "stride_gates", "stride_table"),
            divisible=("stride_q", "stride_out", *CACHE_STRIDES),
            constants={
                "V_HEAD_DIM": head_dim, "BLOCK_DV": head_dim, "SPLIT": SPLIT_ENTRIES,
                "LENGTH": 32, "STRIDE": 16, "IS_WHOLE": is_whole,
            },
        )
        for dtype in ("bfloat16", "float16")
        for head_dim in HEAD_DIMS
        for is_whole in (True, False)
    )  # fmt: skip


def _select(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            dtype,
            f"d{head_dim}-n{places}",
            head_dim,
            select_tiles(target, head_dim, _GROUP, ratio=4, overlap=2, places=places),
            pointers={
                **dict.fromkeys(("q_TD_ptr", "k_NPKD_ptr"), dtype),
                **dict.fromkeys(("peak_THS_ptr", "total_THS_ptr"), "float32"),
                "best_TKSC_ptr": "int64",
            },
            integers=_INTEGERS,
            scalars=(
                "split_blocks", "num_splits", "num_entry_splits", "num_parts", "num_kv_heads",
                "stride_table",
            ),
            divisible=("stride_q", "stride_k_page", "stride_k_row", "stride_k_head"),
            constants={"LENGTH": 32, "STRIDE": 16, "SELECT": 64, "INITIAL": 1, "LOCAL": 2},
        )
        for dtype in ("bfloat16", "float16")
        for head_dim in HEAD_DIMS
        for places in PLACES
    )  # fmt: skip


def _branches(target: Target) -> Sequence[KernelVariant]:
    """The selected blocks of a query, the window of a tile, and splits of either."""
    return tuple(
        _variant(
            dtype,
            f"d{head_dim}-{form}",
            head_dim,
            row_tiles(target, head_dim, _GROUP, is_query=form != "window"),
            pointers=_sums(
                dtype, "float32" if form == "split" else dtype,
                "q_TD_ptr", "gates_TH_ptr", "k_NPKD_ptr", "v_NPKD_ptr",
            ),
            integers=("lists_TKL_ptr", *_INTEGERS),
            scalars=(
                "window", "num_splits", "first_part", "num_parts", "num_kv_heads", "stride_gates",
                "stride_table",
            ),
            divisible=("stride_q", "stride_out", *CACHE_STRIDES),
            constants={
                "V_HEAD_DIM": head_dim, "BLOCK_DV": head_dim, "SPLIT": SPLIT_KEYS, "SELECT": 64,
                "PLACES": 16, "BRANCH": 2 if form == "window" else 1, "IS_WHOLE": form != "split",
            },
        )
        for dtype in ("bfloat16", "float16")
        for head_dim in HEAD_DIMS
        for form in ("selected", "window", "split")
    )  # fmt: skip


def _lists(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for places in PLACES:
        tiles = list_tiles(target, places)
        warps = tiles.pop("num_warps")
        variants.append(
            KernelVariant(
                dtype="",
                config=f"n{places}",
                pointers={"best_TKSC_ptr": "int64", "lists_TKL_ptr": "int32"},
                scalars={"count": "i32", "num_splits": "i32"},
                constants={"BLOCK_C": places, "PLACES": places, **tiles},
                num_warps=warps,
            )
        )
    return variants


def _merge(target: Target) -> Sequence[KernelVariant]:
    counts = ("entry_parts", "selected_parts", "window_parts")
    return tuple(
        KernelVariant(
            dtype="",
            config=f"d{head_dim}{suffix}",
            pointers={
                **dict.fromkeys(("part_THSD_ptr", "peak_THS_ptr", "total_THS_ptr"), "float32"),
                **dict.fromkeys(("gates_TH_ptr", "out_TD_ptr"), dtype),
            },
            scalars=dict.fromkeys((*counts, "heads", "stride_out", "stride_gates"), "i32"),
            divisible=frozenset({"stride_out"}),
            constants={
                "V_HEAD_DIM": head_dim,
                "BLOCK_DV": head_dim,
                "BLOCK_H": merge_heads(target, head_dim),
            },
            num_warps=1,
        )
        for dtype, suffix in (("bfloat16", ""), ("float16", "-fp16"))
        for head_dim in HEAD_DIMS
    )


KERNELS = (
    TritonKernel(
        name="nsa_attention.entries", op="nsa_attention", module=_MODULE,
        function="_nsa_entries_kernel", variants=_entries, uses_matrix_unit=True,
        sources=(GROUPED_ROWS,),
    ),
    TritonKernel(
        name="nsa_attention.select", op="nsa_attention", module=_MODULE,
        function="_nsa_select_kernel", variants=_select, uses_matrix_unit=True,
        sources=(GROUPED_ROWS, SELECTION),
    ),
    TritonKernel(
        name="nsa_attention.lists", op="nsa_attention", module=_MODULE,
        function="_nsa_lists_kernel", variants=_lists, uses_matrix_unit=False,
        sources=(SELECTION,),
    ),
    TritonKernel(
        name="nsa_attention.branch", op="nsa_attention", module=_MODULE,
        function="_nsa_branch_kernel", variants=_branches, uses_matrix_unit=True,
        sources=(GROUPED_ROWS,),
    ),
    TritonKernel(
        name="nsa_attention.merge", op="nsa_attention", module=_MODULE,
        function="_nsa_merge_kernel", variants=_merge, uses_matrix_unit=False,
        sources=(GROUPED_ROWS,),
    ),
)  # fmt: skip
