/* SPDX-License-Identifier: BSD-3-Clause */
/* prefill_call.cuh: describes a paged_attn call with many query tokens in the terms of the forward
 * kernels, for paged_prefill_sm90a, paged_tree_sm90a and paged_prefill_decoded_sm90a. The
 * description has a Problem without key tensors, the block table and the lengths, and a function
 * that finds where a sequence's keys end. */
#ifndef GPUKERN_CUDA_PREFILL_CALL_CUH
#define GPUKERN_CUDA_PREFILL_CALL_CUH

#include "../../tile/divisor.h"
#include "../problem.cuh"

/* ---- 1. on the device ------------------------------------------------------------------------ */
struct PrefillPages {
    const int32_t *table, *lens;
    int64_t lens_step;
    int table_row, table_entry; /* 32 bits hold the offset of every entry */
    int num_blocks;
    Divisor by_block; /* divides by block_size */
};

/* Sequence b. Errors in the lengths are reported and clamped. */
__device__ __forceinline__ Sequence prefill_sequence(const Problem &p, const PrefillPages &pages,
                                                     int b) {
    Sequence s;
    bool good = true;
    int tokens = p.seq_q;
    s.q0 = s.k0 = 0;
    s.seq_q = p.seq_q;
    if (p.cu_q) {
        const int q0 = p.cu_q[b * p.cu_q_step], q1 = p.cu_q[(b + 1) * p.cu_q_step];
        s.q0 = min(max(q0, 0), p.total_q);
        tokens = min(max(q1, s.q0), p.total_q) - s.q0;
        s.seq_q = min(tokens, p.seq_q);
        good = s.q0 == q0 && s.q0 + s.seq_q == q1 && (b > 0 || q0 == 0);
    }
    const int length = pages.lens[b * pages.lens_step];
    s.seq_k = min(max(length, 0), p.seq_k);
    if (!good || s.seq_k != length || (length > 0 && length < tokens))
        report(p.error_word, GK_BAD_SEQ_LENS);
    /* Without a causal rule, queries before the first key would see keys. That length was
     * reported above, so the sequence gets no keys at all. */
    if (p.rules.right < 0 && s.seq_k < tokens) s.seq_k = 0;
    s.diagonal = s.seq_k - tokens;
    s.span = span_make(s.seq_k, s.diagonal, p.rules.left, p.rules.right);
    span_start(s.span, p.rules, b, s.seq_k);
    return s;
}

/* ---- 2. host --------------------------------------------------------------------------------- */
/* Views [T, H, last] with equally long sequences as [B, H, S, last]. */
inline gk_tensor by_sequence(const gk_tensor &t, int64_t batch) {
    gk_tensor x = t;
    const int64_t each = batch ? t.shape[0] / batch : 0;
    x.ndim = 4;
    x.shape[0] = batch;
    x.shape[1] = t.shape[1];
    x.shape[2] = each;
    x.shape[3] = t.shape[2];
    x.stride[0] = each * t.stride[0];
    x.stride[1] = t.stride[1];
    x.stride[2] = t.stride[0];
    x.stride[3] = t.stride[2];
    return x;
}

/* True if no query sees a key behind its own position. */
inline bool prefill_is_causal(const gk_paged_attn_args *a) {
    return a->rules.is_causal || (a->flags & GK_PAGED_WINDOW_RIGHT && a->rules.window_right == 0);
}

/* The call as flash_attn_fwd arguments. Its number of keys is what a row of the block table
 * holds; k and v have shapes but no contiguous keys. */
inline gk_flash_attn_args as_flash(const gk_paged_attn_args *a) {
    gk_flash_attn_args x = {};
    const int64_t batch = a->seq_lens.shape[0];
    const int64_t capacity =
        a->k_cache.shape[0] ? gk_min_i64(a->block_table.shape[1] * a->k_cache.shape[1], 1 << 30)
                            : 0;
    x.size = sizeof x;
    x.rules = a->rules;
    x.rules.is_causal = prefill_is_causal(a);
    x.rules.kv_end = x.rules.q_start = NULL;
    x.rules.window_right = -1;
    /* used for the order of tiles only; the kernel computes each sequence's own diagonal */
    x.rules.diagonal = batch ? gk_max_i64(capacity - a->q.shape[0] / batch, 0) : 0;
    x.cu_seqlens_q = x.cu_seqlens_k = a->cu_seqlens_q;
    x.max_seqlen_q = a->max_seqlen_q;
    x.max_seqlen_k = capacity;
    x.lse = a->lse;
    x.q = a->q;
    x.out = a->out;
    x.k = a->k_cache;
    x.v = a->v_cache;
    x.k.ndim = x.v.ndim = 3;
    x.k.shape[1] = x.v.shape[1] = a->k_cache.shape[2];
    x.k.shape[0] = x.v.shape[0] = gk_min_i64(batch * capacity, INT32_MAX);
    x.k.shape[2] = a->k_cache.shape[3];
    x.v.shape[2] = a->v_cache.shape[3];
    if (!a->cu_seqlens_q) {
        x.q = by_sequence(a->q, batch);
        x.out = by_sequence(a->out, batch);
        x.k.ndim = x.v.ndim = 4;
        x.k.shape[0] = x.v.shape[0] = batch;
        x.k.shape[3] = x.k.shape[2];
        x.v.shape[3] = x.v.shape[2];
        x.k.shape[2] = x.v.shape[2] = capacity;
    }
    return x;
}

/* Adapts a problem of as_flash to the paged call: batch, lse [T, Hq], and the error word. */
inline void as_paged(Problem *p, const gk_paged_attn_args *a) {
    p->batch = (int)a->seq_lens.shape[0];
    p->lse = {a->lse.data, p->cu_q ? 0 : (int64_t)p->seq_q * p->heads_q, 1, p->heads_q};
    if (a->flags & GK_PAGED_ALLOW_SHORT) p->error_word = NULL;
}

/* True if 32 bits hold the offset of each element. */
inline bool in_32_bits(const gk_tensor &t) {
    int64_t most = 0;
    for (int d = 0; d < t.ndim; ++d) {
        const int64_t step = t.stride[d] < 0 ? -t.stride[d] : t.stride[d];
        if (step > INT32_MAX) return false;
        most += gk_max_i64(t.shape[d] - 1, 0) * step;
    }
    return most <= INT32_MAX;
}

/* Requires a table that is in_32_bits, and fewer than 2^31 pages. */
inline PrefillPages prefill_pages(const gk_paged_attn_args *a) {
    PrefillPages x = {};
    x.table = (const int32_t *)a->block_table.data;
    x.table_row = (int)a->block_table.stride[0];
    x.table_entry = (int)a->block_table.stride[1];
    x.lens = (const int32_t *)a->seq_lens.data;
    x.lens_step = a->seq_lens.stride[0];
    x.num_blocks = (int)a->k_cache.shape[0];
    x.by_block = divisor_of((uint32_t)gk_min_i64(a->k_cache.shape[1], 1 << 30));
    return x;
}

#endif
