/* SPDX-License-Identifier: BSD-3-Clause */
/* kv.cuh: a paged_attn call as its kernels see it, as one struct by value. The kernels of paged/
 * and cache/ include it. It also finds the sequence of a row of the block table, the sequence that
 * owns a token, and the page that holds a key. Strides count elements.
 *
 * Index tensors are read on the device only. Errors in them are reported and then made harmless: a
 * length is clamped, an impossible pair of cu_seqlens_q owns no token, and a page outside the cache
 * holds no key. */
#ifndef GPUKERN_CUDA_KV_CUH
#define GPUKERN_CUDA_KV_CUH

#include "softmax.cuh"

struct Paged {
    Rows q; /* [T, heads_q, head_dim] */
    /* [num_blocks, block_size, heads_kv, last]; the batch dimension is the page */
    Rows k, v;
    void *out, *lse; /* [T, heads_q, head_dim_v], [T, heads_q], dense; lse may be NULL */
    Rules rules;
    const int32_t *table, *lens, *cu_q; /* cu_q NULL: seq_q tokens in each sequence */
    int64_t table_row, table_entry, lens_step, cu_q_step;
    /* float, double for float64; NULL = 1; step 0: one value for all heads */
    const void *k_scale, *v_scale;
    int64_t k_scale_step, v_scale_step;
    int batch, tokens, heads_q, heads_kv, group;
    int head_dim, head_dim_v;
    int num_blocks, block_size;
    int capacity; /* keys for which a row of the block table has room */
    int seq_q;    /* query tokens of a sequence; with cu_q an upper bound */
    uint8_t *error_word;
};

struct PagedSequence {
    int q0, rows; /* the sequence's query tokens are [q0, q0 + rows) */
    int seq_k, diagonal;
    Span span;

    __device__ __forceinline__ int lo(int i) const { return span.lo(i); }
    /* a query at a position before key 0 sees no key, causal or not */
    __device__ __forceinline__ int hi(int i) const { return i + diagonal < 0 ? 0 : span.hi(i); }
};

__device__ __forceinline__ PagedSequence paged_sequence(const Paged &p, int b) {
    PagedSequence s;
    int seq_q = p.seq_q;
    bool good = true;
    s.q0 = b * p.seq_q;
    if (p.cu_q) {
        const int start = p.cu_q[b * p.cu_q_step], end = p.cu_q[(b + 1) * p.cu_q_step];
        good = start >= 0 && start <= end && end <= p.tokens;
        /* if start is below cu_q[b - 1], the sequence must not contain tokens of sequence b - 2 */
        if (b > 1) {
            const int before = p.cu_q[(b - 2) * p.cu_q_step],
                      its_end = p.cu_q[(b - 1) * p.cu_q_step];
            if (before >= 0 && before <= its_end && its_end <= p.tokens)
                good = good && min(its_end - before, p.seq_q) <= start - before;
        }
        s.q0 = good ? start : 0;
        seq_q = good ? end - start : 0;
        good = good && seq_q <= p.seq_q && (b > 0 || start == 0);
    }
    const int length = p.lens[b * p.lens_step];
    s.seq_k = min(max(length, 0), p.capacity);
    good = good && s.seq_k == length && (length == 0 || length >= seq_q);
    if (!good) report(p.error_word, GK_BAD_SEQ_LENS);
    s.rows = min(seq_q, p.seq_q);
    s.diagonal = s.seq_k - seq_q;
    s.span = span_make(s.seq_k, s.diagonal, p.rules.left, p.rules.right);
    span_start(s.span, p.rules, b, s.seq_k);
    return s;
}

/* The sequence that owns the token, or -1. All lanes of a warp ask for the same token. */
__device__ __forceinline__ int paged_owner(const Paged &p, int token) {
    if (!p.cu_q) return token / p.seq_q;
    const int likely = owner_of(p.cu_q, p.cu_q_step, p.batch, token);
    if (likely >= 0) {
        const PagedSequence s = paged_sequence(p, likely);
        if (token >= s.q0 && token - s.q0 < s.rows) return likely;
    }
    /* a bad entry may have misled the search, so all sequences are searched */
    for (int first = 0; first < p.batch; first += 32) {
        const int b = first + threadIdx.x % 32;
        bool owns = false;
        if (b < p.batch) {
            const PagedSequence s = paged_sequence(p, b);
            owns = token >= s.q0 && token - s.q0 < s.rows;
        }
        const unsigned found = __ballot_sync(0xffffffffu, owns);
        if (found) return first + __ffs(found) - 1;
    }
    return -1;
}

/* The page of key j of sequence b. The key is row j % block_size of that page, at k.at(page,
 * head_kv, row). If the table's entry is not a page of the cache, reports an error and returns
 * -1. */
__device__ __forceinline__ int page_of_key(const Paged &p, int b, int j) {
    const int page = p.table[b * p.table_row + j / p.block_size * p.table_entry];
    if ((unsigned)page < (unsigned)p.num_blocks) return page;
    report(p.error_word, GK_BAD_BLOCK_TABLE);
    return -1;
}

template <class W>
__device__ __forceinline__ W paged_scale(const void *scale, int64_t step, int head_kv) {
    return scale ? ((const W *)scale)[head_kv * step] : W(1);
}

/* A scale of an 8-bit cache: per page and head, per head, or one for all (strides of 0). NULL =
 * 1. */
struct CodeScale {
    const void *data;
    bool wide; /* true: double, false: float */
    int64_t page, head;

    template <class W> __device__ __forceinline__ W at(int64_t its_page, int head_kv) const {
        if (!data) return W(1);
        const int64_t i = its_page * page + head_kv * head;
        return wide ? (W)((const double *)data)[i] : (W)((const float *)data)[i];
    }
};

/* ---- host ------------------------------------------------------------------------------------ */
inline Rows pages_of(const gk_tensor &t) { return {t.data, t.stride[0], t.stride[2], t.stride[1]}; }

inline CodeScale code_scale(const gk_tensor *t) {
    CodeScale s = {};
    if (!t) return s;
    s.data = t->data;
    s.wide = t->dtype == GK_F64;
    if (t->ndim > 0) s.head = t->stride[t->ndim - 1];
    if (t->ndim == 2) s.page = t->stride[0];
    return s;
}

/* The largest number of query tokens of a sequence that shapes and arguments allow. */
inline int64_t paged_seq_q(const gk_paged_attn_args *a) {
    const int64_t tokens = a->q.shape[0], batch = a->seq_lens.shape[0];
    if (a->cu_seqlens_q) return gk_clamp_i64(a->max_seqlen_q, 0, tokens);
    return batch ? tokens / batch : 0;
}

inline Paged paged_of(const gk_context *ctx, const gk_paged_attn_args *a) {
    Paged p = {};
    gk_attn_rules rules = a->rules;
    rules.diagonal = 0;
    rules.kv_end = rules.q_start = NULL;
    if (!(a->flags & GK_PAGED_WINDOW_RIGHT)) rules.window_right = -1;
    p.q = rows_of(a->q);
    p.k = pages_of(a->k_cache);
    p.v = pages_of(a->v_cache);
    p.out = a->out.data;
    p.lse = a->lse.data;
    p.rules = rules_of(rules);
    p.table = (const int32_t *)a->block_table.data;
    p.table_row = a->block_table.stride[0];
    p.table_entry = a->block_table.stride[1];
    p.lens = (const int32_t *)a->seq_lens.data;
    p.lens_step = a->seq_lens.stride[0];
    if (a->cu_seqlens_q) {
        p.cu_q = (const int32_t *)a->cu_seqlens_q->data;
        p.cu_q_step = a->cu_seqlens_q->stride[0];
    }
    if (a->k_scale) {
        p.k_scale = a->k_scale->data;
        p.k_scale_step = a->k_scale->ndim ? a->k_scale->stride[0] : 0;
    }
    if (a->v_scale) {
        p.v_scale = a->v_scale->data;
        p.v_scale_step = a->v_scale->ndim ? a->v_scale->stride[0] : 0;
    }
    p.batch = (int)a->seq_lens.shape[0];
    p.tokens = (int)a->q.shape[0];
    p.heads_q = (int)a->q.shape[1];
    p.heads_kv = (int)a->k_cache.shape[2];
    p.group = p.heads_kv ? p.heads_q / p.heads_kv : 1;
    p.head_dim = (int)a->q.shape[2];
    p.head_dim_v = (int)a->v_cache.shape[3];
    p.num_blocks = (int)gk_min_i64(a->k_cache.shape[0], INT32_MAX);
    /* a length is at most 2^30 */
    p.block_size = (int)gk_clamp_i64(a->k_cache.shape[1], 1, 1 << 30);
    p.capacity =
        p.num_blocks ? (int)gk_min_i64(a->block_table.shape[1] * p.block_size, 1 << 30) : 0;
    p.seq_q = (int)paged_seq_q(a);
    /* With ALLOW_SHORT nothing is reported, since the kernels cannot distinguish a short length
     * from a bad one. */
    p.error_word = a->flags & GK_PAGED_ALLOW_SHORT ? NULL : ctx->error_word;
    return p;
}

#endif
