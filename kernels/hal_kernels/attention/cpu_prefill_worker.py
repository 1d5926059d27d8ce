"""The machine code of prefill attention on the CPU: what an item of `cpu_prefill` does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hal_kernels.attention.cpu_tiles import (
    TILE_TOTALS,
    add_weighted_tile,
    transpose_rows,
    widen_rows,
)
from hal_kernels.cpu_intrinsics import pointer_float32, pointer_int32, pointer_int64, stack_bytes
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_simd import (
    ELEMENT_BYTES,
    FP32,
    LANES,
    vector_add,
    vector_div,
    vector_exp,
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

_KEY_BLOCK = 64


@functools.cache
def compile_prefill(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    tile_tokens: int,
    q_kind: int,
    kv_kind: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    scale: float,
) -> CompiledWorker:
    kv_bytes = ELEMENT_BYTES[kv_kind]
    row_stride = num_kv_heads * head_dim
    max_rows = tile_tokens * group
    # Rows are taken four at a time; those after the last one compute what nobody reads.
    rows_bytes = (max_rows + TILE_TOTALS - 1) // TILE_TOTALS * TILE_TOTALS * head_dim * 4
    keys_bytes = _KEY_BLOCK * head_dim * 4
    scores_bytes = TILE_TOTALS * _KEY_BLOCK * 4
    softmax_bytes = max_rows * 4
    out_features = num_kv_heads * group * head_dim
    scale32 = np.float32(scale)
    softcap32 = np.float32(softcap)
    minus_infinity = np.float32(-np.inf)
    zero = np.float32(0.0)
    one = np.float32(1.0)
    two = np.float32(2.0)

    def attention_prefill(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        q, q_stride, k_cache, v_cache, out = args[0], args[1], args[2], args[3], args[4]
        starts, seq_lens, tables = (
            pointer_int32(args[5]),
            pointer_int32(args[6]),
            pointer_int32(args[7]),
        )
        table_stride, num_tiles, sinks = args[8], args[9], args[10]
        queries = stack_bytes(rows_bytes)
        sums = stack_bytes(rows_bytes)
        keys = stack_bytes(keys_bytes)
        values = stack_bytes(keys_bytes)
        scores = stack_bytes(scores_bytes)
        maxima: Any = pointer_float32(stack_bytes(softmax_bytes))
        totals: Any = pointer_float32(stack_bytes(softmax_bytes))
        for item in range(begin, end):
            # Later tiles see more keys: they come first, so that the threads finish together.
            tile = num_tiles - 1 - item // num_kv_heads % num_tiles
            kv_head = item % num_kv_heads
            sequence = item // (num_tiles * num_kv_heads)
            first_token = np.int64(starts[sequence])
            num_queries = np.int64(starts[sequence + 1]) - first_token
            first_query = tile * tile_tokens
            if first_query >= num_queries:
                continue
            count = min(tile_tokens, num_queries - first_query)
            seq_len = np.int64(seq_lens[sequence])
            first_position = seq_len - num_queries + first_query
            first_head = kv_head * group
            num_rows = count * group
            for row in range(num_rows):
                token = first_token + first_query + row // group
                position = token * q_stride + (first_head + row % group) * head_dim
                for d in range(0, head_dim, LANES):
                    scaled = vector_mul(vector_load(q, position + d, q_kind), vector_of(scale32))
                    vector_store(queries, row * head_dim + d, scaled, FP32)
                    vector_store(sums, row * head_dim + d, vector_of(zero), FP32)
                maxima[row] = minus_infinity
                totals[row] = zero

            stop = first_position + count
            start: Any = max(0, first_position + 1 - window) if window > 0 else 0
            for block_start in range(start - start % _KEY_BLOCK, stop, _KEY_BLOCK):
                for offset in range(0, _KEY_BLOCK, LANES):
                    key = block_start + offset
                    target = values + offset * head_dim * 4
                    if key >= stop or key + LANES <= start:
                        for i in range(0, LANES * head_dim, LANES):
                            vector_store(target, i, vector_of(zero), FP32)
                        continue
                    block = np.int64(tables[sequence * table_stride + key // block_size])
                    index = (block * block_size + key % block_size) * row_stride
                    index = (index + kv_head * head_dim) * kv_bytes
                    transpose_rows(
                        keys + offset * 4,
                        k_cache + index,
                        row_stride,
                        head_dim,
                        kv_kind,
                        _KEY_BLOCK,
                    )
                    widen_rows(target, v_cache + index, row_stride, head_dim, kv_kind)
                    # Rows outside the context may hold anything; 0 * NaN would show.
                    for j in range(LANES):
                        if key + j >= stop or key + j < start:
                            for d in range(0, head_dim, LANES):
                                vector_store(target, j * head_dim + d, vector_of(zero), FP32)

                for first_row in range(0, num_rows, TILE_TOTALS):
                    end_row = min(first_row + TILE_TOTALS, num_rows)
                    most_visible = first_position + (end_row - 1) // group + 1 - block_start
                    if most_visible <= 0:
                        continue
                    for i in range(0, TILE_TOTALS * _KEY_BLOCK, LANES):
                        vector_store(scores, i, vector_of(zero), FP32)
                    for d in range(0, head_dim, LANES):
                        add_weighted_tile(
                            scores,
                            _KEY_BLOCK,
                            queries + (first_row * head_dim + d) * 4,
                            head_dim,
                            keys + d * _KEY_BLOCK * 4,
                            _KEY_BLOCK,
                            LANES,
                        )
                    for row in range(first_row, end_row):
                        weights = scores + (row - first_row) * _KEY_BLOCK * 4
                        visible = first_position + row // group + 1 - block_start
                        hidden: Any = max(0, visible - window) if window > 0 else 0
                        if visible <= 0 or hidden >= _KEY_BLOCK:
                            for i in range(0, _KEY_BLOCK, LANES):
                                vector_store(weights, i, vector_of(zero), FP32)
                            continue
                        largest = vector_of(minus_infinity)
                        for i in range(0, _KEY_BLOCK, LANES):
                            score = vector_load(weights, i, FP32)
                            if softcap > 0:
                                power = vector_exp(vector_mul(score, vector_of(two / softcap32)))
                                fraction = vector_div(
                                    vector_of(two), vector_add(power, vector_of(one))
                                )
                                score = vector_mul(
                                    vector_of(softcap32), vector_sub(vector_of(one), fraction)
                                )
                            if visible < _KEY_BLOCK:
                                score = vector_keep_below(
                                    visible - i, score, vector_of(minus_infinity)
                                )
                            if hidden > i:
                                score = vector_keep_below(
                                    hidden - i, vector_of(minus_infinity), score
                                )
                            vector_store(weights, i, score, FP32)
                            largest = vector_max(score, largest)
                        block_largest = vector_largest(largest)
                        before = maxima[row]
                        now = before
                        if not block_largest <= before:
                            now = block_largest
                        maxima[row] = now
                        total = vector_of(zero)
                        for i in range(0, _KEY_BLOCK, LANES):
                            score = vector_load(weights, i, FP32)
                            weight = vector_exp(vector_sub(score, vector_of(now)))
                            vector_store(weights, i, weight, FP32)
                            total = vector_add(total, weight)
                        target = sums + row * head_dim * 4
                        factor = one
                        if now != before:
                            rescale = vector_exp(vector_of(before - now))
                            factor = vector_largest(rescale)
                            for d in range(0, head_dim, LANES):
                                value = vector_mul(vector_load(target, d, FP32), rescale)
                                vector_store(target, d, value, FP32)
                        totals[row] = totals[row] * factor + vector_sum(total)
                    for i in range(0, min(most_visible, _KEY_BLOCK), LANES):
                        add_weighted_tile(
                            sums + first_row * head_dim * 4,
                            head_dim,
                            scores + i * 4,
                            _KEY_BLOCK,
                            values + i * head_dim * 4,
                            head_dim,
                            LANES,
                        )

            for row in range(num_rows):
                total_weight = vector_of(totals[row])
                factors = vector_of(one)
                head = first_head + row % group
                if has_sinks:
                    sink = pointer_float32(sinks)[head]
                    largest_score = maxima[row]
                    if sink > largest_score:
                        largest_score = sink
                    factors = vector_exp(vector_of(maxima[row] - largest_score))
                    total_weight = vector_add(
                        vector_mul(total_weight, factors),
                        vector_exp(vector_of(sink - largest_score)),
                    )
                token = first_token + first_query + row // group
                position = token * out_features + head * head_dim
                for d in range(0, head_dim, LANES):
                    value = vector_mul(vector_load(sums, row * head_dim + d, FP32), factors)
                    vector_store(out, position + d, vector_div(value, total_weight), q_kind)

    return compile_worker(attention_prefill)
