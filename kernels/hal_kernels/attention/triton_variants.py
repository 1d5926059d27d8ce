"""The specialisations of the Triton attention kernels that targets are compiled for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.kv_write.cache_dtypes import compiled_fp8

_MODULE = "hal_kernels.attention.triton_kernels"
CACHED = ("hal_kernels.attention.cached_values", "hal_kernels.kv_write.packed_rows")
SPLIT_KEYS = 512  # keys of one split of a decode: what its programs share out among themselves
_HEAD_DIMS = (64, 128, 256)
MERGE_WARPS = 1  # of the values of `merge_heads`, split by split
DECODE_ROWS = (16, 32, 64, 128)  # query heads of a cached head, padded: a tile of a decode
_CACHE_STRIDES = tuple(
    f"stride_{cache}_{axis}" for cache in "kv" for axis in ("page", "row", "head")
)


# (rows, keys, warps) by head size up to, chosen so that nothing spills: see the evidence.
_CDNA_TILES = {64: (128, 16, 8), 128: (128, 16, 8), 256: (64, 16, 8)}
_CDNA_WINDOW_TILES = {64: (64, 16, 4), 128: (64, 16, 4), 256: (64, 16, 8)}
_RDNA_TILES = {64: (128, 32, 8), 128: (128, 16, 8), 256: (16, 16, 4)}
_RDNA_WINDOW_TILES = {64: (32, 32, 4), 128: (64, 16, 8), 256: (16, 16, 4)}
# Each tile of queries reads all keys before it, or those of a window; without a window tall tiles
# halve what is read, and where shared memory holds one block of keys only (sm_89, sm_120), eight
# warps are resident in place of four. 128 rows are also what eight warps multiply without two of
# them doing the same.
_NVIDIA_TILES = {64: (128, 64, 8), 128: (128, 64, 8), 256: (64, 32, 8)}
_NVIDIA_WINDOW_TILES = {64: (64, 32, 4), 128: (64, 32, 4), 256: (64, 32, 8)}
# Sums lie in tensor memory there: half as many keys leave registers for a second block.
_TCGEN05_TILES = _NVIDIA_TILES | {128: (128, 32, 8)}

# Of caches of FP8, which are decoded in registers, where the tiles of 16 bits spill or leave a
# thread less than 16 bytes: (architecture, whether a window) -> tiles of a prefill, and
# (architecture, head size, rows) -> warps of a decode.
_FP8_TILES = {
    ("sm_80", False): {128: (64, 32, 8)},
    ("sm_80", True): {128: (64, 32, 8)},
    ("sm_100", False): {128: _NVIDIA_TILES[128]},
    ("sm_100", True): {64: (64, 32, 8)},
    ("sm_103", False): {128: _NVIDIA_TILES[128]},
    ("sm_103", True): {64: (64, 32, 8)},
}
_FP8_DECODE_WARPS = {
    ("sm_89", 128, 64): 16,
    ("sm_90", 256, 32): 16,
    ("sm_120", 256, 16): 8,
    **{(arch, 64, 16): 2 for arch in ("gfx90a", "gfx942", "gfx950")},
}

# Where many rows spill by a step that is further ahead.
_FEW_STAGES = ("sm_89", "sm_100", "sm_103", "sm_120")
_SMALL_SHARED = ("sm_89", "sm_120")  # 100 KiB a multiprocessor: see aot/occupancy_limits.json


def prefill_tiles(
    target: Target, head_dim: int, *, has_window: bool, is_fp8: bool = False
) -> dict[str, int]:
    """Tile sizes and launch options: what fits in registers and shared memory. is_fp8: of keys and
    values that are decoded."""
    if target.backend == "cuda":
        table = _TCGEN05_TILES if target.arch in ("sm_100", "sm_103") else _NVIDIA_TILES
        table = _NVIDIA_WINDOW_TILES if has_window else table
    elif target.warp_size == 64:
        table = _CDNA_WINDOW_TILES if has_window else _CDNA_TILES
    else:
        table = _RDNA_WINDOW_TILES if has_window else _RDNA_TILES
    if is_fp8:
        table = table | _FP8_TILES.get((target.arch, has_window), {})
    rows, keys, warps = table[next(size for size in table if head_dim <= size)]
    stages = 1 if target.backend == "hip" else 2
    return {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


def padded_head(head_dim: int) -> int:
    """The compiled head size that holds so many values. Raises StopIteration beyond the largest."""
    return next(size for size in _HEAD_DIMS if head_dim <= size)


def decode_rows(head_dim: int, form: str, *, is_fp8: bool) -> tuple[int, ...]:
    """Rows that a decode in a form is compiled for: the sums of 128 heads of 256 values fit no
    registers, and over caches of FP8 only the plain form has more than 16."""
    if is_fp8 and form != "plain":
        return DECODE_ROWS[:1]
    return tuple(rows for rows in DECODE_ROWS if head_dim <= 128 or rows <= 64)


def group_rows(group: int) -> int:
    """Rows of a tile for so many query heads of a cached head: what a matrix instruction takes at
    least, or the next power of two."""
    return max(DECODE_ROWS[0], 1 << (group - 1).bit_length())


def decode_tiles(
    target: Target, head_dim: int, rows: int = 16, *, is_fp8: bool = False
) -> dict[str, int]:
    """As `prefill_tiles`; a decode reads keys once, so more loads are kept in flight: 32 keys of
    128 values as many bytes as 64, by nearly twice the warps of fewer registers each. Where shared
    memory is what limits the blocks, and on CDNA, half as many keys let nearly twice the warps in.
    rows: of `group_rows`; the sums of many are shared out among eight warps."""
    is_hip, is_many = target.backend == "hip", rows > DECODE_ROWS[0]
    is_cdna = is_hip and target.warp_size == 64
    is_tcgen05 = target.arch in ("sm_100", "sm_103")
    keys = 64 if head_dim <= 64 and not is_cdna and not (is_tcgen05 and is_many) else 32
    if is_cdna:
        is_halved = is_many or (head_dim > 64 and not is_fp8)
    else:
        is_halved = is_hip or target.arch in _SMALL_SHARED
    keys = keys // 2 if is_halved else keys
    stages = 1 if is_hip else 2 if target.arch in _FEW_STAGES and is_many else 3
    # The registers of many rows are few: a step that is wider or further ahead spills.
    warps = 8 if rows > (32 if is_cdna and head_dim <= 64 else DECODE_ROWS[0]) else 4
    if is_fp8:
        warps = _FP8_DECODE_WARPS.get((target.arch, padded_head(head_dim), rows), warps)
    return {"BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


def _shared(
    dtype: str, cache: str, head_dim: int, pointers: Mapping[str, str], scalars: Sequence[str]
) -> dict[str, Any]:
    """cache: dtype of keys and values. pointers, scalars: beside those that both kernels have."""
    return {
        "dtype": dtype,
        "pointers": {
            "q_TD_ptr": dtype,
            **dict.fromkeys(("k_NPKD_ptr", "v_NPKD_ptr"), cache),
            **pointers,
            **dict.fromkeys(("starts_B_ptr", "lengths_B_ptr", "table_BW_ptr"), "int32"),
        },
        "scalars": {
            "scale": "fp32",
            **dict.fromkeys(("stride_q", "stride_table", *_CACHE_STRIDES), "i32"),
            **dict.fromkeys(scalars, "i32"),
        },
        "divisible": frozenset({"stride_q", *_CACHE_STRIDES} | ({"stride_out"} & {*scalars})),
    }


def _sizes(head_dim: int) -> dict[str, int]:
    return {
        **dict.fromkeys(("HEAD_DIM", "V_HEAD_DIM", "BLOCK_D", "BLOCK_DV"), head_dim),
        "PAGE": 16,
    }


def _caches(target: Target) -> Sequence[tuple[str, str, bool]]:
    """(dtype of the activations, of the cache, whether that is FP8)."""
    return [
        (dtype, compiled_fp8(target) if is_fp8 else dtype, is_fp8)
        for dtype in ("bfloat16", "float16")
        for is_fp8 in (False, True)
    ]


# What a softmax has more than its scores, as constants. A form stands for those with less: one with
# a window has sinks.
FORMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"WINDOW": 0, "SOFTCAP": 0.0, "HAS_SINKS": False},
    "window-sinks": {"WINDOW": 128, "SOFTCAP": 0.0, "HAS_SINKS": True},
    "softcap": {"WINDOW": 0, "SOFTCAP": 50.0, "HAS_SINKS": False},
    "window-softcap": {"WINDOW": 128, "SOFTCAP": 50.0, "HAS_SINKS": True},
}


def form_of(*, has_window: bool, has_sinks: bool, has_softcap: bool) -> str:
    """The form that stands for a request: a name of `FORMS`."""
    if has_window or has_sinks:
        return "window-softcap" if has_softcap else "window-sinks"
    return "softcap" if has_softcap else "plain"


def tiles_of_form(
    target: Target, head_dim: int, form: str, *, is_fp8: bool = False
) -> dict[str, int]:
    """Tiles of a prefill in a form: those it is compiled, judged and launched with. Sinks without a
    window take the tiles of a window: no form is compiled with sinks alone. is_fp8: of caches."""
    has_window = bool(FORMS[form]["WINDOW"])
    return prefill_tiles(target, head_dim, has_window=has_window, is_fp8=is_fp8)


def prefill_config(head_dim: int, form: str, *, is_fp8: bool) -> str:
    """The name of a prefill's variant."""
    return f"d{head_dim}-{form}" + ("-fp8" if is_fp8 else "")


def decode_config(head_dim: int, form: str, rows: int, *, is_fp8: bool) -> str:
    """The name of a decode's variant."""
    of_rows = f"-h{rows}" if rows > DECODE_ROWS[0] else ""
    return f"d{head_dim}-{form}{of_rows}" + ("-fp8" if is_fp8 else "")


def _prefill(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for (dtype, cache, is_fp8), head_dim, form in itertools.product(
        _caches(target), _HEAD_DIMS, FORMS
    ):
        tiles = tiles_of_form(target, head_dim, form, is_fp8=is_fp8)
        warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
        common = _shared(
            dtype, cache, head_dim, dict.fromkeys(("out_TD_ptr", "sinks_H_ptr"), dtype),
            ("stride_out",),
        )  # fmt: skip
        common["scalars"] |= {"v_scale": "fp32"}
        variants.append(
            KernelVariant(
                config=prefill_config(head_dim, form, is_fp8=is_fp8),
                constants={
                    "GROUP": 4, "IS_CAUSAL": True, **_sizes(head_dim), **tiles, **FORMS[form],
                },
                num_warps=warps,
                num_stages=stages,
                **common,
            )
        )  # fmt: skip
    return variants


def _decode(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for (dtype, cache, is_fp8), head_dim, rows, form in itertools.product(
        _caches(target), _HEAD_DIMS, DECODE_ROWS, FORMS
    ):
        if rows not in decode_rows(head_dim, form, is_fp8=is_fp8):
            continue
        tiles = decode_tiles(target, head_dim, rows, is_fp8=is_fp8)
        warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
        parts = dict.fromkeys(("part_BHSD_ptr", "peak_BHS_ptr", "total_BHS_ptr"), "float32")
        common = _shared(dtype, cache, head_dim, parts, ("num_heads", "num_splits"))
        flags = {k: v for k, v in FORMS[form].items() if k != "HAS_SINKS"}
        variants.append(
            KernelVariant(
                config=decode_config(head_dim, form, rows, is_fp8=is_fp8),
                constants={
                    "GROUP": 4 if rows == DECODE_ROWS[0] else rows * 3 // 4,
                    "BLOCK_H": rows, "SPLIT": SPLIT_KEYS, **_sizes(head_dim), **tiles, **flags,
                },
                num_warps=warps,
                num_stages=stages,
                **common,
            )
        )  # fmt: skip
    return variants


def merge_heads(target: Target, head_dim: int) -> int:
    """Heads that one warp merges, so that each of its threads loads four values, 16 bytes."""
    return max(1, 4 * target.warp_size // head_dim)


def _merge(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"d{head_dim}" + ("-sinks" if has_sinks else ""),
            pointers={
                "part_BHSD_ptr": "float32",
                "peak_BHS_ptr": "float32",
                "total_BHS_ptr": "float32",
                "out_TD_ptr": dtype,
                "sinks_H_ptr": dtype,
                "starts_B_ptr": "int32",
            },
            scalars={
                **dict.fromkeys(("num_heads", "num_splits", "stride_out"), "i32"),
                "v_scale": "fp32",
            },
            divisible=frozenset({"stride_out"}),
            constants={
                "BLOCK_H": merge_heads(target, head_dim),
                "V_HEAD_DIM": head_dim,
                "BLOCK_DV": head_dim,
                "HAS_SINKS": has_sinks,
            },
            num_warps=MERGE_WARPS,
        )
        for dtype in ("bfloat16", "float16")
        for head_dim in _HEAD_DIMS
        for has_sinks in (False, True)
    )


KERNELS = (
    TritonKernel(
        name="attention.prefill", op="attention", module=_MODULE,
        function="_attention_prefill_kernel", variants=_prefill, uses_matrix_unit=True,
        sources=CACHED,
    ),
    TritonKernel(
        name="attention.decode", op="attention", module=_MODULE,
        function="_attention_decode_kernel", variants=_decode, uses_matrix_unit=True,
        sources=CACHED,
    ),
    TritonKernel(
        name="attention.merge", op="attention", module=_MODULE,
        function="_attention_merge_kernel", variants=_merge, uses_matrix_unit=False,
    ),
)  # fmt: skip
