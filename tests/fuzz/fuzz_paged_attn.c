/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_paged_attn: gk_paged_attn against the same call in float64. */
#include "rules.h"

static size_t bytes_of(const gk_context *ctx, const void *args) {
    return gk_paged_attn_workspace_bytes(ctx, args);
}
static gk_status call(const gk_context *ctx, const void *args) { return gk_paged_attn(ctx, args); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype(), stats = fz_stats(dtype);
    const int64_t batch = fz_int(0, 9) == 9 ? 0 : fz_int(1, 4), heads_kv = fz_int(1, 3),
                  heads = heads_kv * fz_int(1, 4);
    const int64_t dim = gk_max_i64(1, fz_size(100)), dim_v = gk_max_i64(1, fz_size(100));
    const int64_t pages = fz_int(0, 9), page = fz_size(33), columns = fz_int(0, 6);
    const bool uneven = fz_one_in(2);
    int64_t each[4], tokens = 0, longest = 0;
    const int64_t same = fz_int(0, 9) == 9 ? fz_size(40) : fz_int(0, 3);
    for (int64_t b = 0; b < batch; ++b) {
        each[b] = uneven ? fz_int(0, 7) : same;
        tokens += each[b];
        longest = gk_max_i64(longest, each[b]);
    }
    const int64_t more = uneven ? fz_int(0, 2) : 0; /* tokens that belong to no sequence */
    const int64_t ends = batch + 1;
    const int64_t q_shape[3] = {tokens + more, heads, dim},
                  o_shape[3] = {tokens + more, heads, dim_v};
    const int64_t k_shape[4] = {pages, page, heads_kv, dim},
                  v_shape[4] = {pages, page, heads_kv, dim_v};
    const int64_t table_shape[2] = {batch, columns};

    gk_paged_attn_args args = GK_PAGED_ATTN_ARGS_INIT;
    gk_tensor cu, k_scale, v_scale, kv_start;
    fz_rules own;
    args.q = fz_make(dtype, 3, q_shape, FZ_LAST_DENSE);
    args.k_cache = fz_make(dtype, 4, k_shape, FZ_LAST_DENSE);
    args.v_cache = fz_make(dtype, 4, v_shape, FZ_LAST_DENSE);
    args.block_table = fz_make(GK_I32, 2, table_shape, FZ_RESULT);
    fz_all[fz_count - 1].result = false;
    args.seq_lens = fz_make(GK_I32, 1, &batch, FZ_RESULT);
    fz_all[fz_count - 1].result = false;
    const int64_t bad = fz_int(0, 19), at = fz_int(0, 23), turn = fz_int(0, 9);
    for (int64_t i = 0; i < batch * columns; ++i) {
        const int64_t wrong_page = bad == 19 ? -1 : bad == 18 ? pages : INT32_MIN;
        fz_set(&args.block_table, i,
               (double)(pages == 0 || (bad >= 17 && i == at) ? wrong_page : (i + turn) % pages));
    }
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t capacity = columns * page, wish = fz_int(0, 255);
        int64_t length = wish == 255   ? capacity + 1
                         : wish == 254 ? -1
                         : capacity    ? wish % (capacity + 1)
                                       : 0;
        if (wish < 200 && length < each[b]) length = 0;
        fz_set(&args.seq_lens, b, (double)length);
    }
    if (uneven) {
        cu = fz_make(GK_I32, 1, &ends, FZ_RESULT);
        fz_all[fz_count - 1].result = false;
        int64_t end = 0;
        for (int64_t b = 0; b <= batch; ++b) {
            fz_set(&cu, b, (double)end);
            end += b < batch ? each[b] : 0;
        }
        args.cu_seqlens_q = &cu;
        const int64_t looser = fz_int(0, 9);
        args.max_seqlen_q = looser == 9   ? INT64_MAX
                            : looser == 8 ? -100000
                            : looser == 7 ? longest - 1
                                          : longest;
    }
    args.out = fz_make(dtype, 3, o_shape, FZ_RESULT | FZ_CONTIGUOUS);
    const bool wants_lse = fz_one_in(2);
    if (wants_lse) args.lse = fz_make(stats, 2, o_shape, FZ_RESULT | FZ_CONTIGUOUS);
    args.rules = fz_rules_make(&own, dtype, batch, heads, dim);
    const int scales = (int)fz_int(0, 31);
    if (scales & 1) {
        k_scale = fz_make(stats, scales & 4 ? 1 : 0, &heads_kv, FZ_INPUT);
        args.k_scale = &k_scale;
    }
    if (scales & 2) {
        v_scale = fz_make(stats, scales & 8 ? 1 : 0, &heads_kv, FZ_INPUT);
        args.v_scale = &v_scale;
    }
    for (int s = 0; s < 2; ++s) { /* scales must be positive */
        const gk_tensor *t = s ? args.v_scale : args.k_scale;
        for (int64_t i = 0; t && i < gk_numel(t); ++i) fz_set(t, i, 0.25 + fabs(fz_get(t, i)));
    }
    if (scales & 16) {
        kv_start = fz_bounds_make(batch);
        args.rules.kv_start = &kv_start;
    }

    gk_context plain = GK_CONTEXT_INIT;
    gk_paged_attn_args wide = args;
    gk_tensor wide_k, wide_v, wide_slopes, wide_sinks;
    wide.q = fz_wide(&args.q);
    wide.k_cache = fz_wide(&args.k_cache);
    wide.v_cache = fz_wide(&args.v_cache);
    wide.out = fz_wide(&args.out);
    if (wants_lse) wide.lse = fz_wide(&args.lse);
    wide.k_scale = fz_wide_of(args.k_scale, &wide_k);
    wide.v_scale = fz_wide_of(args.v_scale, &wide_v);
    wide.rules.alibi_slopes = fz_wide_of(args.rules.alibi_slopes, &wide_slopes);
    wide.rules.sinks = fz_wide_of(args.rules.sinks, &wide_sinks);
    gk_tensor *const all[] = {&args.q,
                              &args.k_cache,
                              &args.v_cache,
                              &args.block_table,
                              &args.seq_lens,
                              &args.out,
                              uneven ? &cu : NULL,
                              args.k_scale ? &k_scale : NULL,
                              args.v_scale ? &v_scale : NULL,
                              args.rules.sinks ? &own.sinks : NULL,
                              args.rules.alibi_slopes ? &own.slopes : NULL,
                              args.rules.kv_start ? &kv_start : NULL};
    const bool wrong = fz_corrupt(all, 12, 12);
    const gk_status status = fz_call("gk_paged_attn", &ctx, &args, bytes_of, call, &args.workspace,
                                     &args.workspace_bytes, wrong);
    if (!wrong &&
        fz_agree("gk_paged_attn", status, gk_paged_attn(&plain, &wide), gk_last_error())) {
        fz_close("out", &args.out, &wide.out, fz_loss(dtype, 64 * (1 + own.scores)));
        if (wants_lse) fz_close("lse", &args.lse, &wide.lse, fz_loss(stats, 64 * (1 + own.scores)));
    }
    fz_free();
    return 0;
}
