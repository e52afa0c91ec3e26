/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_products: Q K^T and P V of a unit for 4, 2 or 1 lanes of every head. Included by
 * paged_attn.c alone. */
/* s[head][j / keys][lane][j % keys] = q[head][lane] . k[j][head] for `lanes` lanes, keys = W /
 * lanes at once: their sums fill one vector. q[head] is [head_dim / (W PAIR)][lanes][W]; k repeats
 * its last key up to whole vectors of keys. */
INLINE void dots(const int lanes, gk_dtype dtype, int64_t head_dim, const cell *q, int64_t q_head,
                 const key_rows *k, fetch *next, float *s, int64_t s_head) {
    const int keys = W / lanes, element = dtype == GK_F32 ? 4 : 2, piece = 2 * W * PAIR * element;
    const int64_t whole = head_dim / (2 * W * PAIR) * (2 * W * PAIR);
    const char *ahead = next->at;
    for (int64_t j = 0; j < k->num_keys; j += keys)
        for (int64_t h = 0; h < k->num_heads; ++h) {
            const cell *q_d = q + h * q_head;
            const char *row[W];
            vf acc[W];
            if (piece < 64)
                for (int i = 0; i < keys; ++i) ahead = fetch_bytes(next, ahead, element * head_dim);
#pragma GCC unroll 16
            for (int i = 0; i < keys; ++i) row[i] = k->first[j + i] + h * k->head_bytes;
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) acc[i] = vf_set1(0);
            for (int64_t d = 0; d < whole; d += 2 * W * PAIR, q_d += 2 * W * lanes)
#pragma GCC unroll 16
                for (int i = 0; i < keys; ++i) {
                    vc key[2];
                    vc_load2_split_along_k(row[i], dtype, d, key);
                    if (piece >= 64) ahead = fetch_bytes(next, ahead, piece);
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
                    if (piece >= 64) ahead = fetch_bytes(next, ahead, piece / 2);
#pragma GCC unroll 4
                    for (int l = 0; l < lanes; ++l)
                        acc[l * keys + i] = vc_dot(acc[l * keys + i], vc_load(q_d + l * W), key);
                }
            vf_store(s + h * s_head + j * lanes, vf_sums(acc));
        }
    next->at = ahead;
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
    const int piece = vectors * W * PAIR * (dtype == GK_F32 ? 4 : 2);
    const char *ahead = next->at;
    vf acc[4][4];
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l)
#pragma GCC unroll 4
        for (int w = 0; w < vectors; ++w) acc[l][w] = vf_load(o + l * o_step + d + w * W);
    if (piece < 64) ahead = fetch_bytes(next, ahead, n * piece);
    int64_t j = 0;
    for (; j + run <= n; j += run) {
        const cell *p_j = p + p_at(lanes, j);
#pragma GCC unroll 4
        for (int i = 0; i < run; i += PAIR) {
            if (piece >= 64) ahead = fetch_bytes(next, ahead, piece);
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
    next->at = ahead;
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
            for (; d + VECTORS * W <= head_dim_v; d += VECTORS * W)
                weighted_columns(lanes, VECTORS, dtype, d, W, p_h, row, at, n, next, o_h, o_step);
            for (; d < head_dim_v; d += W)
                weighted_columns(lanes, 1, dtype, d, head_dim_v - d, p_h, row, at, n, next, o_h,
                                 o_step);
        }
}
