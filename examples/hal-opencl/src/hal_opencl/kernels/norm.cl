/* y = x / sqrt(mean(x^2) + eps) * weight, a row a work-item. With HAS_RESIDUAL x is first added to
   the residual, and the sum is written to `total`. */

#include "vector.h"

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void rms_norm(
    __global const float *weight, float eps, int size, __global const float *x, int x_start,
    __global const float *residual, int residual_start, __global float *total,
    __global float *y) {
    const size_t start = (size_t)get_global_id(0) * size;
    __global const float *from = x + x_start + start;
    float16 squares = 0.0f;
    float square = 0.0f;
    int i = 0;
#if HAS_RESIDUAL
    __global const float *other = residual + residual_start + start;
    __global float *sums = total + start;
    for (; i + LANES <= size; i += LANES) {
        const float16 v = LOAD(from + i) + LOAD(other + i);
        STORE(sums + i, v);
        squares += v * v;
    }
    for (; i < size; i++) {
        const float v = from[i] + other[i];
        sums[i] = v;
        square += v * v;
    }
    __global const float *values = sums;
#else
    for (; i + LANES <= size; i += LANES) {
        const float16 v = LOAD(from + i);
        squares += v * v;
    }
    for (; i < size; i++) square += from[i] * from[i];
    __global const float *values = from;
#endif
    const float factor = 1.0f / sqrt((square + sum_of(squares)) / (float)size + eps);
    __global float *to = y + start;
    for (i = 0; i + LANES <= size; i += LANES) {
        STORE(to + i, LOAD(values + i) * factor * LOAD(weight + i));
    }
    for (; i < size; i++) to[i] = values[i] * factor * weight[i];
}
