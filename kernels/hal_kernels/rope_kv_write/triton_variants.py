"""The specialisations of the pass from projection to attention that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

DTYPES = ("bfloat16", "float16")  # of activations
# Triton does not convert to e4m3 on these.
NO_FP8 = ("sm_80", "gfx90a", "gfx1100")
VALUE_BLOCK = 1024  # values of v of a program: 16 bytes for each of 128 threads


def launch_blocks(
    head_dim: int, rotary_dim: int, heads: int, warp_size: int
) -> tuple[int, int, int]:
    """Block sizes: the pairs of a head, what is not rotated of it, and heads of a program, whose
    four warps have 16 bytes a thread of each half."""
    block_r = _power_of_two(rotary_dim // 2)
    block_h = min(max(1, 32 * warp_size // block_r), _power_of_two(heads))
    return block_r, _power_of_two(head_dim - rotary_dim), block_h


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _variants(target: Target) -> Sequence[KernelVariant]:
    caches = [(dtype, dtype, "") for dtype in DTYPES]
    if target.arch not in NO_FP8:
        caches += [(dtype, target.fp8_dtype, "-fp8") for dtype in DTYPES]
    return tuple(
        _variant(
            target, f"d{head_dim}{'-norm' if norm else ''}{suffix}", head_dim, norm, dtype, cache
        )
        for head_dim in (64, 128)
        for norm in (False, True)
        for dtype, cache, suffix in caches
    )


def _variant(
    target: Target, config: str, head_dim: int, norm: bool, dtype: str, cache: str
) -> KernelVariant:
    block_r, block_p, block_h = launch_blocks(head_dim, head_dim, 32, target.warp_size)
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={
            "q_THD_ptr": dtype,
            "k_TKD_ptr": dtype,
            "v_TKV_ptr": dtype,
            "q_weight_D_ptr": dtype,
            "k_weight_D_ptr": dtype,
            "positions_T_ptr": "int64",
            "table_PR_ptr": "float32",
            "k_cache_SKD_ptr": cache,
            "v_cache_SKV_ptr": cache,
            "slots_T_ptr": "int64",
        },
        scalars={"stride_q": "i32", "stride_k": "i32", "stride_v": "i32", "eps": "fp32"},
        divisible=frozenset({"stride_q", "stride_k", "stride_v"}),
        constants={
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "V_WIDTH": 8 * head_dim,
            "ROTARY_DIM": head_dim,
            "BLOCK_H": block_h,
            "BLOCK_R": block_r,
            "BLOCK_P": block_p,
            "BLOCK_V": min(VALUE_BLOCK, 8 * head_dim),
            "HAS_NORM": norm,
        },
    )


KERNELS = (
    TritonKernel(
        name="rope_kv_write.pass", op="rope_kv_write",
        module="hal_kernels.rope_kv_write.triton_kernels", function="_rope_kv_write_kernel",
        variants=_variants, uses_matrix_unit=False,
    ),
)  # fmt: skip
