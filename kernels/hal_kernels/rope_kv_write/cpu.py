"""Norms of q and k over each head, their rotation and the KV write on the CPU, in one pass.

A token's q, k and v are read from memory once. The arithmetic, and so each bit of the result, is
that of the three kernels apart (`norm.cpu`, `rope.cpu`, `kv_write.cpu`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hal_kernels.cpu_fault import Fault
from hal_kernels.cpu_intrinsics import pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import dense_in_place, rows_in_place, rows_to_read, vector_to_read
from hal_kernels.cpu_rotation import vector_turned_first, vector_turned_second
from hal_kernels.cpu_simd import (
    ELEMENT_BYTES,
    FP32,
    LANES,
    element_kind,
    vector_fma,
    vector_load,
    vector_mul,
    vector_of,
    vector_store,
    vector_sum,
)

_GRAIN_ELEMENTS = 16384

Kernel = Callable[..., torch.Tensor]


def bind_rope_kv_write(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Kernel:
    """Bind what is between the projection of q, k and v and the attention.

    The kernel takes q [T, num_heads * head_dim], k [T, num_kv_heads * head_dim] (both written in
    place), v [T, num_kv_heads * v_head_dim] (rows of all may be strided), positions int64 [T],
    k_cache and v_cache [num_blocks, block_size, num_kv_heads, dim] (contiguous) and slot_mapping
    int64 [T], and returns q. float32 or bfloat16, rows and cache independently. With q_weight and
    k_weight [head_dim], q and k are normed over each head first; sums are float32. Pairs of the
    rotation are (i, i + rotary_dim / 2). cos_sin_cache as of `bind_rope`.

    Machine code: vfmadd / vfmsub on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support. The kernel itself raises
        IndexError for a position or slot outside; such a token is left as it is and not written.
    """
    _check(head_dim, v_head_dim, rotary_dim, cos_sin_cache, q_weight, k_weight)
    table = cos_sin_cache.detach().to(torch.float32).contiguous()
    has_norms = q_weight is not None and k_weight is not None
    weights: tuple[int | torch.Tensor, ...] = (0, 0)
    if q_weight is not None and k_weight is not None:
        weights = tuple(w.detach().to(torch.float32).contiguous() for w in (q_weight, k_weight))
    num_slots = 0

    def error(token: int) -> Exception:
        return IndexError(
            f"token {token} of a step: its position is outside the {table.shape[0]} cached ones, "
            f"or its KV slot is outside the cache of {num_slots} slots"
        )

    compiled = _compile(
        num_heads,
        num_kv_heads,
        head_dim,
        v_head_dim,
        rotary_dim,
        element_kind(dtype),
        element_kind(kv_dtype),
        has_norms,
        float(eps),
    )
    constants = (table, table.shape[0], *weights)
    launch = bind_worker(compiled, 11, constants, Fault(error), addresses=(0, 2, 4, 6, 7, 8, 9))
    q_features, k_features = num_heads * head_dim, num_kv_heads * head_dim
    v_features = num_kv_heads * v_head_dim
    grain = max(1, _GRAIN_ELEMENTS // (q_features + k_features + v_features))

    def rope_kv_write(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        nonlocal num_slots
        rows_in_place("q of rope", q, q_features, dtype)
        rows_in_place("k of rope", k, k_features, dtype)
        v = rows_to_read("v of a KV write", v, v_features, dtype)
        dense_in_place("k cache", k_cache, kv_dtype)
        dense_in_place("v cache", v_cache, kv_dtype)
        positions = vector_to_read("positions of rope", positions, torch.int64)
        slot_mapping = vector_to_read("slots of a KV write", slot_mapping, torch.int64)
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        launch(
            q.shape[0],
            grain,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            num_slots,
        )
        return q

    return rope_kv_write


def _check(
    head_dim: int,
    v_head_dim: int,
    rotary_dim: int,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
) -> None:
    for name, value in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if value < LANES or value % LANES:
            raise ValueError(f"rope_kv_write needs {name} a multiple of {LANES}, got {value}")
    if rotary_dim < 1 or rotary_dim % (2 * LANES) or rotary_dim > head_dim:
        raise ValueError(
            f"rope_kv_write needs rotary_dim a multiple of {2 * LANES} up to head_dim {head_dim}, "
            f"got {rotary_dim}"
        )
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != rotary_dim:
        raise ValueError(
            f"cos_sin_cache needs shape [max_position, {rotary_dim}], "
            f"got {list(cos_sin_cache.shape)}"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("rope_kv_write needs both norm weights, or neither")
    for weight in (q_weight, k_weight):
        if weight is not None and tuple(weight.shape) != (head_dim,):
            raise ValueError(f"norm weight needs shape ({head_dim},), got {tuple(weight.shape)}")


@functools.cache
def _compile(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    rotary_dim: int,
    kind: int,
    kv_kind: int,
    has_norms: bool,
    eps: float,
) -> CompiledWorker:
    half = rotary_dim // 2
    element_bytes = ELEMENT_BYTES[kind]
    k_features, v_features = num_kv_heads * head_dim, num_kv_heads * v_head_dim
    eps32, count = np.float32(eps), np.float32(head_dim)
    zero, one = np.float32(0.0), np.float32(1.0)

    def rope_kv_write(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        q, q_stride, k, k_stride, v, v_stride = (
            args[0],
            args[1],
            args[2],
            args[3],
            args[4],
            args[5],
        )
        positions, slots = pointer_int64(args[6]), pointer_int64(args[7])
        k_cache, v_cache, num_slots = args[8], args[9], args[10]
        table, num_positions, q_weight, k_weight = args[11], args[12], args[13], args[14]
        for token in range(begin, end):
            position, slot = positions[token], slots[token]
            if position < 0 or position >= num_positions or slot < 0 or slot >= num_slots:
                pointer_int64(args[15])[0] = 1
                pointer_int64(args[16])[0] = token
                continue
            cosines = table + position * rotary_dim * 4
            sines = cosines + half * 4
            for head in range(num_heads + num_kv_heads):
                x = q + (token * q_stride + head * head_dim) * element_bytes
                weight = q_weight
                if head >= num_heads:
                    x = k + (token * k_stride + (head - num_heads) * head_dim) * element_bytes
                    weight = k_weight
                if has_norms:
                    squares = vector_of(zero)
                    for i in range(0, head_dim, LANES):
                        value = vector_load(x, i, kind)
                        squares = vector_fma(value, value, squares)
                    mean = vector_sum(squares) / count
                    factor = vector_of(one / np.float32(math.sqrt(mean + eps32)))
                    for i in range(0, head_dim, LANES):
                        value = vector_mul(vector_load(x, i, kind), factor)
                        value = vector_mul(value, vector_load(weight, i, FP32))
                        # Rounded to the rows' dtype between norm and rotation, as the op says.
                        vector_store(x, i, value, kind)
                for i in range(0, half, LANES):
                    a = vector_load(x, i, kind)
                    b = vector_load(x, half + i, kind)
                    cosine = vector_load(cosines, i, FP32)
                    sine = vector_load(sines, i, FP32)
                    vector_store(x, i, vector_turned_first(a, b, cosine, sine), kind)
                    vector_store(x, half + i, vector_turned_second(a, b, cosine, sine), kind)
            source, target = token * k_stride, slot * k_features
            for i in range(0, k_features, LANES):
                vector_store(k_cache, target + i, vector_load(k, source + i, kind), kv_kind)
            source, target = token * v_stride, slot * v_features
            for i in range(0, v_features, LANES):
                vector_store(v_cache, target + i, vector_load(v, source + i, kind), kv_kind)

    return compile_worker(rope_kv_write)
