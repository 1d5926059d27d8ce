"""The specialisations of the Triton rotation that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal.ops.rope import RopeRequest
from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

# Tokens from which on a program each fills a device; fewer are spread over more programs.
MANY_TOKENS = 512
_THREAD_PAIRS = 8  # 16 bytes of each half
_MOST_PAIRS = 2048  # of a block: 32 heads of 128


def head_block(heads: int, pairs: int, warp_size: int) -> tuple[int, int]:
    """(heads, warps) of a block, for so many heads of so many pairs each, a power of two."""
    padded = 1 << (heads - 1).bit_length()
    block = min(padded, max(1, _MOST_PAIRS // pairs))
    return block, max(1, min(_MOST_PAIRS, block * pairs) // (_THREAD_PAIRS * warp_size))


def config_of(request: RopeRequest) -> str:
    """The name of the specialisation whose machine code speaks for a rotation. By the negative
    angle it is one instruction more, which is compiled where models have it."""
    if not request.is_interleaved:
        return "d64" if request.rotary_dim <= 64 else "d128"
    return f"d512-tail64{'-inverse' if request.is_inverse else ''}"


def _rope(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            target, dtype, config, head_dim, rotary, IS_INTERLEAVED=interleaved, IS_INVERSE=inverse
        )
        for dtype in ACTIVATION_DTYPES
        for config, head_dim, rotary, interleaved, inverse in (
            ("d64", 64, 64, False, False),
            ("d128", 128, 128, False, False),
            ("d512-tail64", 512, 64, True, False),
            ("d512-tail64-inverse", 512, 64, True, True),
        )
    )


def _variant(
    target: Target, dtype: str, config: str, head_dim: int, rotary: int, **style: bool
) -> KernelVariant:
    block, warps = head_block(32, rotary // 2, target.warp_size)
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={
            "q_THD_ptr": dtype,
            "k_TKD_ptr": dtype,
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
            "BLOCK_H": block,
            "BLOCK_R": rotary // 2,
            **style,
        },
        num_warps=warps,
    )


KERNELS = (
    TritonKernel(
        name="rope.rotate", op="rope", module="hal_kernels.rope.triton_kernels",
        function="_rope_kernel", variants=_rope, uses_matrix_unit=False,
    ),
)  # fmt: skip
