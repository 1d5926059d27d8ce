"""The specialisations of the Triton choice of entries that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

_MODULE = "hal_kernels.index_top_k.triton_kernels"
PROGRAM_BLOCKS = 256  # candidate blocks of one program that takes their maxima
_PROGRAM_ENTRIES = 2048


def tiles(pool_size: int) -> dict[str, int]:
    """Entries of a step of the search, and of one that writes. Of pools, each of which writes
    several tokens, they are fewer, or registers spill."""
    searched, written = (_PROGRAM_ENTRIES, _PROGRAM_ENTRIES) if pool_size == 1 else (1024, 256)
    return {"BLOCK": searched, "BLOCK_OUT": written, "num_warps": 8}


def _variants(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for config, top_k, pool, candidates, is_by_place in (
        ("plain", 2048, 1, 0, False),
        ("pools", 2048, 16, 0, False),
        ("candidates", 512, 1, 2048, False),
        ("candidates-alone", 512, 1, 2048, True),
    ):
        options = tiles(pool)
        warps = options.pop("num_warps")
        integers = ("visible_T_ptr", "candidates_TN_ptr", "out_TC_ptr")
        strides = ("entries", "readable", "stride_logits", "stride_candidates", "stride_out")
        variants.append(
            KernelVariant(
                dtype="",
                config=config,
                pointers={"logits_TE_ptr": "float32", **dict.fromkeys(integers, "int32")},
                scalars=dict.fromkeys(strides, "i32"),
                divisible=frozenset({"readable", "stride_logits"}),
                constants={
                    "TOP_K": top_k,
                    "POOL": pool,
                    "BLOCK_P": pool,
                    "CANDIDATES": candidates,
                    "BY_PLACE": is_by_place,
                    **options,
                },
                num_warps=warps,
            )
        )
    return variants


def _maxima(target: Target) -> Sequence[KernelVariant]:
    return (
        KernelVariant(
            dtype="",
            config="blocks",
            pointers={
                "logits_TE_ptr": "float32",
                "visible_T_ptr": "int32",
                "maxima_TN_ptr": "float32",
                "counts_T_ptr": "int32",
            },
            scalars=dict.fromkeys(("blocks", "readable", "stride_logits", "stride_maxima"), "i32"),
            divisible=frozenset({"readable", "stride_logits", "stride_maxima"}),
            constants={"BLOCK_N": PROGRAM_BLOCKS},
        ),
    )


KERNELS = (
    TritonKernel(
        name="index_top_k.radix", op="index_top_k", module=_MODULE,
        function="_index_top_k_kernel", variants=_variants, uses_matrix_unit=False,
    ),
    TritonKernel(
        name="index_top_k.block_maxima", op="index_top_k", module=_MODULE,
        function="_block_maxima_kernel", variants=_maxima, uses_matrix_unit=False,
    ),
)  # fmt: skip
