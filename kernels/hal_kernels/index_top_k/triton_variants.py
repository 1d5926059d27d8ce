"""The specialisations of the Triton choice of entries that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

_PROGRAM_ENTRIES = 2048


def tiles(pool_size: int) -> dict[str, int]:
    """Entries of a step; of pools as many as give so many tokens."""
    entries = _PROGRAM_ENTRIES if pool_size == 1 else 256
    return {"BLOCK": entries, "num_warps": 8}


def _variants(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for config, top_k, pool in (("plain", 2048, 1), ("pools", 2048, 16)):
        options = tiles(pool)
        warps = options.pop("num_warps")
        variants.append(
            KernelVariant(
                dtype="",
                config=config,
                pointers={
                    "logits_TE_ptr": "float32",
                    "visible_T_ptr": "int32",
                    "out_TC_ptr": "int32",
                },
                scalars=dict.fromkeys(("entries", "stride_logits", "stride_out"), "i32"),
                divisible=frozenset({"stride_logits"}),
                constants={"TOP_K": top_k, "POOL": pool, "BLOCK_P": pool, **options},
                num_warps=warps,
            )
        )
    return variants


KERNELS = (
    TritonKernel(
        name="index_top_k.radix", op="index_top_k",
        module="hal_kernels.index_top_k.triton_kernels", function="_index_top_k_kernel",
        variants=_variants, uses_matrix_unit=False,
    ),
)  # fmt: skip
