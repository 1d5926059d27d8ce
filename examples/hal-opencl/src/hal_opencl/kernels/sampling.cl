/* Top-k, then top-p: -inf outside the kept set, a row of logits a work-item.

   No sort: logits as integers of the same order (`key`) are counted by one byte at a time, the
   highest first, and the walk down the 256 bins stops where the bound is crossed. Four passes find
   the key of the last token that stays and how many of the tokens with that very key stay. Top-k
   adds one for a token, top-p its probability, in double so that the order of the sum is of no
   importance. */

#pragma OPENCL EXTENSION cl_khr_fp64 : enable

#include "vector.h"

#define BINS 256

static inline uint key_of(float x) {
    const uint bits = as_uint(x + 0.0f);  /* -0 and 0 are equal */
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

typedef struct {
    uint key;    /* of the last token that stays */
    long stays;  /* of the tokens with that key, the first so many */
} bound;

/* The first `limit` tokens in descending order. */
static inline bound bound_of_count(__global const float *x, int size, long limit) {
    uint prefix = 0;
    long left = limit;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint counts[BINS];
        for (int b = 0; b < BINS; b++) counts[b] = 0;
        const uint mask = shift == 24 ? 0 : ~0u << (shift + 8);
        for (int i = 0; i < size; i++) {
            const uint key = key_of(x[i]);
            if ((key & mask) == prefix) counts[key >> shift & 255]++;
        }
        int b = BINS - 1;
        while (b > 0 && counts[b] < left) left -= counts[b--];
        prefix |= (uint)b << shift;
    }
    return (bound){prefix, left};
}

/* The smallest prefix of the tokens within `kept` whose probability reaches p of theirs. */
static inline bound bound_of_mass(__global const float *x, int size, bound kept, float p) {
    float largest = -INFINITY;
    for (int i = 0; i < size; i++) largest = x[i] > largest ? x[i] : largest;
    double total = 0.0;
    long seen = 0;
    for (int i = 0; i < size; i++) {
        const uint key = key_of(x[i]);
        if (key > kept.key || (key == kept.key && seen++ < kept.stays)) {
            total += exp_one(x[i] - largest);
        }
    }
    uint prefix = 0;
    double before = 0.0;
    const double target = p * total;
    long count = 0;
    double each = 0.0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        double masses[BINS];
        uint counts[BINS];
        for (int b = 0; b < BINS; b++) masses[b] = counts[b] = 0;
        const uint mask = shift == 24 ? 0 : ~0u << (shift + 8);
        for (int i = 0; i < size; i++) {
            const uint key = key_of(x[i]);
            if (key < kept.key || (key & mask) != prefix) continue;
            masses[key >> shift & 255] += exp_one(x[i] - largest);
            counts[key >> shift & 255]++;
        }
        /* The bin of the kept set's own bound is the last one; rounding may not go beyond it. */
        const bool has_bound = (kept.key & mask) == prefix;
        const int lowest = has_bound ? (int)(kept.key >> shift & 255) : 0;
        int b = BINS - 1, last = BINS - 1;
        for (; b >= lowest; b--) {
            if (!counts[b]) continue;
            last = b;
            if (before + masses[b] >= target) break;
            before += masses[b];
        }
        /* Not crossed: everything down to the last bin with a token stays. */
        if (b < lowest) before -= masses[last];
        prefix |= (uint)last << shift;
        count = counts[last];
        each = masses[last] / count;
    }
    if (prefix == kept.key && kept.stays < count) count = kept.stays;
    long stays = each > 0.0 ? (long)ceil((target - before) / each) : count;
    stays = stays < 1 ? 1 : stays;
    return (bound){prefix, stays < count ? stays : count};
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void top_k_top_p(
    int size, __global const float *logits, int logits_start, int logits_stride,
    __global const long *top_k, int top_k_start, __global const float *top_p, int top_p_start,
    __global float *y) {
    const size_t row = get_global_id(0);
    __global const float *x = logits + logits_start + row * logits_stride;
    __global float *to = y + row * size;
    const long k = top_k[top_k_start + row] < 1 ? 1 : top_k[top_k_start + row];
    const float p = top_p[top_p_start + row];
    bound kept = {0, size};
    if (k < size) kept = bound_of_count(x, size, k);
    if (p < 1.0f) kept = bound_of_mass(x, size, kept, p);
    long seen = 0;
    for (int i = 0; i < size; i++) {
        const uint key = key_of(x[i]);
        const bool stays = key > kept.key || (key == kept.key && seen++ < kept.stays);
        to[i] = stays ? x[i] : -INFINITY;
    }
}
