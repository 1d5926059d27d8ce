/* Attention over a paged cache, by the online softmax (https://arxiv.org/abs/1805.02867).

   A work-item: TILE_ROWS rows of one key-value head of one sequence, where a row is a query of one
   head of the group (row = query * GROUP + head), against sixteen keys at a time. The keys of a
   tile are transposed in registers, so that the scores of a row are one vector and the softmax has
   no sums across lanes but one a tile. PARTS > 1 work-items share the keys of a row; `combine` puts
   their results together.

   k_cache, v_cache: [blocks][BLOCK][NUM_KV_HEADS][HEAD_DIM or V_HEAD_DIM]. The cache is read at keys
   that some row of the tile sees, or at keys of the same block whose scores are then not used.
   Given when it is compiled: TILE_ROWS GROUP NUM_KV_HEADS HEAD_DIM V_HEAD_DIM BLOCK WINDOW (0: all)
   CAUSAL SOFTCAP (0 or 1) HAS_SINKS. */

#include "vector.h"

#define KEYS 16
#define NUM_HEADS (GROUP * NUM_KV_HEADS)
#define PART_SIZE (V_HEAD_DIM + 2)  /* values, largest score, sum of weights */

/* Sixteen of the thirty-two values of two vectors: every other one. */
#ifdef __clang__
#define EVEN(a, b)                                                                                 \
    __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b)                                                                                  \
    __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#else
#define EVEN(a, b) (float16)((a).even, (b).even)
#define ODD(a, b) (float16)((a).odd, (b).odd)
#endif

/* One step of the transposition of 16 x 16: four of them, each with the rows in the order of the
   step before, rotate the eight bits (row, column) of an index by four. */
#define STEP(bit)                                                                                  \
    _Pragma("unroll") for (int i = 0; i < 16; i++) if (!(i & (bit))) {                             \
        const float16 a = t[i], b = t[i | (bit)];                                                  \
        t[i] = EVEN(a, b);                                                                         \
        t[i | (bit)] = ODD(a, b);                                                                  \
    }

/* scores[row] += q of the row times sixteen keys; q rows are HEAD_DIM floats, not yet scaled. */
static inline void add_scores(float16 scores[TILE_ROWS], __global const float *const q[TILE_ROWS],
                              __global const float *keys) {
    for (int d = 0; d < HEAD_DIM; d += LANES) {
        float16 t[KEYS];
#pragma unroll
        for (int i = 0; i < KEYS; i++) t[i] = LOAD(keys + i * (NUM_KV_HEADS * HEAD_DIM) + d);
        STEP(1) STEP(2) STEP(4) STEP(8)
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) {
            float16 sum = scores[r];
#pragma unroll
            for (int i = 0; i < LANES; i++) sum += (float16)(q[r][d + i]) * t[i];
            scores[r] = sum;
        }
    }
}

/* out[row] = out[row] * keep[row] + weights[row] @ values, over keys first to last (not included). */
static inline void add_values(float out[TILE_ROWS][V_HEAD_DIM], const float keep[TILE_ROWS],
                              const float weights[TILE_ROWS][KEYS], __global const float *values,
                              int first, int last) {
    for (int d = 0; d < V_HEAD_DIM; d += LANES) {
        float16 sum[TILE_ROWS];
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) sum[r] = *(lanes *)(out[r] + d) * keep[r];
        for (int j = first; j < last; j++) {
            const float16 v = LOAD(values + j * (NUM_KV_HEADS * V_HEAD_DIM) + d);
#pragma unroll
            for (int r = 0; r < TILE_ROWS; r++) sum[r] += weights[r][j] * v;
        }
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) *(lanes *)(out[r] + d) = sum[r];
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void attend(
    __global const float *sinks, float scale, float softcap, __global const float *q, int q_start,
    int q_stride, __global const float *k_cache, int k_start, __global const float *v_cache,
    int v_start, __global const int *starts, int starts_start, __global const int *lengths,
    int lengths_start, __global const int *table, int table_start, int table_stride, int parts,
    __global float *y) {
    const int tile = get_global_id(0) / parts, part = get_global_id(0) % parts;
    const int kv_head = get_global_id(1), sequence = get_global_id(2);
    const int first_query = starts[starts_start + sequence];
    const int num_queries = starts[starts_start + sequence + 1] - first_query;
    const int num_rows = num_queries * GROUP, first_row = tile * TILE_ROWS;
    if (first_row >= num_rows) return;
    const int length = lengths[lengths_start + sequence], before = length - num_queries;
    const int last_row = first_row + TILE_ROWS < num_rows ? first_row + TILE_ROWS : num_rows;

    __global const float *from[TILE_ROWS];
    float out[TILE_ROWS][V_HEAD_DIM], largest[TILE_ROWS], total[TILE_ROWS];
    int position[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) {
        const int row = first_row + r < last_row ? first_row + r : last_row - 1;
        const int head = kv_head * GROUP + row % GROUP;
        from[r] = q + q_start + (size_t)(first_query + row / GROUP) * q_stride + head * HEAD_DIM;
        position[r] = CAUSAL ? before + row / GROUP : length - 1;
        largest[r] = NOTHING;
        total[r] = 0.0f;
        for (int d = 0; d < V_HEAD_DIM; d++) out[r][d] = 0.0f;
#if HAS_SINKS
        if (part == 0) {
            largest[r] = sinks[head];
            total[r] = 1.0f;
        }
#endif
    }

    int begin = 0;
    const int end = position[TILE_ROWS - 1] + 1;
    if (WINDOW && position[0] + 1 > WINDOW) begin = position[0] + 1 - WINDOW;
    const int aligned = begin / KEYS * KEYS;
    const int each = ((end - aligned + parts - 1) / parts + KEYS - 1) / KEYS * KEYS;
    const int part_begin = aligned + part * each;
    const int part_end = part_begin + each < end ? part_begin + each : end;

    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int key = part_begin; key < part_end; key += KEYS) {
        const size_t block = table[table_start + sequence * table_stride + key / BLOCK];
        const size_t slot = (block * BLOCK + key % BLOCK) * NUM_KV_HEADS + kv_head;
        float16 scores[TILE_ROWS];
        float weights[TILE_ROWS][KEYS], keep[TILE_ROWS];
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) scores[r] = 0.0f;
        add_scores(scores, from, k_cache + k_start + slot * HEAD_DIM);
        for (int r = 0; r < TILE_ROWS; r++) {
            float16 s = scores[r] * scale;
#if SOFTCAP
            s = softcap * tanh_lanes(s / softcap);
#endif
            const int16 at = key + lane;
            int16 seen = at <= position[r];
            if (WINDOW) seen = seen & (at > position[r] - WINDOW);
            s = seen ? s : (float16)(NOTHING);
            const float peak = largest_of(s);
            const float now = peak > largest[r] ? peak : largest[r];
            const float16 weight = seen ? exp_lanes(s - now) : (float16)(0.0f);
            keep[r] = exp_one(largest[r] - now);
            total[r] = total[r] * keep[r] + sum_of(weight);
            largest[r] = now;
            *(lanes *)weights[r] = weight;
        }
        const int first = begin > key ? begin - key : 0;
        const int last = part_end - key < KEYS ? part_end - key : KEYS;
        add_values(out, keep, weights, v_cache + v_start + slot * V_HEAD_DIM, first, last);
    }

    for (int r = 0; first_row + r < last_row; r++) {
        const int row = first_row + r, head = kv_head * GROUP + row % GROUP;
        const size_t at = (size_t)(first_query + row / GROUP) * NUM_HEADS + head;
        __global float *to = y + (parts == 1 ? at * V_HEAD_DIM : (at * parts + part) * PART_SIZE);
        const float factor = parts == 1 ? 1.0f / total[r] : 1.0f;
        for (int d = 0; d < V_HEAD_DIM; d += LANES) STORE(to + d, *(lanes *)(out[r] + d) * factor);
        if (parts > 1) {
            to[V_HEAD_DIM] = largest[r];
            to[V_HEAD_DIM + 1] = total[r];
        }
    }
}

/* One query of one head a work-item: the parts weighted by exp(their largest - the largest). */
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void combine(
    __global const float *partial, int parts, __global float *y) {
    const size_t at = get_global_id(0);
    __global const float *from = partial + at * parts * PART_SIZE;
    float largest = NOTHING, total = 0.0f;
    for (int p = 0; p < parts; p++) {
        const float peak = from[p * PART_SIZE + V_HEAD_DIM];
        largest = peak > largest ? peak : largest;
    }
    for (int d = 0; d < V_HEAD_DIM; d += LANES) STORE(y + at * V_HEAD_DIM + d, (float16)(0.0f));
    for (int p = 0; p < parts; p++) {
        const float factor = exp_one(from[p * PART_SIZE + V_HEAD_DIM] - largest);
        total += factor * from[p * PART_SIZE + V_HEAD_DIM + 1];
        for (int d = 0; d < V_HEAD_DIM; d += LANES) {
            __global float *to = y + at * V_HEAD_DIM + d;
            STORE(to, LOAD(to) + factor * LOAD(from + p * PART_SIZE + d));
        }
    }
    for (int d = 0; d < V_HEAD_DIM; d += LANES) {
        __global float *to = y + at * V_HEAD_DIM + d;
        STORE(to, LOAD(to) / total);
    }
}
