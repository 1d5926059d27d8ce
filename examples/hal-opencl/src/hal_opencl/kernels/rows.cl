/* Rows to other rows: the embedding gather, and new keys and values to their slots of the cache. */

#include "vector.h"

static inline void copy_row(__global float *to, __global const float *from, int size) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) STORE(to + i, LOAD(from + i));
    for (; i < size; i++) to[i] = from[i];
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void embedding(
    __global const float *table, int size, __global const long *ids, int ids_start,
    __global float *y) {
    const size_t token = get_global_id(0);
    copy_row(y + token * size, table + ids[ids_start + token] * size, size);
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void kv_write(
    int k_size, int v_size, __global const float *k, int k_start, int k_stride,
    __global const float *v, int v_start, int v_stride, __global float *k_cache, int k_cache_start,
    __global float *v_cache, int v_cache_start, __global const long *slots, int slots_start) {
    const size_t token = get_global_id(0);
    const long slot = slots[slots_start + token];
    copy_row(k_cache + k_cache_start + slot * k_size, k + k_start + token * k_stride, k_size);
    copy_row(v_cache + v_cache_start + slot * v_size, v + v_start + token * v_stride, v_size);
}
