"""The machine code of decode attention on the CPU: what an item of `cpu_decode` does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hal_kernels.attention.cpu_tiles import add_weighted_rows, dot_rows, prefetch_rows, widen_rows
from hal_kernels.cpu_intrinsics import (
    atomic_fetch_add,
    pointer_float32,
    pointer_int32,
    pointer_int64,
    stack_bytes,
)
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_simd import (
    ELEMENT_BYTES,
    FP32,
    LANES,
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

SPLIT_KEYS = 128


@functools.cache
def compile_decode(
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
