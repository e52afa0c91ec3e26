/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_products.h: the two products of paged_attn.c for few query lanes, Q K^T and P V, for a run
 * of 4, 2 or 1 lanes and all kv heads of a task. products_of gives the loops of a dtype.
 *
 * One load of a key serves all lanes of the run. W / lanes keys are computed at once, so that their
 * scores fill one vector: scores and probabilities lie as [key / keys][lane][key % keys], with
 * keys = W / lanes.
 * Each product also fetches the rows that it will read next (paged_fetch.h). On tiles (AMX)
 * tile_product serves instead. */
#ifndef GPUKERN_CPU_PAGED_PRODUCTS_H
#define GPUKERN_CPU_PAGED_PRODUCTS_H

#include "../blocks.h"
#include "paged_fetch.h"
#include "tile.h"

/* Vectors of values at once: with 4 lanes their sums leave registers for the values. */
enum {
    PAGED_VECTORS = W == 16 ? 4 : 2
};

/* The columns of O that vf_load2_split permutes; the others stand in order. */
INLINE int64_t split_columns(int64_t head_dim_v) {
    return head_dim_v / (PAGED_VECTORS * W) * (PAGED_VECTORS * W);
}

/* s[head][j / keys][lane][j % keys] = q[head][lane] . k[j][head] for `lanes` lanes, keys = W /
 * lanes at once: their sums fill one vector. q[head] is [head_dim / (W PAIR)][lanes][W]; k repeats
 * its last key up to whole vectors of keys. */
INLINE void dots(const int lanes, gk_dtype dtype, int64_t head_dim, const cell *q, int64_t q_head,
                 const key_rows *k, fetch *next, float *s, int64_t s_head) {
    const int keys = W / lanes, element = dtype == GK_F32 ? 4 : 2, step = 2 * W * PAIR * element;
    const int64_t whole = head_dim / (2 * W * PAIR) * (2 * W * PAIR);
    const char *line = next->at;
    for (int64_t j = 0; j < k->num_keys; j += keys)
        for (int64_t h = 0; h < k->num_heads; ++h) {
            const cell *q_d = q + h * q_head;
            const char *row[W];
            vf acc[W];
            if (step < 64)
                for (int i = 0; i < keys; ++i) line = fetch_bytes(next, line, element * head_dim);
#pragma GCC unroll 16
            for (int i = 0; i < keys; ++i) row[i] = k->first[j + i] + h * k->head_bytes;
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) acc[i] = vf_set1(0);
            for (int64_t d = 0; d < whole; d += 2 * W * PAIR, q_d += 2 * W * lanes)
#pragma GCC unroll 16
                for (int i = 0; i < keys; ++i) {
                    vc key[2];
                    vc_load2_split_along_k(row[i], dtype, d, key);
                    if (step >= 64) line = fetch_bytes(next, line, step);
#pragma GCC unroll 2
                    for (int w = 0; w < 2; ++w)
#pragma GCC unroll 4
                        for (int l = 0; l < lanes; ++l)
                            acc[l * keys + i] = vc_dot(acc[l * keys + i],
                                                       vc_load(q_d + (w * lanes + l) * W), key[w]);
                }
            for (int64_t d = whole; d < head_dim; d += W * PAIR, q_d += W * lanes)
#pragma GCC unroll 16
                for (int i = 0; i < keys; ++i) {
                    const vc key = vc_load_along_k(row[i], dtype, d, head_dim - d);
                    if (step >= 64) line = fetch_bytes(next, line, step / 2);
#pragma GCC unroll 4
                    for (int l = 0; l < lanes; ++l)
                        acc[l * keys + i] = vc_dot(acc[l * keys + i], vc_load(q_d + l * W), key);
                }
            vf_store(s + h * s_head + j * lanes, vf_sums(acc));
        }
    next->at = line;
}

/* Where p of key j and lane 0 of a run lies, as a cell: [j / keys][lane][j % keys]. */
INLINE int64_t p_at(const int lanes, int64_t j) {
    const int keys = W / lanes;
    return j / keys * (W / PAIR) + j % keys / PAIR;
}

INLINE void weigh(const int lanes, const int vectors, gk_dtype dtype, int64_t d, int64_t left,
                  const cell *p, const char *row0, const char *row1, vf acc[4][4]) {
    vc x[4];
    if (vectors == 1)
        x[0] = vc_load_across_k(row0, row1, dtype, d, left);
    else
#pragma GCC unroll 4
        for (int w = 0; w < vectors; w += 2)
            vc_load2_split_across_k(row0, row1, dtype, d + w * W, x + w);
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l) {
        const vc weight = vc_set1(p[l * (W / lanes / PAIR)]);
#pragma GCC unroll 4
        for (int w = 0; w < vectors; ++w) acc[l][w] = vc_dot(acc[l][w], weight, x[w]);
    }
}

/* o[lane][d .. d + vectors W] += sum_j p[lane][j] v[j], v[j] + at the row */
INLINE void weighted_columns(const int lanes, const int vectors, gk_dtype dtype, int64_t d,
                             int64_t left, const cell *p, const char *const *v, int64_t at,
                             int64_t n, fetch *next, float *o, int64_t o_step) {
    const int run = W / lanes < 4 ? W / lanes : 4; /* keys whose p lie side by side */
    const int step = vectors * W * PAIR * (dtype == GK_F32 ? 4 : 2);
    const char *line = next->at;
    vf acc[4][4];
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l)
#pragma GCC unroll 4
        for (int w = 0; w < vectors; ++w) acc[l][w] = vf_load(o + l * o_step + d + w * W);
    if (step < 64) line = fetch_bytes(next, line, n * step);
    int64_t j = 0;
    for (; j + run <= n; j += run) {
        const cell *p_j = p + p_at(lanes, j);
#pragma GCC unroll 4
        for (int i = 0; i < run; i += PAIR) {
            if (step >= 64) line = fetch_bytes(next, line, step);
            weigh(lanes, vectors, dtype, d, left, p_j + i / PAIR, v[j + i] + at,
                  PAIR == 2 ? v[j + i + 1] + at : NULL, acc);
        }
    }
    for (; j < n; j += PAIR)
        weigh(lanes, vectors, dtype, d, left, p + p_at(lanes, j), v[j] + at,
              PAIR == 2 && j + 1 < n ? v[j + 1] + at : NULL, acc);
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l)
#pragma GCC unroll 4
        for (int w = 0; w < vectors; ++w) vf_store(o + l * o_step + d + w * W, acc[l][w]);
    next->at = line;
}

/* o[head][lane] += sum_j p[head][lane][j] v[j][head], O in registers for some keys. */
INLINE void weighted_rows(const int lanes, gk_dtype dtype, int64_t head_dim_v, const cell *p,
                          int64_t p_head, const key_rows *v, fetch *next, float *o, int64_t o_head,
                          int64_t o_step) {
    const int64_t keys = SYM(gk_paged_attn_blocks).v_keys;
    for (int64_t j = 0; j < v->num_keys; j += keys)
        for (int64_t h = 0; h < v->num_heads; ++h) {
            const int64_t n = gk_min_i64(keys, v->num_keys - j), at = h * v->head_bytes;
            const cell *p_h = p + h * p_head + p_at(lanes, j);
            const char *const *row = v->first + j;
            float *o_h = o + h * o_head;
            int64_t d = 0;
            for (; d + PAGED_VECTORS * W <= head_dim_v; d += PAGED_VECTORS * W)
                weighted_columns(lanes, PAGED_VECTORS, dtype, d, W, p_h, row, at, n, next, o_h,
                                 o_step);
            for (; d < head_dim_v; d += W)
                weighted_columns(lanes, 1, dtype, d, head_dim_v - d, p_h, row, at, n, next, o_h,
                                 o_step);
        }
}

#if !TILED /* tiles take one run of 16 lanes */
/* ---- instances ------------------------------------------------------------------------------- */
/* One copy of the loops for each dtype of the ISA and each length of a run. */
typedef struct products {
    void (*dots)(int64_t head_dim, const cell *q, int64_t q_head, const key_rows *k, fetch *next,
                 float *s, int64_t s_head);
    void (*weighted_rows)(int64_t head_dim_v, const cell *p, int64_t p_head, const key_rows *v,
                          fetch *next, float *o, int64_t o_head, int64_t o_step);
} products;

#define PRODUCTS(type, dtype, lanes)                                                               \
    static void __attribute__((noinline)) dots_##type##_##lanes(                                   \
        int64_t head_dim, const cell *q, int64_t q_head, const key_rows *k, fetch *next, float *s, \
        int64_t s_head) {                                                                          \
        dots(lanes, dtype, head_dim, q, q_head, k, next, s, s_head);                               \
    }                                                                                              \
    static void __attribute__((noinline)) weighted_rows_##type##_##lanes(                          \
        int64_t head_dim_v, const cell *p, int64_t p_head, const key_rows *v, fetch *next,         \
        float *o, int64_t o_head, int64_t o_step) {                                                \
        weighted_rows(lanes, dtype, head_dim_v, p, p_head, v, next, o, o_head, o_step);            \
    }
#define PRODUCTS_OF(type, dtype) \
    PRODUCTS(type, dtype, 1) PRODUCTS(type, dtype, 2) PRODUCTS(type, dtype, 4)
#define PRODUCTS_ROW(type)                                                                        \
    {                                                                                             \
        {dots_##type##_1, weighted_rows_##type##_1}, {dots_##type##_2, weighted_rows_##type##_2}, \
        {                                                                                         \
            dots_##type##_4, weighted_rows_##type##_4                                             \
        }                                                                                         \
    }
PRODUCTS_OF(bf16, GK_BF16)
static const products bf16_products[] = PRODUCTS_ROW(bf16);
#if PAIR == 1
PRODUCTS_OF(f32, GK_F32)
PRODUCTS_OF(f16, GK_F16)
static const products f32_products[] = PRODUCTS_ROW(f32);
static const products f16_products[] = PRODUCTS_ROW(f16);
#else
#define f32_products bf16_products
#define f16_products bf16_products
#endif

/* The products of a dtype: of a run of 1, 2 or 4 lanes at [lanes / 2]. */
INLINE const products *products_of(gk_dtype dtype) {
    return dtype == GK_F32 ? f32_products : dtype == GK_F16 ? f16_products : bf16_products;
}
#endif

#endif
