"""The specialisations of the Triton latent attention that targets are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.ops.kv_formats import PLAIN_FORMATS
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.mla_attention.packed_tiles import REGISTERS, UNPACKING

_MODULE = "hal_kernels.mla_attention.triton_kernels"
SHARED_ROWS = "hal_kernels.mla_attention.shared_rows"
PACKED_ROWS = "hal_kernels.kv_write.packed_rows"
SPLIT_KEYS = 512  # least keys of one split of a decode: what its programs share out
MERGE = "l512"  # what merges the splits of a decode, compiled
_UNKNOWN_UNITS = 128  # multiprocessors where nobody says how many there are


def chunks(columns: int, most: int) -> dict[str, int]:
    """Chunks of at most so many columns, a power of two, in which a row is multiplied."""
    padded = max(16, 1 << (columns - 1).bit_length())
    size = min(padded, most)
    return {"CHUNK": size, "CHUNKS": padded // size}


def block_heads(kv_format: str, heads: int) -> int:
    """Heads that share a program, and each row that it reads: 32 where there are as many. Rows that
    are unpacked pass through the registers too, and leave room for the sums of 16."""
    return 32 if kv_format in PLAIN_FORMATS and heads > 16 else 16


def tiles(
    target: Target, kv_format: str, heads: int, *, is_listed_prompt: bool = False
) -> dict[str, Any]:
    """Tile sizes and launch options of a kernel of so many heads, chosen so that nothing spills:
    see the evidence. is_listed_prompt: of a prompt whose queries attend to lists."""
    is_packed, rows = kv_format not in PLAIN_FORMATS, block_heads(kv_format, heads)
    if target.backend == "hip":
        is_cdna = target.warp_size == 64
        # RDNA 3 holds operands twice: its columns are fewer, but for rows that have no rotary part
        # beside them, and packed rows are unpacked once for both products, or registers spill.
        is_rdna3 = target.arch.startswith("gfx11")
        chunk = 64 if is_rdna3 and kv_format != "v4_584" else 128
        # With the list of a prompt's query beside, 16 heads fit there by four warps only.
        is_few = kv_format == "fp16" and rows == 16 and is_listed_prompt
        is_halved = target.arch == "gfx1100" and is_few
        return {
            "BLOCK_H": rows,
            "CHUNK": 512 if is_cdna and not is_packed else chunk,
            "BLOCK_N": 16,  # of 32 keys a step, CDNA's registers let half as many warps in
            # Queries held beside rows of v4_584 leave CDNA registers for half the warps.
            "RELOADS_Q": not is_cdna or kv_format == "v4_584",
            "REGISTERS": REGISTERS["hip"] if is_rdna3 and is_packed else "",
            "num_warps": 4 if is_cdna or is_halved else 8,
            "num_stages": 1,
        }
    return {
        "BLOCK_H": rows,
        "CHUNK": 512,
        "BLOCK_N": 16 if is_packed else 32,
        "RELOADS_Q": False,
        "REGISTERS": "",
        # Sums of 16 heads by four warps take twice the registers a thread, and half the warps fit.
        "num_warps": 8,
        "num_stages": 2,
    }


def count_splits(keys: int, heads: int, options: Mapping[str, Any], units: int) -> int:
    """Splits that a decode of at most so many keys is launched with: each of SPLIT_KEYS, until the
    programs of one sequence alone are eight warps for each of the device's `units` (0: not known).
    More would fill it no better, and their sums are written, read and merged one after the other.

    It depends on what a batch may have at most, and on nothing in it: a captured graph stays right.
    """
    blocks = -(-heads // options["BLOCK_H"])
    most: int = -(-8 * (units or _UNKNOWN_UNITS) // (options["num_warps"] * blocks))
    return max(1, min(most, -(-keys // SPLIT_KEYS)))


def config_of(kv_format: str, *, is_sparse: bool, phase: str, heads: int) -> str:
    """Name of the variant that a call of so many heads runs, but for those of `is_wide`."""
    name = f"{kv_format}-{'sparse' if is_sparse else 'dense'}-{phase}"
    return name + ("-h32" if block_heads(kv_format, heads) > 16 else "")


def is_wide(arch: str, heads: int, rope_dim: int) -> bool:
    """Whether 64 heads share a program: 64 rows are what Hopper's wgmma multiplies, and a tile of
    fewer leaves it for mma.sync."""
    return arch == "sm_90" and heads % 64 == 0 and rope_dim > 0


def wide_tiles(kv_format: str) -> dict[str, Any]:
    """Tile sizes and launch options of a program of 64 heads. Shared memory holds the query and two
    tiles of keys; packed ones pass through registers a few columns at a time."""
    is_packed = kv_format not in PLAIN_FORMATS
    return {
        "BLOCK_H": 64,
        "CHUNK": 64 if is_packed else 256,
        "BLOCK_N": 64,
        "num_warps": 8,
        "num_stages": 2,
    }


def _variant(
    config: str, kv_format: str, phase: str, options: dict[str, Any], *, top_k: int
) -> KernelVariant:
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    is_packed, is_whole = kv_format == "fp8_656", phase == "prefill"
    dtype = "float16" if kv_format == "fp16" else "bfloat16"
    integers = ("starts_B_ptr", "lengths_B_ptr", "table_BW_ptr", "indices_TK_ptr")
    strides = (
        "num_splits", "stride_q", "stride_indices", "stride_table", "stride_page", "stride_row",
        "stride_scale_page", "stride_scale_row", "scale_start", "stride_tail_page",
        "stride_tail_row", "tail_start",
    )  # fmt: skip
    divisible = {"stride_q", "stride_indices", "stride_page", "stride_row", "scale_start"}
    if is_packed:  # a row of 656 bytes has its scales at 128 floats, its tail at 264 values
        divisible |= {"stride_scale_page", "stride_tail_page"}
    else:
        divisible |= {"stride_tail_page", "stride_tail_row", "tail_start"}
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={
            "q_TD_ptr": dtype,
            "rows_ptr": "uint8" if is_packed else dtype,
            "scales_ptr": "float32" if is_packed else dtype,
            "tails_ptr": dtype,
            "out_ptr": dtype if is_whole else "float32",
            "peak_THS_ptr": "float32",
            "total_THS_ptr": "float32",
            **dict.fromkeys(integers, "int32"),
        },
        scalars={"scale": "fp32", **dict.fromkeys(strides, "i32")},
        divisible=frozenset(divisible),
        constants={
            "HEADS": 128,
            "RANK": 512,
            "ROPE": 64,
            "TOP_K": top_k,
            "CHUNKS": 512 // options["CHUNK"],
            "BLOCK_R": 64,
            "SPLIT": SPLIT_KEYS,
            "PAGE": 64,
            "IS_CAUSAL": True,
            "IS_PACKED": is_packed,
            "IS_WHOLE": is_whole,
            **options,
        },
        num_warps=warps,
        num_stages=stages,
    )


_FORMS = tuple(
    (kv_format, phase, top_k)
    for kv_format in ("bf16", "fp16", "fp8_656")
    for phase, top_k in (("decode", 2048), ("decode", 0), ("prefill", 2048), ("prefill", 0))
)


def _variants(target: Target) -> Sequence[KernelVariant]:
    named = {}
    for heads in (16, 128):
        for kv_format, phase, top_k in _FORMS:
            config = config_of(kv_format, is_sparse=bool(top_k), phase=phase, heads=heads)
            is_listed_prompt = phase == "prefill" and top_k > 0
            options = tiles(target, kv_format, heads, is_listed_prompt=is_listed_prompt)
            named[config] = _variant(config, kv_format, phase, options, top_k=top_k)
    return tuple(named.values())


def _wide(target: Target) -> Sequence[KernelVariant]:
    if not is_wide(target.arch, 64, 64):
        return ()
    return tuple(
        _variant(
            config_of(kv_format, is_sparse=bool(top_k), phase=phase, heads=16),
            kv_format, phase, wide_tiles(kv_format), top_k=top_k,
        )
        for kv_format, phase, top_k in _FORMS
    )  # fmt: skip


def merge_warps(target: Target) -> int:
    """Warps that take the values of a head: 512 of float32, four for each thread."""
    return 128 // target.warp_size


def merge_variant(target: Target, config: str, *, width: int, has_sinks: bool) -> KernelVariant:
    """The merge of splits of so many values a head."""
    return KernelVariant(
        dtype="",
        config=config,
        pointers={
            "part_THSL_ptr": "float32",
            "peak_THS_ptr": "float32",
            "total_THS_ptr": "float32",
            "out_TD_ptr": "bfloat16",
            "sinks_H_ptr": "bfloat16",
        },
        scalars=dict.fromkeys(("num_splits", "stride_out"), "i32"),
        divisible=frozenset({"stride_out"}),
        constants={"WIDTH": width, "BLOCK_L": width, "HAS_SINKS": has_sinks},
        num_warps=merge_warps(target),
    )


def _merge(target: Target) -> Sequence[KernelVariant]:
    return (merge_variant(target, MERGE, width=512, has_sinks=False),)


KERNELS = (
    TritonKernel(
        name="mla_attention.paged", op="mla_attention", module=_MODULE,
        function="_mla_attention_kernel", variants=_variants, uses_matrix_unit=True,
        sources=(SHARED_ROWS, PACKED_ROWS, UNPACKING),
    ),
    TritonKernel(
        name="mla_attention.wide", op="mla_attention",
        module="hal_kernels.mla_attention.wide_kernels", function="_mla_attention_wide_kernel",
        variants=_wide, uses_matrix_unit=True, sources=(_MODULE, SHARED_ROWS, PACKED_ROWS),
    ),
    TritonKernel(
        name="mla_attention.merge", op="mla_attention", module=SHARED_ROWS,
        function="_merge_splits_kernel", variants=_merge, uses_matrix_unit=False,
    ),
)  # fmt: skip
