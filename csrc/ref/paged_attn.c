/* SPDX-License-Identifier: BSD-3-Clause */
/* ref/paged_attn: attention over a paged cache, writes into the cache, and the merge of two
 * attention results, in double. Also the float64 kernels of the CPU.
 *
 * Sequence b has n_b queries; query t is at position seq_lens[b] - n_b + t. Key j is row
 * j % block_size of page block_table[b, j / block_size]. A task of paged_attn owns REF_TOKENS
 * tokens of one head. */
#include "attn.h"

typedef struct paged_job {
    const gk_paged_attn_args *x;
    ref_sequences q;
    int64_t tokens, heads_q, group;
} paged_job;

/* A scale for the call or for each kv head. If each page has a scale, ref_attend applies it key
 * by key and this returns 1. */
static double head_scale(const gk_tensor *scale, int64_t h_kv) {
    if (!scale || scale->ndim == 2) return 1;
    return gk_load(scale->data, scale->dtype, scale->ndim ? h_kv * scale->stride[0] : 0);
}

/* ---- paged_attn ------------------------------------------------------------------------------ */
static void paged_rows(const paged_job *job, int64_t b, int64_t h, int64_t token, int64_t i0,
                       int64_t rows) {
    const gk_paged_attn_args *x = job->x;
    int64_t h_kv = h / job->group, seq_k = ref_i32(&x->seq_lens, b);
    int64_t seq_q = ref_start(&job->q, b + 1) - ref_start(&job->q, b), diagonal = seq_k - seq_q;
    gk_span span = gk_span_paged(x, b, seq_q, seq_k);

    ref_keys keys = {.k = &x->k_cache, .v = &x->v_cache, .block_table = &x->block_table, .b = b};
    keys.k_at = h_kv * x->k_cache.stride[2];
    keys.v_at = h_kv * x->v_cache.stride[2];
    keys.k_step = x->k_cache.stride[1];
    keys.v_step = x->v_cache.stride[1];
    keys.block_size = x->k_cache.shape[1];
    keys.head = h_kv;
    keys.k_scale = x->k_scale && x->k_scale->ndim == 2 ? x->k_scale : NULL;
    keys.v_scale = x->v_scale && x->v_scale->ndim == 2 ? x->v_scale : NULL;
    ref_score score = ref_score_make(&x->rules, b, h, diagonal, head_scale(x->k_scale, h_kv));
    ref_block block = {.q = &x->q,
                       .out = &x->out,
                       .lse = &x->lse,
                       .sinks = x->rules.sinks,
                       .keys = &keys,
                       .score = &score,
                       .v_scale = head_scale(x->v_scale, h_kv),
                       .head = h,
                       .i0 = i0,
                       .rows = rows};
    const gk_tensor *mask = block.new_mask = gk_paged_mask_of(x);
    block.first_new = diagonal;
    /* without GK_PAGED_ALLOW_SHORT, a query at a negative position sees no key */
    const bool nobody = !(x->flags & GK_PAGED_ALLOW_SHORT);
    for (int64_t r = 0; r < rows; ++r) {
        block.q_at[r] = (token + r) * x->q.stride[0] + h * x->q.stride[1];
        block.out_at[r] = (token + r) * x->out.stride[0] + h * x->out.stride[1];
        block.lse_at[r] = (token + r) * x->lse.stride[0] + h * x->lse.stride[1];
        if (mask)
            block.mask_at[r] = mask->ndim == 2 ? (token + r) * mask->stride[0]
                                               : b * mask->stride[0] + (i0 + r) * mask->stride[1];
        block.lo[r] = gk_span_lo(&span, i0 + r);
        block.hi[r] = nobody && i0 + r + diagonal < 0 ? 0 : gk_span_hi(&span, i0 + r);
    }
    ref_attend(&block);
}

static void paged_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const paged_job *job = arg;
    const gk_paged_attn_args *x = job->x;
    int64_t h = task % job->heads_q, token = task / job->heads_q * REF_TOKENS;
    int64_t end = gk_min_i64(token + REF_TOKENS, job->tokens);
    while (token < end) {
        int64_t b = ref_owner(&job->q, token);
        if (b == job->q.batch) { /* token behind the last sequence */
            int64_t out_at = token * x->out.stride[0] + h * x->out.stride[1];
            for (int64_t d = 0; d < x->out.shape[2]; ++d)
                gk_store(x->out.data, x->out.dtype, out_at + d, 0);
            if (x->lse.data)
                gk_store(x->lse.data, x->lse.dtype, token * x->lse.stride[0] + h * x->lse.stride[1],
                         -INFINITY);
            ++token;
            continue;
        }
        int64_t i0 = token - ref_start(&job->q, b);
        int64_t rows = gk_min_i64(REF_ROWS, gk_min_i64(end, ref_start(&job->q, b + 1)) - token);
        paged_rows(job, b, h, token, i0, rows);
        token += rows;
    }
}

void gk_ref_paged_attn(const gk_context *ctx, const gk_paged_attn_args *args) {
    int64_t batch = args->seq_lens.shape[0], tokens = args->q.shape[0];
    paged_job job = {
        args, {args->cu_seqlens_q, batch, batch ? tokens / batch : 0}, tokens, args->q.shape[1], 1};
    if (args->k_cache.shape[2]) job.group = job.heads_q / args->k_cache.shape[2];
    gk_parallel(ctx, gk_ceil_div(tokens, REF_TOKENS) * job.heads_q, paged_task, &job);
}

/* ---- kv_cache_write -------------------------------------------------------------------------- */
/* Writes token t, head h of x to row `slot` of the cache. A scaled value that is too large
 * saturates. A NaN stays NaN, or becomes 0 in int8. For 8-bit codes the division is float32 as in
 * the kernels, because the quotient decides the code. */
static void write_row(const gk_tensor *x, const gk_tensor *cache, const gk_tensor *scale, int64_t t,
                      int64_t h, int64_t slot) {
    int64_t block_size = cache->shape[1], from = t * x->stride[0] + h * x->stride[1];
    int64_t to = slot / block_size * cache->stride[0] + slot % block_size * cache->stride[1] +
                 h * cache->stride[2];
    const bool code = gk_is_code(cache->dtype); /* stores of codes saturate */
    double divisor = head_scale(scale, h),
           limit = scale && !code ? gk_type_of(cache->dtype)->largest : INFINITY;
    if (scale && scale->ndim == 2)
        divisor = gk_load(scale->data, scale->dtype,
                          slot / block_size * scale->stride[0] + h * scale->stride[1]);
    for (int64_t d = 0; d < x->shape[2]; ++d) {
        double value = gk_load(x->data, x->dtype, from + d * x->stride[2]);
        value = code && x->dtype != GK_F64 ? (float)value / (float)divisor : value / divisor;
        value = value > limit ? limit : value < -limit ? -limit : value;
        gk_store(cache->data, cache->dtype, to + d * cache->stride[3], value);
    }
}

/* A task owns one head and takes the tokens in order, so that the last of two tokens with one
 * slot stays. */
static void write_head(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const gk_kv_cache_write_args *x = arg;
    for (int64_t t = 0; t < x->slots.shape[0]; ++t) {
        int64_t i = t * x->slots.stride[0];
        int64_t slot = x->slots.dtype == GK_I64 ? ((const int64_t *)x->slots.data)[i]
                                                : ((const int32_t *)x->slots.data)[i];
        if (slot < 0) continue;
        write_row(&x->k, &x->k_cache, x->k_scale, t, task, slot);
        write_row(&x->v, &x->v_cache, x->v_scale, t, task, slot);
    }
}

void gk_ref_kv_cache_write(const gk_context *ctx, const gk_kv_cache_write_args *args) {
    gk_kv_cache_write_args x = *args;
    gk_parallel(ctx, args->k.shape[1], write_head, &x);
}

/* ---- attn_merge ------------------------------------------------------------------------------ */
enum {
    MERGE_ROWS = 64
};

static void merge_row(const gk_attn_merge_args *x, int64_t row) {
    int ndim = x->lse.ndim;
    double lse_a = gk_load(x->lse_a.data, x->lse_a.dtype, gk_offset_of(&x->lse_a, ndim, row));
    double lse_b = gk_load(x->lse_b.data, x->lse_b.dtype, gk_offset_of(&x->lse_b, ndim, row));
    /* a side whose lse is -inf saw no key, and its out is not read */
    bool no_a = lse_a == -INFINITY, no_b = lse_b == -INFINITY;
    double lse = no_a ? lse_b : lse_a, weight_a = 1, weight_b = 1;
    if (!no_a && !no_b) {
        double peak = lse_a > lse_b ? lse_a : lse_b;
        double e_a = exp(lse_a - peak), e_b = exp(lse_b - peak);
        lse = peak + log(e_a + e_b);
        weight_a = e_a / (e_a + e_b);
        weight_b = e_b / (e_a + e_b);
    }
    int64_t a_at = gk_offset_of(&x->out_a, ndim, row), b_at = gk_offset_of(&x->out_b, ndim, row);
    int64_t out_at = gk_offset_of(&x->out, ndim, row);
    for (int64_t d = 0; d < x->out.shape[ndim]; ++d) {
        double y = 0;
        if (!no_a)
            y = weight_a * gk_load(x->out_a.data, x->out_a.dtype, a_at + d * x->out_a.stride[ndim]);
        if (!no_b) {
            double b =
                weight_b * gk_load(x->out_b.data, x->out_b.dtype, b_at + d * x->out_b.stride[ndim]);
            y = no_a ? b : y + b; /* 0 + b would lose the sign of -0 */
        }
        gk_store(x->out.data, x->out.dtype, out_at + d * x->out.stride[ndim], y);
    }
    gk_store(x->lse.data, x->lse.dtype, gk_offset_of(&x->lse, ndim, row), lse);
}

static void merge_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const gk_attn_merge_args *x = arg;
    int64_t end = gk_min_i64((task + 1) * MERGE_ROWS, gk_numel(&x->lse));
    for (int64_t row = task * MERGE_ROWS; row < end; ++row) merge_row(x, row);
}

void gk_ref_attn_merge(const gk_context *ctx, const gk_attn_merge_args *args) {
    gk_attn_merge_args x = *args;
    gk_parallel(ctx, gk_ceil_div(gk_numel(&args->lse), MERGE_ROWS), merge_task, &x);
}
