"""The specialisations of the Triton attention over listed blocks that targets are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

GROUPED_ROWS = "hal_kernels.block_sparse_attention.grouped_rows"
HEAD_DIMS = (64, 128, 256)
LEAST_TILE = 16  # rows, and keys, that a matrix instruction takes
CACHE_STRIDES = tuple(
    f"stride_{cache}_{axis}" for cache in "kv" for axis in ("page", "row", "head")
)


def power_of_two(count: int) -> int:
    """The least one that is not smaller."""
    return 1 << (count - 1).bit_length()


def largest_factor(count: int) -> int:
    """The largest power of two that divides it."""
    return count & -count


# (rows, keys, warps) by head size up to, chosen so that nothing spills: see the evidence.
_NVIDIA_TILES = {64: (64, 64, 4), 128: (64, 64, 4), 256: (64, 32, 8)}
_WARP_MMA_TILES = {**_NVIDIA_TILES, 128: (64, 64, 8)}  # without wgmma or tcgen05
_CDNA_TILES = {64: (64, 16, 4), 128: (64, 16, 4), 256: (64, 16, 8)}
_RDNA_TILES = {64: (32, 32, 4), 128: (32, 16, 4), 256: (16, 16, 8)}
# The same of tiles of one query: 16 rows, and keys and values that nobody else reads. A step's keys
# in shared memory are what limits the blocks, so eight warps share them: as many bytes in flight
# as with four, and twice the warps to use them, each of half the registers.
_NVIDIA_QUERY_TILES = {64: (16, 64, 8), 128: (16, 64, 8), 256: (16, 32, 8)}
_CDNA_QUERY_TILES = {64: (16, 32, 4), 128: (16, 32, 4), 256: (16, 32, 4)}
_RDNA_QUERY_TILES = {64: (16, 32, 4), 128: (16, 16, 4), 256: (16, 16, 8)}


def _of_head(table: Mapping[int, tuple[int, int, int]], head_dim: int) -> tuple[int, int, int]:
    return table[next(size for size in table if head_dim <= size)]


def tile(target: Target, head_dim: int, *, is_query: bool) -> dict[str, int]:
    """Rows, keys and launch options; is_query: whether the rows are of one query."""
    if target.backend == "cuda":
        is_warp_mma = target.arch in ("sm_80", "sm_89", "sm_120")
        tall = _WARP_MMA_TILES if is_warp_mma else _NVIDIA_TILES
        rows, keys, warps = _of_head(_NVIDIA_QUERY_TILES if is_query else tall, head_dim)
    elif target.warp_size == 64:
        rows, keys, warps = _of_head(_CDNA_QUERY_TILES if is_query else _CDNA_TILES, head_dim)
    else:
        rows, keys, warps = _of_head(_RDNA_QUERY_TILES if is_query else _RDNA_TILES, head_dim)
    loads = 1 if target.backend == "hip" else 3 if is_query else 2  # in flight
    return {"rows": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": loads}


def tiles(
    target: Target, head_dim: int, group: int, *, query_block: int, key_block: int
) -> dict[str, int]:
    """Tile sizes and launch options: rows are queries times the heads of a cached head, and a tile
    lies in one block of queries and of keys."""
    heads = power_of_two(group)
    options = tile(target, head_dim, is_query=False)
    queries = min(max(options["rows"] // heads, 1), largest_factor(query_block))
    if queries * heads <= LEAST_TILE:
        options = tile(target, head_dim, is_query=True)
    del options["rows"]
    options["BLOCK_N"] = min(options["BLOCK_N"], largest_factor(key_block))
    return {"BLOCK_Q": queries, "BLOCK_G": max(heads, LEAST_TILE // queries), **options}


def _variant(target: Target, dtype: str, head_dim: int, query_block: int) -> KernelVariant:
    group = 16
    options = tiles(target, head_dim, group, query_block=query_block, key_block=64)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    strides = ("stride_q", "stride_out", *CACHE_STRIDES)
    integers = (
        "lists_LKS_ptr", "starts_B_ptr", "lengths_B_ptr", "table_BW_ptr", "list_starts_B_ptr",
    )  # fmt: skip
    return KernelVariant(
        dtype=dtype,
        config=f"d{head_dim}-{'token' if query_block == 1 else 'block'}",
        pointers={
            **dict.fromkeys(("q_TD_ptr", "k_NPKD_ptr", "v_NPKD_ptr", "out_TD_ptr"), dtype),
            **dict.fromkeys(integers, "int32"),
        },
        scalars={
            "scale": "fp32",
            **dict.fromkeys(("window", "num_kv_heads", "stride_table", *strides), "i32"),
        },
        divisible=frozenset(strides),
        constants={
            "GROUP": group,
            "QUERY_BLOCK": query_block,
            "KEY_BLOCK": 64,
            "PLACES": 16,
            "BLOCK_S": 16,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": head_dim,
            "BLOCK_D": head_dim,
            "BLOCK_DV": head_dim,
            "PAGE": 64,
            **options,
        },
        num_warps=warps,
        num_stages=stages,
    )


def _variants(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(target, dtype, head_dim, query_block)
        for dtype in ("bfloat16", "float16")
        for head_dim in HEAD_DIMS
        for query_block in (64, 1)
    )


KERNELS = (
    TritonKernel(
        name="block_sparse_attention.paged", op="block_sparse_attention",
        module="hal_kernels.block_sparse_attention.triton_kernels",
        function="_block_sparse_attention_kernel", variants=_variants, uses_matrix_unit=True,
        sources=(GROUPED_ROWS,),
    ),
)  # fmt: skip
