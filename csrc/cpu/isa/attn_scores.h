/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_scores.h: masks and biases of attention on the CPU (gpukern.h), for forward and
 * backward: where a row's mask and biases lie, the bits of W rows, and biases of W rows transposed
 * into lanes. */
#ifndef GPUKERN_CPU_ATTN_SCORES_H
#define GPUKERN_CPU_ATTN_SCORES_H

#include "../../core/attn_mask.h"
#include "attn.h"

/* ---- where they lie -------------------------------------------------------------------------- */
/* A call's mask and biases, with sizes that broadcast as strides of 0. Strides in elements. */
typedef struct attn_scores {
    const int32_t *mask; /* NULL = none */
    gk_mask_store store;
    gk_mask_layout at;
    int64_t mask_b, mask_h, seq_q, seq_k;
    const char *bias; /* NULL = none */
    gk_dtype bias_dtype;
    int64_t bias_b, bias_h, bias_q, bias_k;
    const float *distance; /* NULL = none; entry j - i + Sq - 1 */
    int64_t distance_h, distance_k;
} attn_scores;

INLINE int64_t broadcast_stride(const gk_tensor *t, int d) {
    return t->shape[d] == 1 ? 0 : t->stride[d];
}

INLINE attn_scores attn_scores_of(const gk_attn_scores *x, int64_t seq_q, int64_t seq_k) {
    attn_scores s = {.seq_q = seq_q, .seq_k = seq_k};
    if (!x) return s;
    if (x->mask) {
        s.mask = x->mask->data;
        s.store = x->store;
        s.at = gk_mask_layout_of(x->store, seq_q, seq_k, false);
        s.mask_b = broadcast_stride(x->mask, 0);
        s.mask_h = broadcast_stride(x->mask, 1);
    }
    if (x->bias) {
        s.bias = x->bias->data;
        s.bias_dtype = x->bias->dtype;
        s.bias_b = broadcast_stride(x->bias, 0);
        s.bias_h = broadcast_stride(x->bias, 1);
        s.bias_q = broadcast_stride(x->bias, 2);
        s.bias_k = broadcast_stride(x->bias, 3);
    }
    if (x->distance_bias) {
        s.distance = x->distance_bias->data;
        s.distance_h = broadcast_stride(x->distance_bias, 0);
        s.distance_k = x->distance_bias->stride[1];
    }
    return s;
}

INLINE bool attn_has_bias(const attn_scores *s) { return s->bias || s->distance; }

/* Row i of head h of sequence b. */
typedef struct attn_row {
    gk_mask mask;          /* where the call has one */
    int64_t i;             /* row */
    const char *bias;      /* of key 0 */
    const float *distance; /* of key 0 */
} attn_row;

INLINE attn_row attn_row_of(const attn_scores *s, int64_t b, int64_t h, int64_t i) {
    attn_row r = {.i = i};
    if (s->mask)
        r.mask = gk_mask_at(s->mask + b * s->mask_b + h * s->mask_h, &s->at, s->store, s->seq_q,
                            s->seq_k);
    if (s->bias)
        r.bias = s->bias + (int64_t)gk_dtype_bytes(s->bias_dtype) *
                               (b * s->bias_b + h * s->bias_h + i * s->bias_q);
    if (s->distance)
        r.distance = s->distance + h * s->distance_h + (s->seq_q - 1 - i) * s->distance_k;
    return r;
}

/* ---- masks ----------------------------------------------------------------------------------- */
/* Words of W rows and one block: all bits of a full block, none of an empty one. word[q] are the
 * columns c with c % 8 / 2 = q. */
INLINE void attn_words(const attn_row *const row[W], int64_t block, vi word[4]) {
    uint32_t t[4][W];
    for (int i = 0; i < W; ++i) {
        const int flag = gk_mask_flag(&row[i]->mask, row[i]->i, block), kind = flag & 3;
        uint32_t own[4];
        if (kind <= GK_BLOCK_FULL)
            for (int q = 0; q < 4; ++q) own[q] = kind == GK_BLOCK_FULL ? 0xffffffffu : 0;
        else
            gk_mask_row(&row[i]->mask, row[i]->i, block, flag, own);
        for (int q = 0; q < 4; ++q) t[q][i] = own[q];
    }
    for (int q = 0; q < 4; ++q) word[q] = vi_load((const int32_t *)t[q]);
}

/* The lanes that see column c of a block; words of one q stand `step` vectors apart. */
INLINE vm attn_sees(const vi *word, int64_t step, int64_t c) {
    return vi_lt(word[c % 8 / 2 * step] << (int32_t)(31 - (2 * (c / 8) + c % 2)), vi_set1(0));
}

/* ---- biases ---------------------------------------------------------------------------------- */
/* Biases up to this number hide: the lowest finite one of the dtype, and -inf. */
INLINE float attn_lowest(gk_dtype dtype) {
    return dtype == GK_F16 ? -65504.0f : dtype == GK_BF16 ? -0x1.fep127f : -FLT_MAX;
}

/* In ATTN_UNIT: finite or NaN, and -inf where x is below `shown`, the least number that does not
 * hide. */
INLINE vf attn_bias_value(vf x, float shown) {
    const vf finite = vf_max(vf_set1(-FLT_MAX), x * ATTN_UNIT); /* NaN stays */
    return vf_select(vf_lt(x, vf_set1(shown)), vf_set1(-INFINITY), finite);
}

/* Values [key, key + n) of W rows in lanes: to[k][..], rows `ld` apart. `value` of a row is where
 * its key 0 lies. */
INLINE void attn_bias_load(const void *const value[W], gk_dtype dtype, int64_t stride, int64_t key,
                           int64_t n, bool adds, float *to, int64_t ld) {
    const float shown = nextafterf(attn_lowest(dtype), 0);
    for (int64_t k0 = 0; k0 < n; k0 += W) {
        const int64_t many = gk_min_i64(W, n - k0);
        vc r[W];
        if (stride == 1) {
            for (int i = 0; i < W; ++i) r[i] = (vc)vf_load_dtype(value[i], dtype, key + k0, many);
            vc_transpose(r);
        } else {
            for (int64_t k = 0; k < many; ++k) {
                float t[W];
                for (int i = 0; i < W; ++i)
                    t[i] = (float)gk_load(value[i], dtype, (key + k0 + k) * stride);
                r[k] = (vc)vf_load(t);
            }
        }
        for (int64_t k = 0; k < many; ++k) {
            float *at = to + (k0 + k) * ld;
            const vf x = attn_bias_value((vf)r[k], shown);
            vf_store(at, adds ? vf_load(at) + x : x);
        }
    }
}

/* The bias of the scores of W rows, in ATTN_UNIT: to[k][..] for keys [key, key + n). -inf
 * hides. */
INLINE void attn_bias_tile(const attn_scores *s, const attn_row *const row[W], int64_t key,
                           int64_t n, float *to, int64_t ld) {
    const void *value[W];
    if (s->bias) {
        for (int i = 0; i < W; ++i) value[i] = row[i]->bias;
        attn_bias_load(value, s->bias_dtype, s->bias_k, key, n, false, to, ld);
    }
    if (s->distance) {
        for (int i = 0; i < W; ++i) value[i] = row[i]->distance;
        attn_bias_load(value, GK_F32, s->distance_k, key, n, s->bias != NULL, to, ld);
    }
}

/* A score and its bias, which hides where it is -inf whatever the score is. */
INLINE vf attn_biased(vf x, vf bias) {
    return vf_select(vf_lt(bias, vf_set1(-FLT_MAX)), vf_set1(-INFINITY), x + bias);
}

/* ---- one pair, by scalars -------------------------------------------------------------------- */
/* Whether neither mask nor bias hides a key of the row. The span is not asked. */
INLINE bool attn_row_sees(const attn_scores *s, const attn_row *r, int64_t key) {
    if (s->mask && !gk_mask_sees(&r->mask, r->i, key)) return false;
    if (s->bias && gk_load(r->bias, s->bias_dtype, key * s->bias_k) <= attn_lowest(s->bias_dtype))
        return false;
    return !(s->distance && r->distance[key * s->distance_k] <= -FLT_MAX);
}

/* Whether the row sees any of the keys [lo, hi). */
INLINE bool attn_row_sees_any(const attn_scores *s, const attn_row *r, int64_t lo, int64_t hi) {
    for (int64_t key = lo; key < hi;) {
        const int64_t block = key / GK_MASK_TILE, end = gk_min_i64(hi, (block + 1) * GK_MASK_TILE);
        if (s->mask && gk_mask_flag(&r->mask, r->i, block) == GK_BLOCK_EMPTY) {
            key = end;
            continue;
        }
        for (; key < end; ++key)
            if (attn_row_sees(s, r, key)) return true;
    }
    return false;
}

/* Which of n rows hold NaN or infinity: their numbers go to `bad`, their count is returned. */
INLINE int attn_not_finite(const char *const *rows, int64_t n, gk_dtype dtype, int64_t dim,
                           int16_t *bad) {
    int count = 0;
    for (int64_t j = 0; j < n; ++j) {
        vf sum = vf_set1(0);
        for (int64_t d = 0; d < dim; d += W)
            sum += vf_load_dtype(rows[j], dtype, d, dim - d) * 0.0f;
        bool finite = true;
        float t[W];
        vf_store(t, sum);
        for (int i = 0; i < W; ++i) finite = finite && t[i] == 0;
        if (!finite) bad[count++] = (int16_t)j;
    }
    return count;
}

#endif
