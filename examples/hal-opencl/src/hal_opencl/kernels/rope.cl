/* Rotates 2 * HALF values of each head from START on, in place, a token a work-item; by the
   negative angle with INVERSE.

   table: [positions][2 * HALF], cosines, then sines. */

#include "vector.h"

#if INVERSE
#define TURN(s) (-(s))
#else
#define TURN(s) (s)
#endif

static inline void rotate_halves(__global float *x, __global const float *row) {
    int i = 0;
    for (; i + LANES <= HALF; i += LANES) {
        const float16 a = LOAD(x + i), b = LOAD(x + HALF + i);
        const float16 c = LOAD(row + i), s = TURN(LOAD(row + HALF + i));
        STORE(x + i, a * c - b * s);
        STORE(x + HALF + i, b * c + a * s);
    }
    for (; i < HALF; i++) {
        const float a = x[i], b = x[HALF + i], c = row[i], s = TURN(row[HALF + i]);
        x[i] = a * c - b * s;
        x[HALF + i] = b * c + a * s;
    }
}

static inline void rotate_pairs(__global float *x, __global const float *row) {
    for (int i = 0; i < HALF; i++) {
        const float a = x[2 * i], b = x[2 * i + 1], c = row[i], s = TURN(row[HALF + i]);
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = b * c + a * s;
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void rope(
    __global const float *table, __global float *q, int q_start, int q_stride, __global float *k,
    int k_start, int k_stride, __global const long *positions, int positions_start) {
    const size_t token = get_global_id(0);
    __global const float *row = table + positions[positions_start + token] * (2 * HALF);
    for (int head = 0; head < NUM_HEADS; head++) {
        __global float *x = q + q_start + token * q_stride + head * HEAD_DIM + START;
        if (INTERLEAVED) rotate_pairs(x, row); else rotate_halves(x, row);
    }
    for (int head = 0; head < NUM_KV_HEADS; head++) {
        __global float *x = k + k_start + token * k_stride + head * HEAD_DIM + START;
        if (INTERLEAVED) rotate_pairs(x, row); else rotate_halves(x, row);
    }
}
