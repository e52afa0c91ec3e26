/* SPDX-License-Identifier: BSD-3-Clause */
/* attn.h: what the attention kernels of the CPU share: one sequence of a call, and how a tile of
 * scores is changed. Scores stand transposed: a row is a key, a lane is a query, so max, sum and
 * rescaling never cross lanes. */
#ifndef GPUKERN_CPU_ATTN_H
#define GPUKERN_CPU_ATTN_H

#include "tile.h"

#include <float.h>

/* One sequence of a dense or packed call. Strides in elements. */
typedef struct attn_seq {
    const char *q, *k, *v; /* first row of head 0 */
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    int64_t out_first, out_row, out_head; /* element offset of the first row of head 0 in out */
    int64_t lse_first, lse_row, lse_head;
    int64_t seq_q, seq_k;
    gk_span span;
} attn_seq;

/* The values that every block of a call shares. */
typedef struct attn_shape {
    int64_t batch, heads_q, heads_kv, group, head_dim, head_dim_v;
    int64_t max_seq_q, max_seq_k; /* upper bounds over the batch; sizes of dense calls */
    int64_t sum_cells; /* of scores and of dP: the same in forward and backward, so that a score is
                          one float */
    float scale;       /* of scores */
    bool packed;
} attn_shape;

enum {
    ATTN_FEW_QUERIES = 8 /* below: the runs of PyTorch's products over head_dim are short */
};
INLINE int64_t attn_sum_cells(gk_dtype dtype, int64_t max_seq_q) {
    return dtype == GK_F32 && max_seq_q < ATTN_FEW_QUERIES ? SUM_CELLS_FEW : SUM_CELLS;
}

INLINE attn_shape attn_shape_of(const gk_flash_attn_args *a) {
    attn_shape s;
    s.packed = a->cu_seqlens_q != NULL;
    const int h = 1; /* [B, H, S, D] and [T, H, D] both have heads in dimension 1 */
    s.batch = s.packed ? a->cu_seqlens_q->shape[0] - 1 : a->q.shape[0];
    s.heads_q = a->q.shape[h];
    s.heads_kv = a->k.shape[h];
    s.group = s.heads_kv ? s.heads_q / s.heads_kv : 0;
    s.head_dim = a->q.shape[a->q.ndim - 1];
    s.head_dim_v = a->v.shape[a->v.ndim - 1];
    s.max_seq_q = s.packed ? gk_min_i64(a->max_seqlen_q, a->q.shape[0]) : a->q.shape[2];
    s.max_seq_k = s.packed ? gk_min_i64(a->max_seqlen_k, a->k.shape[0]) : a->k.shape[2];
    s.sum_cells = attn_sum_cells(a->q.dtype, s.max_seq_q);
    s.scale = (float)a->rules.scale;
    return s;
}

/* Index of the row dimension ([B, H, S, D] or [T, H, D]). */
INLINE int attn_row_dim(const attn_shape *s) { return s->packed ? 0 : 2; }

INLINE attn_seq attn_seq_of(const gk_flash_attn_args *a, const attn_shape *s, int64_t b) {
    const int r = attn_row_dim(s);
    const int64_t es = (int64_t)gk_dtype_bytes(a->q.dtype);
    int64_t q0 = 0, k0 = 0, diagonal = a->rules.diagonal;
    attn_seq x;
    x.q_row = a->q.stride[r];
    x.q_head = a->q.stride[1];
    x.k_row = a->k.stride[r];
    x.k_head = a->k.stride[1];
    x.v_row = a->v.stride[r];
    x.v_head = a->v.stride[1];
    x.out_row = a->out.stride[r];
    x.out_head = a->out.stride[1];
    if (s->packed) {
        q0 = gk_i32_at(a->cu_seqlens_q, b);
        k0 = gk_i32_at(a->cu_seqlens_k, b);
        x.seq_q = gk_i32_at(a->cu_seqlens_q, b + 1) - q0;
        x.seq_k = gk_i32_at(a->cu_seqlens_k, b + 1) - k0;
        x.q = gk_at(a->q.data, es * q0 * x.q_row);
        x.k = gk_at(a->k.data, es * k0 * x.k_row);
        x.v = gk_at(a->v.data, es * k0 * x.v_row);
        x.out_first = q0 * x.out_row;
        x.lse_row = s->heads_q;
        x.lse_head = 1;
        x.lse_first = q0 * s->heads_q;
        diagonal = x.seq_k - x.seq_q;
    } else {
        x.seq_q = a->q.shape[2];
        x.seq_k = a->k.shape[2];
        if (a->rules.q_start) diagonal = gk_i32_at(a->rules.q_start, b);
        x.q = gk_at(a->q.data, es * b * a->q.stride[0]);
        x.k = gk_at(a->k.data, es * b * a->k.stride[0]);
        x.v = gk_at(a->v.data, es * b * a->v.stride[0]);
        x.out_first = b * a->out.stride[0];
        x.lse_row = 1;
        x.lse_head = x.seq_q;
        x.lse_first = b * s->heads_q * x.seq_q;
    }
    x.span = gk_span_make(&a->rules, x.seq_k, diagonal);
    gk_span_cut(&x.span, &a->rules, b);
    return x;
}

/* ---- the span from the key side ---- */
/* Key j is seen by the rows [first_row(j), end_row(j)); both grow with j. */
INLINE int64_t first_row(const attn_seq *x, int64_t j) {
    return x->span.right == GK_UNBOUNDED
               ? 0
               : gk_clamp_i64(j - x->span.diagonal - x->span.right, 0, x->seq_q);
}
INLINE int64_t end_row(const attn_seq *x, int64_t j) {
    return x->span.left == GK_UNBOUNDED
               ? x->seq_q
               : gk_clamp_i64(j - x->span.diagonal + x->span.left + 1, 0, x->seq_q);
}

/* Rows that see a key and keys that some row sees; the rest is never read and gets gradient 0. */
typedef struct seen {
    int64_t row_lo, row_hi, key_lo, key_hi;
} seen;

INLINE seen seen_of(const attn_seq *x) {
    seen r = {0, 0, 0, 0};
    if (x->seq_q == 0 || x->span.key_lo >= x->span.key_hi) return r;
    r.row_lo = first_row(x, x->span.key_lo);
    r.row_hi = end_row(x, x->span.key_hi - 1);
    if (r.row_lo >= r.row_hi) return (seen){0, 0, 0, 0};
    r.key_lo = gk_span_lo(&x->span, r.row_lo);
    r.key_hi = gk_span_hi(&x->span, r.row_hi - 1);
    return r;
}

/* The unit of scores, of their maximum m, of slopes and sinks inside the kernels: natural where a
 * cell is a float, log2 where it is a pair.
 * Float q carries the scale: a score is then one float, the same in forward, in lse and in
 * backward, and what lse rounds cancels in P = exp(s - lse); a row with one key has P = 1. A pair
 * cannot carry it (scale q is no bfloat16), so there the scale waits for the exponent, in one fma
 * with the unit. */
#define ATTN_UNIT (PAIR == 2 ? GK_LOG2E : 1.0f)
#define ATTN_UNIT_LOG2 (PAIR == 2 ? 1.0f : GK_LOG2E) /* log2 of e^(one unit) */

/* 2^(log2 of e^(factor s - m)); factor is 1 with float cells. */
INLINE vf attn_p(vf s, float factor, vf m) {
    return PAIR == 2 ? vf_exp2(vf_fma(s, vf_set1(factor), -m)) : vf_exp2((s - m) * ATTN_UNIT_LOG2);
}

/* A sink in ATTN_UNIT, as m begins with it: finite, and the same float wherever it is asked for (a
 * product in place would meet a subtraction in one fused step, whose rounding 2^ makes
 * infinite). */
INLINE float attn_sink(float sink) {
    const double x = sink * (double)ATTN_UNIT;
    return (float)(x < -FLT_MAX ? -FLT_MAX : x > FLT_MAX ? FLT_MAX : x);
}

/* A row's lse from its m, its sum of p and its sink (-inf: none). In double: an error of lse is one
 * of every probability that backward makes from it. Where nothing but the sink counts, lse is the
 * sink to the bit. */
INLINE float attn_lse(float m, float l, float sink) {
    if (l == 0) return -INFINITY;
    if (sink != -INFINITY && l == 1 && m == attn_sink(sink)) return sink;
    return (float)(m / (double)ATTN_UNIT + log((double)l));
}

/* ALiBi slope of query head h in sequence b; 0 = none. */
INLINE float attn_slope(const gk_attn_rules *r, int64_t b, int64_t h) {
    const gk_tensor *t = r->alibi_slopes;
    if (!t) return 0;
    return ((const float *)
                t->data)[t->ndim == 2 ? b * t->stride[0] + h * t->stride[1] : h * t->stride[0]];
}

#endif
