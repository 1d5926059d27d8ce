"""The specialisations of the Triton indexer in pieces that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.index_top_k.triton_variants import tiles

_MODULE = "hal_kernels.index_selection.triton_kernels"
_RADIX = "hal_kernels.index_top_k.triton_kernels"
MAXIMA_BLOCKS = 256  # candidate blocks of one program that takes their maxima
VISIBLE_QUERIES = 256  # of one program
MARK_BLOCK = 1024  # candidate blocks of one step


def _merge(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for config, top_k, pool, is_marked in (
        ("plain", 2048, 1, False),
        ("pools", 2048, 16, False),
        ("limited", 512, 1, True),
    ):
        options = tiles(pool)
        warps = options.pop("num_warps")
        floats = ("scores_TE_ptr", "kept_scores_TK_ptr", "new_scores_TK_ptr")
        integers = ("marks_TN_ptr", "visible_T_ptr", "kept_TK_ptr", "new_TK_ptr", "out_TC_ptr")
        scalars = (
            "offset", "size", "entries", "kept", "stamp", "stride_scores", "stride_marks",
            "stride_out",
        )  # fmt: skip
        variants.append(
            KernelVariant(
                dtype="",
                config=config,
                pointers={**dict.fromkeys(floats, "float32"), **dict.fromkeys(integers, "int32")},
                scalars=dict.fromkeys(scalars, "i32"),
                divisible=frozenset({"offset", "size", "kept", "stride_scores", "stride_marks"}),
                constants={
                    "TOP_K": top_k,
                    "POOL": pool,
                    "BLOCK_P": pool,
                    "IS_MARKED": is_marked,
                    **options,
                },
                num_warps=warps,
            )
        )
    return variants


def _visible(target: Target) -> Sequence[KernelVariant]:
    pointers = dict.fromkeys(("starts_B_ptr", "lengths_B_ptr", "visible_T_ptr"), "int32")
    return (
        KernelVariant(
            dtype="",
            config="queries",
            pointers=pointers,
            scalars={},
            constants={"TOKENS": 4, "BLOCK": VISIBLE_QUERIES},
        ),
    )


def _mark(target: Target) -> Sequence[KernelVariant]:
    scalars = ("offset", "size", "stamp", "stride_candidates", "stride_marks")
    return (
        KernelVariant(
            dtype="",
            config="candidates",
            pointers=dict.fromkeys(("candidates_TN_ptr", "marks_TN_ptr"), "int32"),
            scalars=dict.fromkeys(scalars, "i32"),
            divisible=frozenset(scalars) - {"stamp"},
            constants={"CANDIDATES": 2048, "BLOCK": MARK_BLOCK},
        ),
    )


def _maxima(target: Target) -> Sequence[KernelVariant]:
    return (
        KernelVariant(
            dtype="",
            config="blocks",
            pointers={
                "scores_TE_ptr": "float32",
                "visible_T_ptr": "int32",
                "maxima_TN_ptr": "float32",
                "counts_T_ptr": "int32",
            },
            scalars=dict.fromkeys(("offset", "blocks", "stride_scores"), "i32"),
            divisible=frozenset({"offset", "stride_scores"}),
            constants={"BLOCK_N": MAXIMA_BLOCKS},
        ),
    )


KERNELS = (
    TritonKernel(
        name="index_selection.merge", op="index_selection", module=_MODULE,
        function="_merge_kernel", variants=_merge, uses_matrix_unit=False, sources=(_RADIX,),
    ),
    TritonKernel(
        name="index_selection.visible", op="index_selection", module=_MODULE,
        function="_visible_kernel", variants=_visible, uses_matrix_unit=False, sources=(_RADIX,),
    ),
    TritonKernel(
        name="index_selection.mark", op="index_selection", module=_MODULE,
        function="_mark_kernel", variants=_mark, uses_matrix_unit=False, sources=(_RADIX,),
    ),
    TritonKernel(
        name="index_selection.maxima", op="index_selection", module=_MODULE,
        function="_piece_maxima_kernel", variants=_maxima, uses_matrix_unit=False,
        sources=(_RADIX,),
    ),
)  # fmt: skip
