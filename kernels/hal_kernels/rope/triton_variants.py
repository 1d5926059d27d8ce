"""The specialisations of the Triton rotation that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel


def program_pairs(warp_size: int) -> int:
    """Pairs of a program: 16 bytes a thread of each half, by four warps."""
    return 32 * warp_size


def _rope(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="",
            config=config,
            pointers={
                "q_THD_ptr": "bfloat16",
                "k_TKD_ptr": "bfloat16",
                "positions_T_ptr": "int64",
                "table_PR_ptr": "float32",
            },
            scalars={"stride_q": "i32", "stride_k": "i32"},
            divisible=frozenset({"stride_q", "stride_k"}),
            constants={
                "NUM_HEADS": 32,
                "NUM_KV_HEADS": 8,
                "HEAD_DIM": head_dim,
                "ROTARY_DIM": rotary,
                "ROTARY_START": head_dim - rotary,
                "BLOCK_H": program_pairs(target.warp_size) // (rotary // 2),
                "BLOCK_R": rotary // 2,
                "IS_INTERLEAVED": interleaved,
                "IS_INVERSE": inverse,
            },
        )
        for config, head_dim, rotary, interleaved, inverse in (
            ("d64", 64, 64, False, False),
            ("d128", 128, 128, False, False),
            ("d512-tail64", 512, 64, True, False),
            ("d512-tail64-inverse", 512, 64, True, True),
        )
    )


KERNELS = (
    TritonKernel(
        name="rope.rotate", op="rope", module="hal_kernels.rope.triton_kernels",
        function="_rope_kernel", variants=_rope, uses_matrix_unit=False,
    ),
)  # fmt: skip
