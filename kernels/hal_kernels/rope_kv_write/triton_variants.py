"""The specialisations of the pass from projection to attention that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.kv_write.cache_dtypes import compiled_fp8
from hal_kernels.kv_write.triton_variants import ROUNDING

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


def config_of(
    head_dim: int, *, has_norm: bool, is_interleaved: bool, is_fp8: bool, has_scales: bool
) -> str:
    """The name of the specialisation whose machine code speaks for a pass: of the nearest head
    size, of which neighbours as pairs were compiled for the larger."""
    size = 64 if head_dim <= 64 and not is_interleaved else 128
    return "".join(
        (
            f"d{size}",
            "-norm" if has_norm else "",
            "-pairs" if is_interleaved else "",
            "-fp8" if is_fp8 else "",
            "-scaled" if has_scales else "",
        )
    )


def _variants(target: Target) -> Sequence[KernelVariant]:
    caches = [(dtype, dtype, False) for dtype in ACTIVATION_DTYPES]
    caches += [
        (dtype, compiled_fp8(target), has_scales)
        for dtype in ("bfloat16", "float16")
        for has_scales in (False, True)
    ]
    return tuple(
        _variant(
            target,
            head_dim,
            dtype,
            cache,
            has_norm=has_norm,
            is_interleaved=is_interleaved,
            has_scales=has_scales,
        )
        for head_dim, is_interleaved in ((64, False), (128, False), (128, True))
        for has_norm in (False, True)
        for dtype, cache, has_scales in caches
    )


def _variant(
    target: Target,
    head_dim: int,
    dtype: str,
    cache: str,
    *,
    has_norm: bool,
    is_interleaved: bool,
    has_scales: bool,
) -> KernelVariant:
    config = config_of(
        head_dim,
        has_norm=has_norm,
        is_interleaved=is_interleaved,
        is_fp8=cache != dtype,
        has_scales=has_scales,
    )
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
        scalars={
            **dict.fromkeys(("stride_q", "stride_k", "stride_v"), "i32"),
            **dict.fromkeys(("eps", "k_scale", "v_scale"), "fp32"),
        },
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
            "HAS_NORM": has_norm,
            "IS_INTERLEAVED": is_interleaved,
            "HAS_SCALES": has_scales,
        },
    )


KERNELS = (
    TritonKernel(
        name="rope_kv_write.pass", op="rope_kv_write",
        module="hal_kernels.rope_kv_write.triton_kernels", function="_rope_kv_write_kernel",
        variants=_variants, uses_matrix_unit=False, sources=ROUNDING,
    ),
)  # fmt: skip
