"""Rotary position embedding on the CPU, in place on q and k."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from hal_kernels.cpu_fault import Fault
from hal_kernels.cpu_intrinsics import pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import rows_in_place, vector_to_read
from hal_kernels.cpu_rotation import vector_turned_first, vector_turned_second
from hal_kernels.cpu_simd import (
    ELEMENT_BYTES,
    FP32,
    LANES,
    element_kind,
    vector_alternate_sign,
    vector_fma,
    vector_load,
    vector_load_doubled,
    vector_load_first,
    vector_mul,
    vector_store,
    vector_store_first,
    vector_swap_pairs,
)

_GRAIN_ELEMENTS = 16384


def bind_rope(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    cos_sin_cache: torch.Tensor,
    style: Literal["half_split", "interleaved"] = "half_split",
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Bind the rotation of the first ``rotary_dim`` values of each head.

    The kernel takes q [T, num_heads*head_dim], k [T, num_kv_heads*head_dim] (rows may be strided)
    and positions int64 [T], and writes q and k in place. cos_sin_cache is float32
    [max_position, rotary_dim], cosines then sines. Pairs are (i, i + rotary_dim/2) for
    "half_split" and (2i, 2i + 1) for "interleaved".

    Machine code: vfmadd / vfmsub on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support. The kernel itself raises
        IndexError for a position outside the cache; that token is left unrotated.
    """
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"rope needs an even rotary_dim up to head_dim {head_dim}, got {rotary_dim}"
        )
    if style == "interleaved" and rotary_dim % LANES:
        raise ValueError(f"interleaved rope needs rotary_dim % {LANES} == 0, got {rotary_dim}")
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != rotary_dim:
        raise ValueError(
            f"cos_sin_cache needs shape [max_position, {rotary_dim}], "
            f"got {list(cos_sin_cache.shape)}"
        )
    cache = cos_sin_cache.detach().to(torch.float32).contiguous()
    fault = Fault(
        lambda position: IndexError(
            f"rope position {position} is outside the {cache.shape[0]} cached positions"
        )
    )
    compiled = _compile_rope(
        num_heads, num_kv_heads, head_dim, rotary_dim, element_kind(dtype), style == "interleaved"
    )
    launch = bind_worker(compiled, 5, (cache, cache.shape[0]), fault, addresses=(0, 2, 4))
    grain = max(1, _GRAIN_ELEMENTS // ((num_heads + num_kv_heads) * rotary_dim))

    def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        rows_in_place("q of rope", q, num_heads * head_dim, dtype)
        rows_in_place("k of rope", k, num_kv_heads * head_dim, dtype)
        positions = vector_to_read("positions of rope", positions, torch.int64)
        launch(
            q.shape[0],
            grain,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            positions.data_ptr(),
        )

    return rope


@functools.cache
def _compile_rope(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    kind: int,
    is_interleaved: bool,
) -> CompiledWorker:
    half = rotary_dim // 2
    tail = half % LANES
    full = half - tail
    element_bytes = ELEMENT_BYTES[kind]
    zero = np.float32(0.0)

    def rope(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        q, q_stride, k, k_stride = args[0], args[1], args[2], args[3]
        positions, cache, num_positions = pointer_int64(args[4]), args[5], args[6]
        for token in range(begin, end):
            position = positions[token]
            if position < 0 or position >= num_positions:
                pointer_int64(args[7])[0] = 1
                pointer_int64(args[8])[0] = position
                continue
            cosines = cache + position * rotary_dim * 4
            sines = cosines + half * 4
            for head in range(num_heads + num_kv_heads):
                x = q + (token * q_stride + head * head_dim) * element_bytes
                if head >= num_heads:
                    x = k + (token * k_stride + (head - num_heads) * head_dim) * element_bytes
                if is_interleaved:
                    for i in range(0, rotary_dim, LANES):
                        value = vector_load(x, i, kind)
                        cosine = vector_load_doubled(cosines, i // 2)
                        sine = vector_alternate_sign(vector_load_doubled(sines, i // 2))
                        turned = vector_mul(vector_swap_pairs(value), sine)
                        vector_store(x, i, vector_fma(value, cosine, turned), kind)
                else:
                    for i in range(0, full, LANES):
                        a = vector_load(x, i, kind)
                        b = vector_load(x, half + i, kind)
                        cosine = vector_load(cosines, i, FP32)
                        sine = vector_load(sines, i, FP32)
                        vector_store(x, i, vector_turned_first(a, b, cosine, sine), kind)
                        vector_store(x, half + i, vector_turned_second(a, b, cosine, sine), kind)
                    if tail > 0:
                        a = vector_load_first(x, full, kind, tail, zero)
                        b = vector_load_first(x, half + full, kind, tail, zero)
                        cosine = vector_load_first(cosines, full, FP32, tail, zero)
                        sine = vector_load_first(sines, full, FP32, tail, zero)
                        first = vector_turned_first(a, b, cosine, sine)
                        second = vector_turned_second(a, b, cosine, sine)
                        vector_store_first(x, full, first, kind, tail)
                        vector_store_first(x, half + full, second, kind, tail)

    return compile_worker(rope)
