"""Write of new keys and values into the paged cache on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hal_kernels.cpu_fault import Fault
from hal_kernels.cpu_intrinsics import pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import dense_in_place, rows_to_read, vector_to_read
from hal_kernels.cpu_simd import (
    LANES,
    element_kind,
    vector_load,
    vector_load_first,
    vector_store,
    vector_store_first,
)

_GRAIN_ELEMENTS = 32768


def bind_kv_write(
    *,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    v_head_dim: int | None = None,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Bind the write of k and v rows into their slots.

    The kernel takes k [T, num_kv_heads*head_dim], v [T, num_kv_heads*v_head_dim] (rows may be
    strided), k_cache and v_cache [num_blocks, block_size, num_kv_heads, head_dim] (contiguous)
    and slot_mapping int64 [T] with slot = block * block_size + offset.

    Machine code: vmovups on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support. The kernel itself raises
        IndexError for a slot outside the cache, which is not written.
    """
    k_features = num_kv_heads * head_dim
    v_features = num_kv_heads * (head_dim if v_head_dim is None else v_head_dim)
    if k_features < 1 or v_features < 1:
        raise ValueError(f"a KV row needs features, got {k_features} for k and {v_features} for v")
    cache_dtype = kv_dtype or dtype
    num_slots = 0
    fault = Fault(
        lambda slot: IndexError(f"KV slot {slot} is outside the cache of {num_slots} slots")
    )
    compiled = _compile_kv_write(
        k_features, v_features, element_kind(dtype), element_kind(cache_dtype)
    )
    launch = bind_worker(compiled, 8, (), fault, addresses=(0, 2, 4, 5, 6))
    grain = max(1, _GRAIN_ELEMENTS // (k_features + v_features))

    def kv_write(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        nonlocal num_slots
        k = rows_to_read("k of a KV write", k, k_features, dtype)
        v = rows_to_read("v of a KV write", v, v_features, dtype)
        dense_in_place("k cache", k_cache, cache_dtype)
        dense_in_place("v cache", v_cache, cache_dtype)
        slot_mapping = vector_to_read("slots of a KV write", slot_mapping, torch.int64)
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        launch(
            k.shape[0],
            grain,
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot_mapping.data_ptr(),
            num_slots,
        )

    return kv_write


@functools.cache
def _compile_kv_write(k_features: int, v_features: int, kind: int, kv_kind: int) -> CompiledWorker:
    k_tail = k_features % LANES
    v_tail = v_features % LANES
    k_full = k_features - k_tail
    v_full = v_features - v_tail
    zero = np.float32(0.0)

    def kv_write(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        k, k_stride, v, v_stride, k_cache, v_cache = (
            args[0],
            args[1],
            args[2],
            args[3],
            args[4],
            args[5],
        )
        slots, num_slots = pointer_int64(args[6]), args[7]
        for token in range(begin, end):
            slot = slots[token]
            if slot < 0 or slot >= num_slots:
                pointer_int64(args[8])[0] = 1
                pointer_int64(args[9])[0] = slot
                continue
            source = token * k_stride
            target = slot * k_features
            for i in range(0, k_full, LANES):
                vector_store(k_cache, target + i, vector_load(k, source + i, kind), kv_kind)
            if k_tail > 0:
                value = vector_load_first(k, source + k_full, kind, k_tail, zero)
                vector_store_first(k_cache, target + k_full, value, kv_kind, k_tail)
            source = token * v_stride
            target = slot * v_features
            for i in range(0, v_full, LANES):
                vector_store(v_cache, target + i, vector_load(v, source + i, kind), kv_kind)
            if v_tail > 0:
                value = vector_load_first(v, source + v_full, kind, v_tail, zero)
                vector_store_first(v_cache, target + v_full, value, kv_kind, v_tail)

    return compile_worker(kv_write)
