/* y[T, N] = epilogue(x[T, K] @ weight[N, K].T + bias).

   Register tiling: a work-item computes TILE_ROWS rows by one panel of 32 columns, TILE_ROWS * 2
   vectors of sixteen, all in registers, and goes through its rows tile by tile, so that the panel
   stays in the cache. A work-group is one work-item: on a CPU it is one task of a core.

   packed: [panels][K][32], zero beyond N. With GATED a panel is 16 columns of the gate and the same
   16 of the other half. TILE_ROWS, GATED, SILU, HAS_BIAS: given when it is compiled. */

#include "vector.h"

#define PANEL 32

static inline void store_part(__global float *to, float16 value, int count) {
    if (count >= LANES) {
        STORE(to, value);
        return;
    }
    float parts[LANES];
    *(float16 *)parts = value;
    for (int i = 0; i < count; i++) to[i] = parts[i];
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void gemm(
    __global const float *packed, __global const float *bias, __global const float *x, int x_start,
    int x_stride, __global float *y, int rows, int rows_each, int k_size, int out_size) {
    const int panel = get_global_id(0);
    const int begin = get_global_id(1) * rows_each;
    const int end = begin + rows_each < rows ? begin + rows_each : rows;
    __global const float *w = packed + (size_t)panel * k_size * PANEL;

    for (int row = begin; row < end; row += TILE_ROWS) {
        float16 left[TILE_ROWS], right[TILE_ROWS];
        __global const float *from[TILE_ROWS];
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i++) {
            /* A tile beyond the last row computes that row again and stores nothing of it. */
            const int at = row + i < end ? row + i : end - 1;
            from[i] = x + x_start + (size_t)at * x_stride;
#if HAS_BIAS
            left[i] = LOAD(bias + panel * PANEL);
            right[i] = LOAD(bias + panel * PANEL + LANES);
#else
            left[i] = 0.0f;
            right[i] = 0.0f;
#endif
        }
        for (int k = 0; k < k_size; k++) {
            const float16 w_left = LOAD(w + (size_t)k * PANEL);
            const float16 w_right = LOAD(w + (size_t)k * PANEL + LANES);
#pragma unroll
            for (int i = 0; i < TILE_ROWS; i++) {
                const float16 value = (float16)(from[i][k]);
                left[i] += value * w_left;
                right[i] += value * w_right;
            }
        }
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i++) {
            if (row + i >= end) continue;
            __global float *to = y + (size_t)(row + i) * out_size;
#if GATED
            const int column = panel * LANES;
            store_part(to + column, silu_lanes(left[i]) * right[i], out_size - column);
#else
            const int column = panel * PANEL;
#if SILU
            left[i] = silu_lanes(left[i]);
            right[i] = silu_lanes(right[i]);
#endif
            store_part(to + column, left[i], out_size - column);
            store_part(to + column + LANES, right[i], out_size - column - LANES);
#endif
        }
    }
}
