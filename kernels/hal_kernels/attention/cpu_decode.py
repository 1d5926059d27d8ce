"""Decode attention on the CPU: one query token a sequence, over the paged KV cache in place.

The work is cut into (sequence, kv head, split of 128 keys). An item reads its keys and values
once for the whole group of query heads and leaves the split's softmax maximum, sum and weighted
values; the last item of a (sequence, kv head) to finish joins the splits in their order. Splits
sit at fixed positions, so a sequence's result does not depend on the other sequences, on the
number of threads or on their timing.

Shape letters: B sequences, Hq query heads, Hkv kv heads, G = Hq / Hkv, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hal_kernels.attention.cpu_tiles import (
    add_weighted_rows,
    dot_rows,
    prefetch_rows,
    widen_rows,
)
from hal_kernels.cpu_intrinsics import (
    atomic_fetch_add,
    pointer_float32,
    pointer_int32,
    pointer_int64,
    stack_bytes,
)
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import dense_in_place, rows_to_read, vector_to_read
from hal_kernels.cpu_simd import (
    ELEMENT_BYTES,
    FP32,
    LANES,
    element_kind,
    vector_add,
    vector_div,
    vector_exp,
    vector_fma,
    vector_keep_below,
    vector_largest,
    vector_load,
    vector_max,
    vector_mul,
    vector_of,
    vector_store,
    vector_sub,
    vector_sum,
)

if TYPE_CHECKING:
    from hal.ops.attention import AttentionMetadata

SPLIT_KEYS = 128
# Below this many (key, query head) pairs a call stays on the calling thread: waking the team
# costs about 3 µs.
_PARALLEL_PAIRS = 1024

AttentionKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "AttentionMetadata"], torch.Tensor
]


def bind_attention_decode(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    scale: float,
    kv_dtype: torch.dtype | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> AttentionKernel:
    """Bind decode attention.

    The kernel takes q [B, Hq*D] (rows may be strided), k_cache and v_cache
    [num_blocks, block_size, Hkv, D] and the metadata of hal.ops.attention (``query_start_loc`` is
    not read: one query a sequence), and returns [B, Hq*D]. float32 or bfloat16, q and cache
    independently; sums are float32. window: keys seen including the query's own, 0 for all.
    softcap: c of c*tanh(s/c), 0 for none. sinks: [Hq] extra logits of the softmax's denominator.

    Machine code: vfmadd231ps on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support.
    """
    check_attention_arguments(num_heads, num_kv_heads, head_dim, block_size, window, softcap, sinks)
    group = num_heads // num_kv_heads
    compiled = _compile_decode(
        num_kv_heads,
        group,
        head_dim,
        block_size,
        element_kind(dtype),
        element_kind(kv_dtype or dtype),
        window,
        float(softcap),
        sinks is not None,
        float(scale),
    )
    sink_logits = 0 if sinks is None else sinks.detach().to(torch.float32).contiguous()
    launch = bind_worker(compiled, 12, (sink_logits,))
    partial_floats = num_kv_heads * group * (head_dim + LANES)
    window_splits = (window + SPLIT_KEYS - 2) // SPLIT_KEYS + 1 if window else 0
    out_features = num_heads * head_dim
    cache_dtype = kv_dtype or dtype
    partials = torch.empty(0, dtype=torch.float32)
    arrivals = torch.zeros(0, dtype=torch.int64)

    def kernel(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        nonlocal partials, arrivals
        q = rows_to_read("q of attention", q, out_features, dtype)
        dense_in_place("k cache", k_cache, cache_dtype)
        dense_in_place("v cache", v_cache, cache_dtype)
        batch = q.shape[0]
        out = torch.empty(batch, out_features, dtype=dtype)
        num_splits = (meta.max_seq_len + SPLIT_KEYS - 1) // SPLIT_KEYS
        if window_splits and window_splits < num_splits:
            num_splits = window_splits
        if partials.numel() < batch * num_splits * partial_floats:
            partials = torch.empty(batch * num_splits * partial_floats, dtype=torch.float32)
        if arrivals.numel() < batch * num_kv_heads:
            arrivals = torch.zeros(batch * num_kv_heads, dtype=torch.int64)
        num_items = batch * num_kv_heads * num_splits
        is_small = batch * meta.max_seq_len * num_heads < _PARALLEL_PAIRS
        seq_lens = vector_to_read("seq_lens", meta.seq_lens, torch.int32)
        block_table = vector_to_read("block_table", meta.block_table, torch.int32)
        launch(
            num_items,
            num_items if is_small else 1,
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            block_table.stride(0),
            partials.data_ptr(),
            arrivals.data_ptr(),
            num_splits,
            batch,
        )
        return out

    return kernel


def check_attention_arguments(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Refuse what the CPU attention kernels do not support.

    Raises:
        ValueError: says what was required and what was found.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"attention needs num_heads divisible by num_kv_heads, got {num_heads} "
            f"and {num_kv_heads}"
        )
    if head_dim < LANES or head_dim > 512 or head_dim % LANES:
        raise ValueError(
            f"CPU attention needs head_dim a multiple of {LANES} up to 512, got {head_dim}"
        )
    if block_size < LANES or block_size % LANES:
        raise ValueError(f"CPU attention needs block_size a multiple of {LANES}, got {block_size}")
    if window < 0 or softcap < 0:
        raise ValueError(f"window and softcap cannot be negative, got {window} and {softcap}")
    if sinks is not None and tuple(sinks.shape) != (num_heads,):
        raise ValueError(f"sinks need shape ({num_heads},), got {tuple(sinks.shape)}")


@functools.cache
def _compile_decode(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    q_kind: int,
    kv_kind: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    scale: float,
) -> CompiledWorker:
    kv_bytes = ELEMENT_BYTES[kv_kind]
    row_stride = num_kv_heads * head_dim
    # A bf16 tile is widened once for all heads of the group.
    is_widened = kv_kind != FP32 and group > 1
    tile_kind = FP32 if is_widened else kv_kind
    tile_stride = head_dim if is_widened else row_stride
    tile_bytes = ELEMENT_BYTES[tile_kind]
    widened_bytes = LANES * head_dim * 4 if is_widened else 4
    partial_row = head_dim + LANES
    heads_bytes = group * head_dim * 4
    scores_bytes = group * SPLIT_KEYS * 4
    maxima_bytes = group * LANES * 4
    scale32 = np.float32(scale)
    softcap32 = np.float32(softcap)
    minus_infinity = np.float32(-np.inf)
    zero = np.float32(0.0)
    one = np.float32(1.0)
    two = np.float32(2.0)

    def attention_decode(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        q, q_stride, k_cache, v_cache, out = args[0], args[1], args[2], args[3], args[4]
        seq_lens, tables, table_stride = pointer_int32(args[5]), pointer_int32(args[6]), args[7]
        partials, arrivals, num_splits, sinks = args[8], args[9], args[10], args[12]
        queries = stack_bytes(heads_bytes)
        scores = stack_bytes(scores_bytes)
        maxima = stack_bytes(maxima_bytes)
        tile = stack_bytes(widened_bytes)
        for item in range(begin, end):
            split = item % num_splits
            kv_head = (item // num_splits) % num_kv_heads
            sequence = item // (num_splits * num_kv_heads)
            seq_len = np.int64(seq_lens[sequence])
            first_key: Any = max(0, seq_len - window) if window > 0 else 0
            first_split = first_key // SPLIT_KEYS
            used_splits = (seq_len - 1) // SPLIT_KEYS - first_split + 1
            if split >= used_splits:
                continue
            split_start = (first_split + split) * SPLIT_KEYS
            start = max(first_key, split_start)
            stop = min(seq_len, split_start + SPLIT_KEYS)
            aligned = start - start % LANES
            table = sequence * table_stride
            first_head = kv_head * group

            for index in range(0, group * head_dim, LANES):
                position = sequence * q_stride + first_head * head_dim + index
                scaled = vector_mul(vector_load(q, position, q_kind), vector_of(scale32))
                vector_store(queries, index, scaled, FP32)
            for g in range(group):
                vector_store(maxima, g * LANES, vector_of(minus_infinity), FP32)

            for key in range(aligned, stop, LANES):
                block = np.int64(tables[table + key // block_size])
                row = (block * block_size + key % block_size) * row_stride + kv_head * head_dim
                keys = k_cache + row * kv_bytes
                # Two tiles ahead: the last keys ask for the first values.
                ahead = key + 2 * LANES
                cache = k_cache
                if ahead >= stop:
                    ahead = aligned + (ahead - stop) // LANES * LANES
                    cache = v_cache
                if ahead < stop:
                    block = np.int64(tables[table + ahead // block_size])
                    row = (block * block_size + ahead % block_size) * row_stride
                    row += kv_head * head_dim
                    prefetch_rows(cache + row * kv_bytes, row_stride, head_dim, kv_kind)
                if is_widened:
                    widen_rows(tile, keys, row_stride, head_dim, kv_kind)
                    keys = tile
                for g in range(group):
                    query = queries + g * head_dim * 4
                    score = dot_rows(query, keys, tile_stride, head_dim, tile_kind)
                    if softcap > 0:
                        power = vector_exp(vector_mul(score, vector_of(two / softcap32)))
                        fraction = vector_div(vector_of(two), vector_add(power, vector_of(one)))
                        score = vector_mul(
                            vector_of(softcap32), vector_sub(vector_of(one), fraction)
                        )
                    if key + LANES > stop:
                        score = vector_keep_below(stop - key, score, vector_of(minus_infinity))
                    if key < start:
                        score = vector_keep_below(start - key, vector_of(minus_infinity), score)
                    vector_store(scores, g * SPLIT_KEYS + key - aligned, score, FP32)
                    largest = vector_max(vector_load(maxima, g * LANES, FP32), score)
                    vector_store(maxima, g * LANES, largest, FP32)

            partial = partials + 4 * partial_row * group * (
                (sequence * num_kv_heads + kv_head) * num_splits + split
            )
            for g in range(group):
                target = partial + 4 * partial_row * g
                largest_score = vector_largest(vector_load(maxima, g * LANES, FP32))
                total = vector_of(zero)
                for index in range(0, stop - aligned, LANES):
                    score = vector_load(scores, g * SPLIT_KEYS + index, FP32)
                    weight = vector_exp(vector_sub(score, vector_of(largest_score)))
                    vector_store(scores, g * SPLIT_KEYS + index, weight, FP32)
                    total = vector_add(total, weight)
                for index in range(0, head_dim, LANES):
                    vector_store(target, index, vector_of(zero), FP32)
                softmax = pointer_float32(target + 4 * head_dim)
                softmax[0] = largest_score
                softmax[1] = vector_sum(total)

            for key in range(aligned, stop, LANES):
                block = np.int64(tables[table + key // block_size])
                row = (block * block_size + key % block_size) * row_stride + kv_head * head_dim
                values = v_cache + row * kv_bytes
                ahead = key + 2 * LANES
                if ahead < stop:
                    block = np.int64(tables[table + ahead // block_size])
                    row = (block * block_size + ahead % block_size) * row_stride
                    row += kv_head * head_dim
                    prefetch_rows(v_cache + row * kv_bytes, row_stride, head_dim, kv_kind)
                if is_widened:
                    widen_rows(tile, values, row_stride, head_dim, kv_kind)
                    values = tile
                low = max(start - key, 0)
                high = min(stop - key, LANES)
                for g in range(group):
                    target = partial + 4 * partial_row * g
                    weights = scores + 4 * (g * SPLIT_KEYS + key - aligned)
                    if low == 0 and high == LANES:
                        add_weighted_rows(
                            target, weights, values, tile_stride, head_dim, tile_kind, LANES
                        )
                    else:
                        # Rows outside the context may hold anything, even a NaN: not read.
                        for j in range(low, high):
                            add_weighted_rows(
                                target,
                                weights + 4 * j,
                                values + j * tile_stride * tile_bytes,
                                tile_stride,
                                head_dim,
                                tile_kind,
                                1,
                            )

            arrival = arrivals + 8 * (sequence * num_kv_heads + kv_head)
            if atomic_fetch_add(arrival, 1) != used_splits - 1:
                continue
            atomic_fetch_add(arrival, -used_splits)
            first = partials + 4 * partial_row * group * (
                (sequence * num_kv_heads + kv_head) * num_splits
            )
            for g in range(group):
                largest_score = minus_infinity
                if has_sinks:
                    largest_score = pointer_float32(sinks)[first_head + g]
                for s in range(used_splits):
                    softmax = pointer_float32(
                        first + 4 * (partial_row * (s * group + g) + head_dim)
                    )
                    # Written so that a NaN wins.
                    if not softmax[0] <= largest_score:
                        largest_score = softmax[0]
                denominator = vector_of(zero)
                if has_sinks:
                    sink = vector_of(pointer_float32(sinks)[first_head + g])
                    denominator = vector_exp(vector_sub(sink, vector_of(largest_score)))
                for s in range(used_splits):
                    softmax = pointer_float32(
                        first + 4 * (partial_row * (s * group + g) + head_dim)
                    )
                    factor = vector_exp(vector_of(softmax[0] - largest_score))
                    denominator = vector_fma(factor, vector_of(softmax[1]), denominator)
                    softmax[0] = vector_largest(factor)
                for index in range(0, head_dim, LANES):
                    value = vector_of(zero)
                    for s in range(used_splits):
                        source = first + 4 * partial_row * (s * group + g)
                        factor = pointer_float32(source + 4 * head_dim)[0]
                        value = vector_fma(
                            vector_of(factor), vector_load(source, index, FP32), value
                        )
                    position = sequence * num_kv_heads * group * head_dim
                    position += (first_head + g) * head_dim + index
                    vector_store(out, position, vector_div(value, denominator), q_kind)

    return compile_worker(attention_decode)
