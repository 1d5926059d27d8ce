/* y[T, F] = act(x[:, :F]) * x[:, F:], a row a work-item. With CLAMP the gate is capped at +limit and
   the other half limited to +-limit before. GELU: the tanh form, otherwise silu. */

#include "vector.h"

#define GELU_INNER 0.7978845608028654f  /* sqrt(2 / pi) */
#define GELU_CUBE 0.044715f

static inline float16 act_lanes(float16 x) {
#if GELU
    return 0.5f * x * (1.0f + tanh_lanes(GELU_INNER * (x + GELU_CUBE * x * x * x)));
#else
    return silu_lanes(x);
#endif
}

static inline float act_one(float x) {
#if GELU
    return 0.5f * x * (1.0f + tanh_one(GELU_INNER * (x + GELU_CUBE * x * x * x)));
#else
    return silu_one(x);
#endif
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void gated_activation(
    int size, float limit, __global const float *x, int x_start, int x_stride,
    __global float *y) {
    const size_t row = get_global_id(0);
    __global const float *gates = x + x_start + row * x_stride;
    __global const float *ups = gates + size;
    __global float *to = y + row * size;
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        float16 gate = LOAD(gates + i), up = LOAD(ups + i);
#if CLAMP
        gate = gate > limit ? (float16)(limit) : gate;
        up = up > limit ? (float16)(limit) : up;
        up = up < -limit ? (float16)(-limit) : up;
#endif
        STORE(to + i, act_lanes(gate) * up);
    }
    for (; i < size; i++) {
        float gate = gates[i], up = ups[i];
#if CLAMP
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
#endif
        to[i] = act_one(gate) * up;
    }
}
