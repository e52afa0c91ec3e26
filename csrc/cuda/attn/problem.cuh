/* SPDX-License-Identifier: BSD-3-Clause */
/* problem.cuh: an attention call as every attention kernel sees it: one struct by value for dense
 * and packed calls (Problem), and the sequence that a block works on (Sequence). Strides count
 * elements. */
#ifndef GPUKERN_CUDA_PROBLEM_CUH
#define GPUKERN_CUDA_PROBLEM_CUH

#include "../host/launch.cuh"
#include "span.cuh"

/* q, k, v, out and their gradients: [batch, heads, row, column], columns dense. Packed tensors
 * have batch stride 0. In a paged cache the page is the batch and a key's place in the page is
 * the row (kv.cuh). */
struct Rows {
    const void *data;
    int64_t batch, head, row;

    /* The offset of a row, in elements. */
    __device__ __forceinline__ int64_t at(int64_t b, int64_t h, int64_t i) const {
        return b * batch + h * head + i * row;
    }
};

/* lse, delta, grad_lse: [batch, heads, row]; packed [row, heads]. */
struct Stats {
    void *data;
    int64_t batch, head, row;
};

struct Rules {
    double scale, softcap;    /* softcap 0 = off */
    int64_t diagonal;         /* dense calls only */
    int64_t left, right;      /* -1 = unbounded; causal makes right 0 */
    const void *alibi_slopes; /* [Hq] or [B, Hq] float, double for float64; NULL = none */
    int64_t slope_batch, slope_head;
    const void *sinks; /* [Hq] of sinks_dtype; NULL = none */
    int64_t sink_head;
    gk_dtype sinks_dtype;             /* float, double for float64, or q's dtype */
    const int32_t *kv_start, *kv_end; /* [B]; kv_end only in dense calls; NULL = none */
    int64_t start_step, end_step;
    /* [B], dense calls only: a diagonal for each sequence; NULL = `diagonal` for all */
    const int32_t *q_start;
    int64_t q_start_step;
    bool modified; /* softcap or ALiBi: scores are more than scale * qk */
};

/* The ALiBi slope of a head; 0 = none. W is double for float64. */
template <class W> __device__ __forceinline__ W slope_of(const Rules &rules, int b, int head) {
    return rules.alibi_slopes
               ? ((const W *)rules.alibi_slopes)[b * rules.slope_batch + head * rules.slope_head]
               : W(0);
}

struct Problem {
    Rows q, k, v, out;
    Stats lse;
    Rules rules;
    const int32_t *cu_q, *cu_k; /* NULL = dense */
    int64_t cu_q_step, cu_k_step;
    int batch, heads_q, heads_kv, group; /* query head h reads kv head h / group */
    int seq_q, seq_k;     /* dense: the lengths; packed: max_seqlen, bounds for the grid */
    int total_q, total_k; /* packed: rows of the tensors */
    int head_dim, head_dim_v;
    uint8_t *error_word;
};

/* One sequence: its first rows in the packed tensors (0 in a dense call), its lengths, its diagonal
 * and its span. */
struct Sequence {
    int q0, k0, seq_q, seq_k;
    int64_t diagonal;
    Span span;
};

__device__ __forceinline__ void span_start(Span &span, const Rules &rules, int b, int seq_k) {
    if (rules.kv_start) span.key_lo = min(max(rules.kv_start[b * rules.start_step], 0), seq_k);
}

__device__ __forceinline__ Sequence sequence_of(const Problem &p, int b) {
    Sequence s;
    if (p.cu_q) {
        const int q0 = p.cu_q[b * p.cu_q_step], q1 = p.cu_q[(b + 1) * p.cu_q_step];
        const int k0 = p.cu_k[b * p.cu_k_step], k1 = p.cu_k[(b + 1) * p.cu_k_step];
        s.q0 = min(max(q0, 0), p.total_q);
        s.k0 = min(max(k0, 0), p.total_k);
        const int end_q = min(max(q1, s.q0), p.total_q), end_k = min(max(k1, s.k0), p.total_k);
        s.seq_q = min(end_q - s.q0, p.seq_q);
        s.seq_k = min(end_k - s.k0, p.seq_k);
        const bool good = s.q0 == q0 && s.q0 + s.seq_q == q1 && s.k0 == k0 &&
                          s.k0 + s.seq_k == k1 && (b > 0 || (q0 == 0 && k0 == 0));
        if (!good) report(p.error_word, GK_BAD_CU_SEQLENS);
        s.diagonal = s.seq_k - s.seq_q;
    } else {
        s.q0 = s.k0 = 0;
        s.seq_q = p.seq_q;
        s.seq_k = p.seq_k;
        s.diagonal = p.rules.q_start ? p.rules.q_start[b * p.rules.q_start_step] : p.rules.diagonal;
    }
    s.span = span_make(s.seq_k, s.diagonal, p.rules.left, p.rules.right);
    span_start(s.span, p.rules, b, s.seq_k);
    if (p.rules.kv_end) s.span.key_hi = min(max(p.rules.kv_end[b * p.rules.end_step], 0), s.seq_k);
    s.span.key_hi = max(s.span.key_hi, s.span.key_lo);
    return s;
}

/* The b with cu[b] <= token < cu[b + 1] for a packed token, cu [batch + 1]; -1 if there is none.
 * Entries are not checked. If they decrease, the result may be any such b, or -1 although one
 * exists. */
__device__ __forceinline__ int owner_of(const int32_t *cu, int64_t step, int batch, int token) {
    /* invariant: (lo == 0 or cu[lo - 1] <= token) and (hi == batch + 1 or token < cu[hi]) */
    int lo = 0, hi = batch + 1;
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (cu[mid * step] <= token)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo <= batch ? lo - 1 : -1;
}

/* The result of sequence_of for every sequence of a dense call without index tensors. */
inline Sequence dense_sequence(const Problem &p) {
    Sequence s = {};
    s.seq_q = p.seq_q;
    s.seq_k = p.seq_k;
    s.diagonal = p.rules.diagonal;
    s.span = span_make(s.seq_k, s.diagonal, p.rules.left, p.rules.right);
    return s;
}

/* ---- host: the C API's arguments as a Problem ------------------------------------------------ */
inline Rows rows_of(const gk_tensor &t) {
    if (t.ndim == 4) return {t.data, t.stride[0], t.stride[1], t.stride[2]};
    return {t.data, 0, t.stride[1], t.stride[0]};
}

inline Stats stats_of(const gk_tensor &t) {
    if (t.ndim == 3) return {t.data, t.stride[0], t.stride[1], t.stride[2]};
    return {t.data, 0, t.stride[1], t.stride[0]};
}

/* The strides of lse, which is dense. They are also used if the caller wants no lse, because
 * partial results store one. */
inline Stats dense_stats(void *data, const gk_tensor &q) {
    if (q.ndim == 4) return {data, q.shape[1] * q.shape[2], q.shape[2], 1};
    return {data, 0, 1, q.shape[1]};
}

inline Rules rules_of(const gk_attn_rules &r) {
    Rules rules = {};
    rules.scale = r.scale;
    rules.softcap = r.softcap;
    /* larger than every length, but so small that sums with it do not overflow */
    const int64_t far = INT64_C(1) << 32;
    rules.diagonal = gk_clamp_i64(r.diagonal, -far, far);
    rules.left = gk_min_i64(r.window_left, 4 * far);
    rules.right = gk_min_i64(r.window_right, 4 * far);
    if (r.is_causal) rules.right = rules.right < 0 ? 0 : gk_min_i64(rules.right, 0);
    if (r.alibi_slopes) {
        const gk_tensor *t = r.alibi_slopes;
        rules.alibi_slopes = t->data;
        rules.slope_batch = t->ndim == 2 ? t->stride[0] : 0;
        rules.slope_head = t->stride[t->ndim - 1];
    }
    if (r.sinks) {
        rules.sinks = r.sinks->data;
        rules.sink_head = r.sinks->stride[0];
        rules.sinks_dtype = r.sinks->dtype;
    }
    if (r.kv_start) {
        rules.kv_start = (const int32_t *)r.kv_start->data;
        rules.start_step = r.kv_start->stride[0];
    }
    if (r.kv_end) {
        rules.kv_end = (const int32_t *)r.kv_end->data;
        rules.end_step = r.kv_end->stride[0];
    }
    if (r.q_start) {
        rules.q_start = (const int32_t *)r.q_start->data;
        rules.q_start_step = r.q_start->stride[0];
    }
    rules.modified = r.softcap > 0 || r.alibi_slopes;
    return rules;
}

inline Problem problem_of(const gk_context *ctx, const gk_flash_attn_args *a) {
    Problem p = {};
    const bool packed = a->cu_seqlens_q != NULL;
    const int last = a->q.ndim - 1;
    p.q = rows_of(a->q);
    p.k = rows_of(a->k);
    p.v = rows_of(a->v);
    p.out = rows_of(a->out);
    p.lse = dense_stats(a->lse.data, a->q);
    p.rules = rules_of(a->rules);
    if (packed) {
        p.cu_q = (const int32_t *)a->cu_seqlens_q->data;
        p.cu_q_step = a->cu_seqlens_q->stride[0];
        p.cu_k = (const int32_t *)a->cu_seqlens_k->data;
        p.cu_k_step = a->cu_seqlens_k->stride[0];
        p.batch = (int)a->cu_seqlens_q->shape[0] - 1;
        p.total_q = (int)a->q.shape[0];
        p.total_k = (int)a->k.shape[0];
        p.seq_q = (int)gk_min_i64(a->max_seqlen_q, p.total_q);
        p.seq_k = (int)gk_min_i64(a->max_seqlen_k, p.total_k);
    } else {
        p.batch = (int)a->q.shape[0];
        p.seq_q = (int)a->q.shape[2];
        p.seq_k = (int)a->k.shape[2];
    }
    p.heads_q = (int)a->q.shape[1];
    p.heads_kv = (int)a->k.shape[1];
    p.group = p.heads_kv ? p.heads_q / p.heads_kv : 1;
    p.head_dim = (int)a->q.shape[last];
    p.head_dim_v = (int)a->v.shape[last];
    p.error_word = ctx->error_word;
    return p;
}

#endif
