/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_flash_attn: gk_flash_attn_fwd, and gk_flash_attn_bwd on its results, against the same calls
 * in float64. */
#include "rules.h"

static size_t fwd_bytes(const gk_context *ctx, const void *args) {
    return gk_flash_attn_fwd_workspace_bytes(ctx, args);
}
static gk_status fwd(const gk_context *ctx, const void *args) {
    return gk_flash_attn_fwd(ctx, args);
}
static size_t bwd_bytes(const gk_context *ctx, const void *args) {
    return gk_flash_attn_bwd_workspace_bytes(ctx, args);
}
static gk_status bwd(const gk_context *ctx, const void *args) {
    return gk_flash_attn_bwd(ctx, args);
}

/* The ends of `batch` sequences. Sometimes they are out of order or past the tokens. */
static gk_tensor ends_make(int64_t batch, int64_t tokens, int64_t *longest) {
    const int64_t n = batch + 1;
    gk_tensor t = fz_make(GK_I32, 1, &n, FZ_RESULT);
    const int64_t bad = fz_int(0, 15);
    int64_t end = 0;
    *longest = 0;
    for (int64_t b = 0; b <= batch; ++b) {
        const int64_t more = b ? gk_min_i64(fz_int(0, 40), tokens - end) : 0;
        end += more;
        *longest = gk_max_i64(*longest, more);
        fz_set(&t, b,
               (double)(bad == 15 && b == batch ? tokens + 1
                        : bad == 14 && b == 1   ? -3
                                                : end));
    }
    fz_all[fz_count - 1].result = false;
    return t;
}

static void backward(const gk_context *ctx, const gk_flash_attn_args *f,
                     const gk_flash_attn_args *wide_fwd, int nd, double loss) {
    const gk_dtype dtype = f->q.dtype, stats = fz_stats(dtype);
    const int64_t heads = f->q.shape[1];
    gk_flash_attn_bwd_args args = GK_FLASH_ATTN_BWD_ARGS_INIT;
    gk_tensor grad_lse, dsinks, wide_grad_lse, wide_dsinks;
    args.fwd = *f;
    args.grad_out = fz_make(dtype, nd, f->out.shape, FZ_INPUT | FZ_LAST_DENSE);
    if (fz_one_in(2)) {
        grad_lse = fz_make(stats, nd - 1, f->lse.shape, FZ_INPUT);
        args.grad_lse = &grad_lse;
    }
    args.dq = fz_make(dtype, nd, f->q.shape, FZ_RESULT | FZ_LAST_DENSE);
    args.dk = fz_make(dtype, nd, f->k.shape, FZ_RESULT | FZ_LAST_DENSE);
    args.dv = fz_make(dtype, nd, f->v.shape, FZ_RESULT | FZ_LAST_DENSE);
    if (f->rules.sinks && fz_one_in(2)) {
        dsinks = fz_make(f->rules.sinks->dtype, 1, &heads, FZ_RESULT);
        args.dsinks = &dsinks;
    }
    gk_context plain = GK_CONTEXT_INIT;
    gk_flash_attn_bwd_args wide = args;
    wide.fwd = *wide_fwd;
    wide.grad_out = fz_wide(&args.grad_out);
    wide.grad_lse = fz_wide_of(args.grad_lse, &wide_grad_lse);
    wide.dq = fz_wide(&args.dq);
    wide.dk = fz_wide(&args.dk);
    wide.dv = fz_wide(&args.dv);
    wide.dsinks = fz_wide_of(args.dsinks, &wide_dsinks);
    gk_tensor *const all[] = {&args.grad_out,
                              &args.dq,
                              &args.dk,
                              &args.dv,
                              &args.fwd.lse,
                              args.grad_lse ? &grad_lse : NULL,
                              args.dsinks ? &dsinks : NULL};
    const bool wrong = fz_corrupt(all, 7, 7);
    const gk_status status = fz_call("gk_flash_attn_bwd", ctx, &args, bwd_bytes, bwd,
                                     &args.workspace, &args.workspace_bytes, wrong);
    if (wrong ||
        !fz_agree("gk_flash_attn_bwd", status, gk_flash_attn_bwd(&plain, &wide), gk_last_error()))
        return;
    /* |dP - delta| <= 2 Dv + 1, the P of a row sum to 1, and a key sees every row of its group */
    const double ds = 2 * (double)f->v.shape[nd - 1] + 1, scale = fabs(f->rules.scale);
    const double rows =
        (double)(f->q.shape[nd == 4 ? 2 : 0] * gk_max_i64(1, heads / gk_max_i64(1, f->k.shape[1])));
    fz_close("dq", &args.dq, &wide.dq, 4 * loss * scale * ds);
    fz_close("dk", &args.dk, &wide.dk, 4 * loss * scale * ds * rows);
    fz_close("dv", &args.dv, &wide.dv, 4 * loss * rows);
    if (args.dsinks)
        fz_close("dsinks", &dsinks, &wide_dsinks, 4 * loss * ds * (double)gk_numel(&f->lse));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype(), stats = fz_stats(dtype);
    const bool packed = fz_one_in(2);
    const int nd = packed ? 3 : 4;
    const int64_t batch = fz_int(0, 9) == 9 ? 0 : fz_int(1, 3),
                  heads_kv = fz_int(0, 9) == 9 ? 0 : fz_int(1, 3);
    const int64_t heads = heads_kv * fz_int(1, 3), seq_q = fz_size(100), seq_k = fz_size(129);
    const int64_t dim = gk_max_i64(1, fz_size(100)), dim_v = gk_max_i64(1, fz_size(100));
    /* a call over some milliseconds under the sanitizers finds less than several short ones */
    if (gk_max_i64(1, batch) * heads * seq_q * seq_k * (dim + dim_v) > 1500000) return 0;
    const int64_t q4[4] = {batch, heads, seq_q, dim}, k4[4] = {batch, heads_kv, seq_k, dim};
    const int64_t v4[4] = {batch, heads_kv, seq_k, dim_v}, o4[4] = {batch, heads, seq_q, dim_v};
    const int64_t q3[3] = {seq_q, heads, dim}, k3[3] = {seq_k, heads_kv, dim},
                  v3[3] = {seq_k, heads_kv, dim_v};
    const int64_t o3[3] = {seq_q, heads, dim_v};

    gk_flash_attn_args args = GK_FLASH_ATTN_ARGS_INIT;
    gk_tensor cu_q, cu_k, kv_start, kv_end, q_start;
    fz_rules own;
    args.q = fz_make(dtype, nd, packed ? q3 : q4, FZ_LAST_DENSE);
    args.k = fz_make(dtype, nd, packed ? k3 : k4, FZ_LAST_DENSE);
    args.v = fz_make(dtype, nd, packed ? v3 : v4, FZ_LAST_DENSE);
    args.out = fz_make(dtype, nd, packed ? o3 : o4, FZ_RESULT | FZ_LAST_DENSE);
    args.lse = fz_make(stats, nd - 1, packed ? o3 : o4, FZ_RESULT | FZ_CONTIGUOUS);
    args.rules = fz_rules_make(&own, dtype, batch, heads, dim);
    if (packed) {
        cu_q = ends_make(batch, seq_q, &args.max_seqlen_q);
        cu_k = ends_make(batch, seq_k, &args.max_seqlen_k);
        args.cu_seqlens_q = &cu_q;
        args.cu_seqlens_k = &cu_k;
        const int64_t looser = fz_int(0, 9);
        if (looser == 9) {
            args.max_seqlen_q = INT64_MAX;
            args.max_seqlen_k = INT64_MAX;
        }
        if (looser == 8) args.max_seqlen_q = -100000;
        if (looser == 7) args.max_seqlen_k -= 1;
    } else {
        const int64_t kind = fz_int(0, 15);
        args.rules.diagonal = fz_span() - 4 * (kind & 1) * 5;
        if (kind & 2) {
            kv_start = fz_bounds_make(batch);
            args.rules.kv_start = &kv_start;
        }
        if (kind & 4) {
            kv_end = fz_bounds_make(batch);
            args.rules.kv_end = &kv_end;
        }
        if (kind & 8) {
            q_start = fz_bounds_make(batch);
            args.rules.q_start = &q_start;
            args.rules.diagonal = 0;
        }
        if (args.rules.alibi_slopes) /* scores grow with the distances */
            own.scores += fabs((double)args.rules.diagonal) + (kind & 8 ? 0x1p31 : 0);
    }
    gk_context plain = GK_CONTEXT_INIT;
    gk_flash_attn_args wide = args;
    gk_tensor wide_slopes, wide_sinks;
    wide.q = fz_wide(&args.q);
    wide.k = fz_wide(&args.k);
    wide.v = fz_wide(&args.v);
    wide.out = fz_wide(&args.out);
    wide.lse = fz_wide(&args.lse);
    wide.rules.alibi_slopes = fz_wide_of(args.rules.alibi_slopes, &wide_slopes);
    wide.rules.sinks = fz_wide_of(args.rules.sinks, &wide_sinks);
    gk_flash_attn_args good = args;
    gk_tensor *const all[] = {&args.q,
                              &args.k,
                              &args.v,
                              &args.out,
                              packed ? &cu_q : NULL,
                              packed ? &cu_k : NULL,
                              args.rules.sinks ? &own.sinks : NULL,
                              args.rules.alibi_slopes ? &own.slopes : NULL,
                              args.rules.kv_start ? &kv_start : NULL,
                              args.rules.kv_end ? &kv_end : NULL,
                              args.rules.q_start ? &q_start : NULL,
                              &args.lse};
    const bool wrong = fz_corrupt(all, 12, 11);
    int64_t words[2] = {fz_int(0, 1000) << 40, 3};
    gk_tensor seed = {.data = words, .dtype = GK_I64, .ndim = 1, .shape = {2}, .stride = {1}};
    const int64_t dropout = fz_int(0, 15);
    double kept = 1;
    if (dropout > 12) {
        args.dropout_p = dropout == 13 ? 0.1 : dropout == 14 ? 0.5 : 1;
        args.dropout_seed = dropout < 15 ? &seed : NULL;
        wide.dropout_p = good.dropout_p = args.dropout_p;
        wide.dropout_seed = good.dropout_seed = args.dropout_seed;
        kept = dropout < 15 ? 1 - args.dropout_p : 1;
    }
    const gk_status status = fz_call("gk_flash_attn_fwd", &ctx, &args, fwd_bytes, fwd,
                                     &args.workspace, &args.workspace_bytes, wrong);
    if (!wrong &&
        fz_agree("gk_flash_attn_fwd", status, gk_flash_attn_fwd(&plain, &wide), gk_last_error())) {
        const double loss = fz_loss(dtype, 64 * (1 + own.scores)) / (kept * kept);
        fz_close("out", &args.out, &wide.out, loss);
        fz_close("lse", &args.lse, &wide.lse, fz_loss(stats, 64 * (1 + own.scores)));
        if (fz_one_in(2)) backward(&ctx, &good, &wide, nd, loss);
    }
    fz_free();
    return 0;
}
