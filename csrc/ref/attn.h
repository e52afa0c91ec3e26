/* SPDX-License-Identifier: BSD-3-Clause */
/* ref/attn.h: what the attention loops of ref/ share: rows as doubles, the sequence that owns a
 * token, scores with masks and biases, and the online softmax of a block of query rows
 * (ref_attend). ref/flash_attn.c and ref/paged_attn.c use it. */
#ifndef GPUKERN_REF_ATTN_H
#define GPUKERN_REF_ATTN_H

#include "../formats/attn_dropout.h"
#include "../formats/latent_row.h"
#include "../core/attn_mask.h"
#include "../core/internal.h"
#include "../core/paged.h"

#include <float.h>

enum {
    REF_ROWS = 4, /* query rows that share each loaded key */
    /* The argument checks refuse a larger head_dim or Dv. Twice as large, because check_cuda.c
     * calls the reference with twice the columns to get the sizes of sums. */
    REF_MAX_HEAD_DIM = 2 * GK_CACHE_HEAD_DIM,
    REF_TOKENS = 16 /* tokens of one task */
};

/* ---- rows ------------------------------------------------------------------------------------ */
/* n contiguous elements as doubles: in place if they are float64, otherwise converted into buf. */
static inline const double *ref_row(const gk_tensor *t, int64_t offset, int64_t n, double *buf) {
    switch (t->dtype) {
    case GK_F64: return gk_at(t->data, 8 * offset);
    case GK_F32:
        for (int64_t d = 0; d < n; ++d) buf[d] = ((const float *)t->data)[offset + d];
        break;
    case GK_U8: /* of attention's tensors only caches of latents have it */
        for (int64_t d = 0; d < n; ++d) buf[d] = gk_latent_value(gk_at(t->data, offset), d);
        break;
    default:
        for (int64_t d = 0; d < n; ++d) buf[d] = gk_load(t->data, t->dtype, offset + d);
    }
    return buf;
}

static inline double ref_dot(const double *x, const double *y, int64_t n) {
    /* four independent sums, because additions to one sum would have to wait for each other */
    double s[4] = {0};
    int64_t d = 0;
    for (; d + 4 <= n; d += 4) {
        for (int u = 0; u < 4; ++u) s[u] += x[d + u] * y[d + u];
    }
    for (; d < n; ++d) s[0] += x[d] * y[d];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

static inline void ref_add_scaled(double *to, double factor, const double *x, int64_t n) {
    for (int64_t d = 0; d < n; ++d) to[d] += factor * x[d];
}

static inline int64_t ref_i32(const gk_tensor *t, int64_t i) {
    return ((const int32_t *)t->data)[i * t->stride[0]];
}

/* ---- sequences ------------------------------------------------------------------------------- */
/* Tokens are numbered across the batch. Sequence b owns tokens [b * length, (b + 1) * length), or
 * [cu_seqlens[b], cu_seqlens[b + 1]) if there are cu_seqlens. */
typedef struct ref_sequences {
    const gk_tensor *cu_seqlens;
    int64_t batch, length;
} ref_sequences;

static inline int64_t ref_start(const ref_sequences *s, int64_t b) {
    return s->cu_seqlens ? ref_i32(s->cu_seqlens, b) : b * s->length;
}

/* The sequence that owns the token, or `batch` if none does. */
static inline int64_t ref_owner(const ref_sequences *s, int64_t token) {
    /* The last b with start(b) <= token. Empty sequences before it have the same start. */
    int64_t lo = 0, hi = s->batch;
    while (lo < hi) {
        int64_t mid = (lo + hi + 1) / 2;
        if (ref_start(s, mid) <= token)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

/* ---- scores ---------------------------------------------------------------------------------- */
typedef struct ref_score {
    double scale, softcap, slope;
    int64_t diagonal;
} ref_score;

static inline ref_score ref_score_make(const gk_attn_rules *r, int64_t b, int64_t h,
                                       int64_t diagonal, double k_scale) {
    ref_score s = {r->scale * k_scale, r->softcap, 0, diagonal};
    const gk_tensor *t = r->alibi_slopes;
    if (t)
        s.slope = gk_load(t->data, t->dtype,
                          t->ndim == 2 ? b * t->stride[0] + h * t->stride[1] : h * t->stride[0]);
    return s;
}

/* The logit of row i and key j. *slope_of_cap is the derivative of softcap at scale * qk. */
static inline double ref_logit(const ref_score *s, double qk, int64_t i, int64_t j,
                               double *slope_of_cap) {
    double x = s->scale * qk;
    *slope_of_cap = 1;
    if (s->softcap > 0) {
        double t = tanh(x / s->softcap);
        x = s->softcap * t;
        *slope_of_cap = 1 - t * t;
    }
    if (s->slope != 0) x -= s->slope * fabs((double)(i + s->diagonal - j));
    return x;
}

/* ---- masks and biases ------------------------------------------------------------------------ */
/* The mask and biases of head h of sequence b. */
typedef struct ref_scores {
    const gk_attn_scores *x; /* NULL = none */
    gk_mask mask;
    int64_t b, h, seq_q;
} ref_scores;

/* Offset of element `at` of a tensor whose dimensions of size 1 broadcast. */
static inline int64_t ref_place(const gk_tensor *t, const int64_t *at) {
    int64_t offset = 0;
    for (int d = 0; d < t->ndim; ++d) offset += t->shape[d] == 1 ? 0 : at[d] * t->stride[d];
    return offset;
}

static inline ref_scores ref_scores_make(const gk_attn_scores *x, int64_t b, int64_t h,
                                         int64_t seq_q, int64_t seq_k) {
    ref_scores s = {.x = x, .b = b, .h = h, .seq_q = seq_q};
    if (!x || !x->mask) return s;
    const int64_t at[3] = {b, h, 0};
    const gk_mask_layout layout = gk_mask_layout_of(x->store, seq_q, seq_k, false);
    s.mask = gk_mask_at((const int32_t *)x->mask->data + ref_place(x->mask, at), &layout, x->store,
                        seq_q, seq_k);
    return s;
}

/* The lowest finite number of a dtype. This bias hides the key, as -inf does. */
static inline double ref_lowest(gk_dtype dtype) {
    return dtype == GK_F64    ? -DBL_MAX
           : dtype == GK_F16  ? -65504.0
           : dtype == GK_BF16 ? -0x1.fep127
                              : -(double)FLT_MAX;
}

/* Adds the biases to the logit of row i and key j. Returns false if the key is hidden. */
static inline bool ref_scores_add(const ref_scores *s, int64_t i, int64_t j, double *logit) {
    if (!s->x) return true;
    const int64_t at[4] = {s->b, s->h, i, j}, distance_at[2] = {s->h, j - i + s->seq_q - 1};
    if (s->x->mask && !gk_mask_sees(&s->mask, i, j)) return false;
    const gk_tensor *bias[2] = {s->x->bias, s->x->distance_bias};
    for (int n = 0; n < 2; ++n) {
        if (!bias[n]) continue;
        const double value =
            gk_load(bias[n]->data, bias[n]->dtype, ref_place(bias[n], n ? distance_at : at));
        if (value <= ref_lowest(bias[n]->dtype)) return false;
        *logit += value;
    }
    return true;
}

/* ---- one block of rows ----------------------------------------------------------------------- */
/* The keys of one sequence and one head: where row j of k and v is, in pages or contiguous. */
typedef struct ref_keys {
    const gk_tensor *k, *v;
    int64_t k_at, v_at;                 /* offsets of key 0 (in page 0) */
    int64_t k_step, v_step;             /* from key to key */
    const gk_tensor *block_table;       /* NULL: not paged */
    int64_t b, block_size;              /* row of block_table, keys of a page */
    const gk_tensor *k_scale, *v_scale; /* [num_blocks, Hkv] for 8-bit pages, otherwise NULL */
    int64_t head;
} ref_keys;

/* The scale of key j's codes if each page has a scale, otherwise 1. */
static inline double ref_page_scale(const ref_keys *x, const gk_tensor *scale, int64_t j) {
    if (!scale) return 1;
    const gk_tensor *table = x->block_table;
    int64_t page =
        ((const int32_t *)
             table->data)[x->b * table->stride[0] + j / x->block_size * table->stride[1]];
    return gk_load(scale->data, scale->dtype, page * scale->stride[0] + x->head * scale->stride[1]);
}

static inline int64_t ref_key_offset(const ref_keys *x, const gk_tensor *t, int64_t at,
                                     int64_t step, int64_t j) {
    if (!x->block_table) return at + j * step;
    const gk_tensor *table = x->block_table;
    int64_t entry = x->b * table->stride[0] + j / x->block_size * table->stride[1];
    return at + ((const int32_t *)table->data)[entry] * t->stride[0] + j % x->block_size * step;
}

enum {
    /* Keys, and in the backward pass rows, that are summed before the sum is added to the total. A
     * single chain of additions over all keys would have a larger error than the vector kernels
     * have in float32. */
    REF_KEYS = 32
};

/* Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) of rows [0, rows). Row r is row
 * i0 + r of its sequence. Its q is at q_at[r]; it sees keys [lo[r], hi[r]) and writes out_at[r]
 * and lse_at[r]. A key that no row sees is not read. */
typedef struct ref_block {
    const gk_tensor *q, *out, *lse, *sinks;
    const ref_keys *keys;
    const ref_score *score;
    double v_scale;
    int64_t head, i0, rows;
    int64_t q_at[REF_ROWS], out_at[REF_ROWS], lse_at[REF_ROWS], lo[REF_ROWS], hi[REF_ROWS];
    const gk_attn_keep *dropout; /* NULL: none */
    int64_t drop_row[REF_ROWS];  /* each row's number in the dropout law (attn_dropout.h) */
    /* true: out and lse hold the attention over other keys; this call adds its keys to it */
    bool accumulates;
    const ref_scores *scores; /* NULL: no mask and no bias */
    /* The mask over new tokens of a paged call; NULL: none. Key first_new + c is column c, and row
     * r's bytes begin at mask_at[r]. */
    const gk_tensor *new_mask;
    int64_t first_new, mask_at[REF_ROWS];
} ref_block;

static inline bool ref_new_sees(const ref_block *x, int64_t r, int64_t j) {
    if (!x->new_mask || j < x->first_new) return true;
    const int64_t step = x->new_mask->stride[x->new_mask->ndim - 1];
    return ((const uint8_t *)x->new_mask->data)[x->mask_at[r] + (j - x->first_new) * step];
}

static inline void ref_attend(const ref_block *x) {
    double q_buf[REF_ROWS][REF_MAX_HEAD_DIM], key[REF_MAX_HEAD_DIM];
    /* sum: of all earlier groups of REF_KEYS keys; part: of the current group */
    double sum[REF_ROWS][REF_MAX_HEAD_DIM], part[REF_ROWS][REF_MAX_HEAD_DIM];
    double peak[REF_ROWS], total[REF_ROWS], total_part[REF_ROWS] = {0}, p[REF_ROWS];
    const double *q[REF_ROWS];
    int64_t head_dim = x->q->shape[x->q->ndim - 1], head_dim_v = x->out->shape[x->out->ndim - 1];

    /* 1. each row's softmax starts with the sink, if there is one */
    int64_t first = INT64_MAX, end = INT64_MIN;
    for (int64_t r = 0; r < x->rows; ++r) {
        q[r] = ref_row(x->q, x->q_at[r], head_dim, q_buf[r]);
        peak[r] = x->sinks ? gk_load(x->sinks->data, x->sinks->dtype, x->head * x->sinks->stride[0])
                           : -INFINITY;
        total[r] = peak[r] == -INFINITY ? 0 : 1;
        memset(sum[r], 0, (size_t)head_dim_v * sizeof(double));
        memset(part[r], 0, (size_t)head_dim_v * sizeof(double));
        if (x->lo[r] < x->hi[r]) {
            first = gk_min_i64(first, x->lo[r]);
            end = gk_max_i64(end, x->hi[r]);
        }
    }

    /* 2. for each key: the logits of the rows that see it, then p times its value */
    for (int64_t j = first; j < end; ++j) {
        const double *k = NULL, *v = NULL;
        bool sees[REF_ROWS];
        for (int64_t r = 0; r < x->rows; ++r) {
            p[r] = 0;
            sees[r] = j >= x->lo[r] && j < x->hi[r] && ref_new_sees(x, r, j);
            double none = 0;
            if (sees[r] && x->scores) sees[r] = ref_scores_add(x->scores, x->i0 + r, j, &none);
            if (!sees[r]) continue;
            if (!k)
                k = ref_row(x->keys->k,
                            ref_key_offset(x->keys, x->keys->k, x->keys->k_at, x->keys->k_step, j),
                            head_dim, key);
            double qk = ref_dot(q[r], k, head_dim) * ref_page_scale(x->keys, x->keys->k_scale, j);
            double slope_of_cap, s = ref_logit(x->score, qk, x->i0 + r, j, &slope_of_cap);
            if (x->scores) (void)ref_scores_add(x->scores, x->i0 + r, j, &s);
            if (s > peak[r]) {
                double shrink = exp(peak[r] - s);
                total[r] *= shrink;
                total_part[r] *= shrink;
                for (int64_t d = 0; d < head_dim_v; ++d) {
                    sum[r][d] *= shrink;
                    part[r][d] *= shrink;
                }
                peak[r] = s;
            }
            p[r] = s == -INFINITY ? 0 : exp(s - peak[r]);
            total_part[r] += p[r];
        }
        for (int64_t r = 0; r < x->rows; ++r) {
            if (!sees[r]) continue;
            if (!v)
                v = ref_row(x->keys->v,
                            ref_key_offset(x->keys, x->keys->v, x->keys->v_at, x->keys->v_step, j),
                            head_dim_v, key);
            if (x->dropout && !gk_attn_kept(x->dropout, x->drop_row[r], j)) continue;
            ref_add_scaled(part[r], p[r] * ref_page_scale(x->keys, x->keys->v_scale, j), v,
                           head_dim_v);
        }
        for (int64_t r = 0; ((j - first) % REF_KEYS == REF_KEYS - 1 || j == end - 1) && r < x->rows;
             ++r) {
            for (int64_t d = 0; d < head_dim_v; ++d) {
                sum[r][d] += part[r][d];
                part[r][d] = 0;
            }
            total[r] += total_part[r];
            total_part[r] = 0;
        }
    }

    /* 3. divide and store; total is 0 if the row sees nothing */
    for (int64_t r = 0; r < x->rows; ++r) {
        /* The earlier result counts as one more key: its score is lse, its value is out. */
        if (x->accumulates) {
            const double earlier = gk_load(x->lse->data, x->lse->dtype, x->lse_at[r]);
            if (earlier > peak[r]) {
                const double shrink = exp(peak[r] - earlier);
                total[r] *= shrink;
                peak[r] = earlier;
                for (int64_t d = 0; d < head_dim_v; ++d) sum[r][d] *= shrink;
            }
            if (earlier != -INFINITY) {
                const double *out = ref_row(x->out, x->out_at[r], head_dim_v, key);
                total[r] += exp(earlier - peak[r]);
                ref_add_scaled(sum[r], exp(earlier - peak[r]), out, head_dim_v);
            }
        }
        double factor = total[r] == 0 ? 0 : x->v_scale / total[r];
        for (int64_t d = 0; d < head_dim_v; ++d) {
            gk_store(x->out->data, x->out->dtype, x->out_at[r] + d,
                     total[r] == 0 ? 0 : sum[r][d] * factor);
        }
        double lse = total[r] == 0 ? -INFINITY : peak[r] + log(total[r]);
        if (x->lse->data) gk_store(x->lse->data, x->lse->dtype, x->lse_at[r], lse);
    }
}

#endif
