"""The specialisations of the Triton attention over window and entries that targets compile."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.mla_attention.packed_tiles import UNPACKING, packed_tiles
from hal_kernels.mla_attention.triton_variants import PACKED_ROWS, SHARED_ROWS, merge_variant, tiles

V41_MAIN = ("v41_528", "fp4_288")  # rows of entries beside a window in v41_528
SPLIT_ENTRIES = 512  # compressed entries of one split of a decode
MERGE = (
    "l512-sinks"  # what merges the splits of a decode, compiled with sinks, which stand for none
)
HEADS_TOGETHER = 16  # that share a program, however many there are: 512 sums of each are kept


def is_whole(*, is_decode: bool, top_k: int, compress_ratio: int) -> bool:
    """Whether one program sees all keys of a query, so that no part is written to be merged: of a
    prompt, which has programs enough, and whose parts would fill the memory; of a decode over the
    window alone, or over lists of one split."""
    return not is_decode or not compress_ratio or 0 < top_k <= SPLIT_ENTRIES


def _variant(target: Target, name: str, phase: str, *, top_k: int, ratio: int) -> KernelVariant:
    is_packed, is_whole = name == "v4_584", phase == "prefill"
    options = tiles(target, name, HEADS_TOGETHER)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    dtype = "float16" if name == "fp16" else "bfloat16"
    cache = "uint8" if is_packed else dtype
    form = "sparse" if top_k else "dense"
    strides = (
        "num_splits", "stride_q", "stride_indices", "stride_window_table", "stride_main_table",
        "stride_window_page", "stride_window_row", "stride_main_page", "stride_main_row",
    )  # fmt: skip
    integers = (
        "indices_TK_ptr", "starts_B_ptr", "lengths_B_ptr", "window_table_BW_ptr",
        "main_table_BW_ptr",
    )  # fmt: skip
    divisible = {"stride_q", "stride_indices", *(s for s in strides if s.endswith(("page", "row")))}
    return KernelVariant(
        dtype=dtype,
        config=f"{name}-{form}-{phase}",
        pointers={
            "q_TD_ptr": dtype,
            "window_ptr": cache,
            "window_tails_ptr": dtype,
            "main_ptr": cache,
            "main_tails_ptr": dtype,
            "sinks_H_ptr": dtype,
            "out_ptr": dtype if is_whole else "float32",
            "peak_THS_ptr": "float32",
            "total_THS_ptr": "float32",
            **dict.fromkeys(integers, "int32"),
        },
        scalars={"scale": "fp32", **dict.fromkeys(strides, "i32")},
        divisible=frozenset(divisible),
        constants={
            "HEADS": 64,
            "DIM": 512,
            "TOP_K": top_k,
            "WINDOW": 128,
            "RATIO": ratio,
            "CHUNKS": 512 // options["CHUNK"],
            "SPLIT": SPLIT_ENTRIES,
            "PAGE": 64,
            "HAS_SINKS": True,
            "IS_WHOLE": is_whole,
            "WINDOW_IS_PACKED": is_packed,
            "MAIN_IS_PACKED": is_packed,
            **options,
        },
        num_warps=warps,
        num_stages=stages,
    )


def _variants(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(target, name, phase, top_k=top_k, ratio=ratio)
        for name in ("bf16", "fp16", "v4_584")
        for phase in ("decode", "prefill")
        for top_k, ratio in ((512, 4), (0, 128))
    )


def _v41_variant(target: Target, main: str, phase: str, *, top_k: int, ratio: int) -> KernelVariant:
    options, is_whole = packed_tiles(target), phase == "prefill"
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    strides = (
        "num_splits", "stride_q", "stride_indices", "stride_window_table", "stride_main_table",
        "stride_window_page", "stride_main_page",
    )  # fmt: skip
    integers = (
        "indices_TK_ptr", "starts_B_ptr", "lengths_B_ptr", "window_table_BW_ptr",
        "main_table_BW_ptr",
    )  # fmt: skip
    return KernelVariant(
        dtype="bfloat16",
        config=f"{main}-{'sparse' if top_k else 'dense'}-{phase}",
        pointers={
            "q_TD_ptr": "bfloat16",
            "window_ptr": "uint8",
            "main_ptr": "uint8",
            "sinks_H_ptr": "bfloat16",
            "out_ptr": "bfloat16" if is_whole else "float32",
            "peak_THS_ptr": "float32",
            "total_THS_ptr": "float32",
            **dict.fromkeys(integers, "int32"),
        },
        scalars={"scale": "fp32", **dict.fromkeys(strides, "i32")},
        divisible=frozenset(
            {"stride_q", "stride_indices", "stride_window_page", "stride_main_page"}
        ),
        constants={
            "HEADS": 64,
            "DIM": 512,
            "TOP_K": top_k,
            "WINDOW": 128,
            "RATIO": ratio,
            "CHUNKS": 512 // options["CHUNK"],
            "SPLIT": SPLIT_ENTRIES,
            "PAGE": 64,
            "HAS_SINKS": True,
            "IS_WHOLE": is_whole,
            "MAIN_IS_FP4": main == "fp4_288",
            **options,
        },
        num_warps=warps,
        num_stages=stages,
    )


def _v41(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _v41_variant(target, main, phase, top_k=top_k, ratio=ratio)
        for main in V41_MAIN
        for phase in ("decode", "prefill")
        for top_k, ratio in ((512, 4), (0, 128))
    )


def _merge(target: Target) -> Sequence[KernelVariant]:
    return (merge_variant(target, MERGE, width=512, has_sinks=True),)


KERNELS = (
    TritonKernel(
        name="compressed_attention.paged", op="compressed_attention",
        module="hal_kernels.compressed_attention.triton_kernels",
        function="_compressed_attention_kernel", variants=_variants, uses_matrix_unit=True,
        sources=(SHARED_ROWS, PACKED_ROWS, UNPACKING),
    ),
    TritonKernel(
        name="compressed_attention.v41", op="compressed_attention",
        module="hal_kernels.compressed_attention.v41_kernels",
        function="_compressed_attention_v41_kernel", variants=_v41, uses_matrix_unit=True,
        sources=(SHARED_ROWS, PACKED_ROWS, UNPACKING),
    ),
    TritonKernel(
        name="compressed_attention.merge", op="compressed_attention", module=SHARED_ROWS,
        function="_merge_splits_kernel", variants=_merge, uses_matrix_unit=False,
    ),
)  # fmt: skip
