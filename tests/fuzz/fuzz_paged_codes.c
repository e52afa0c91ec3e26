/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_paged_codes: gk_kv_cache_write into 8-bit pages, and gk_paged_attn over them.
 *
 * Each written code is checked by its equation. The attention is compared with float64 attention
 * over the same codes. Scales are one for all, one a head, or one for each page and head. Some are
 * invalid. */
#include "rules.h"

static size_t no_bytes(const gk_context *ctx, const void *args) { return ctx && args ? 0 : 1; }
static gk_status write_call(const gk_context *ctx, const void *args) {
    return gk_kv_cache_write(ctx, args);
}
static size_t bytes_of(const gk_context *ctx, const void *args) {
    return gk_paged_attn_workspace_bytes(ctx, args);
}
static gk_status call(const gk_context *ctx, const void *args) { return gk_paged_attn(ctx, args); }

static const gk_tensor *scale_make(gk_tensor *place, int64_t pages, int64_t heads, bool *bad) {
    static const double wrong[] = {0, -1, INFINITY, NAN};
    const int kind = (int)fz_int(0, 15);
    const int64_t by_page[2] = {pages, heads};
    if (kind % 4 == 3) return NULL;
    *place = fz_make(GK_F32, kind % 4, kind % 4 == 2 ? by_page : &heads, FZ_RESULT | FZ_FILLED);
    fz_all[fz_count - 1].result = false;
    for (int64_t i = 0; i < gk_numel(place); ++i)
        fz_set(place, i, ldexp(0.25 + fabs(fz_get(place, i)), -kind));
    /* not for scales of pages: the call may not read that page */
    if (kind == 12 && gk_numel(place)) {
        fz_set(place, 0, wrong[fz_int(0, 3)]);
        *bad = true;
    }
    return place;
}
static double scale_of(const gk_tensor *t, int64_t page, int64_t head, int64_t heads) {
    return !t ? 1 : fz_get(t, t->ndim == 2 ? page * heads + head : t->ndim ? head : 0);
}

/* Checks the codes of token t: x / scale in float32, rounded by gk_store. */
static void expect_codes(const char *name, const gk_tensor *x, const gk_tensor *cache,
                         const gk_tensor *scale, int64_t t, int64_t slot) {
    const int64_t heads = x->shape[1], dim = x->shape[2], page = slot / cache->shape[1];
    for (int64_t i = 0; i < heads * dim; ++i) {
        const int64_t h = i / dim;
        const double value = fz_get(x, t * heads * dim + i);
        const float quotient = (float)value / (float)scale_of(scale, page, h, heads);
        uint8_t want;
        gk_store(&want, cache->dtype, 0,
                 x->dtype == GK_F64 ? value / scale_of(scale, page, h, heads) : quotient);
        const uint8_t got =
            ((const uint8_t *)cache->data)[fz_offset(cache, slot * heads * dim + i)];
        FZ_REQUIRE(got == want, "%s: token %lld, element %lld of slot %lld is code %d, expected %d",
                   name, (long long)t, (long long)i, (long long)slot, got, want);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const gk_dtype codes[] = {GK_E4M3, GK_E5M2, GK_I8};
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype(), stats = fz_stats(dtype), code = codes[fz_int(0, 2)];
    const int64_t heads_kv = fz_int(1, 3), heads = heads_kv * fz_int(1, 4),
                  dim = gk_max_i64(1, fz_size(80));
    const int64_t dim_v = gk_max_i64(1, fz_size(80)), pages = fz_int(1, 6), page = fz_int(1, 17);
    const int64_t capacity = pages * page, length = fz_int(0, capacity), each = fz_int(1, 20);
    const int64_t k_shape[3] = {length, heads_kv, dim}, v_shape[3] = {length, heads_kv, dim_v};
    const int64_t kc_shape[4] = {pages, page, heads_kv, dim},
                  vc_shape[4] = {pages, page, heads_kv, dim_v};
    bool bad = false;
    gk_tensor k_scale, v_scale;

    gk_kv_cache_write_args write = GK_KV_CACHE_WRITE_ARGS_INIT;
    write.k = fz_make(dtype, 3, k_shape, FZ_INPUT);
    write.v = fz_make(dtype, 3, v_shape, FZ_INPUT);
    write.k_cache = fz_make(code, 4, kc_shape, FZ_RESULT | FZ_LAST_DENSE | FZ_FILLED);
    write.v_cache = fz_make(code, 4, vc_shape, FZ_RESULT | FZ_LAST_DENSE | FZ_FILLED);
    write.slots = fz_make(GK_I64, 1, &length, FZ_RESULT);
    fz_all[fz_count - 1].result = false;
    for (int64_t i = 0; i < length; ++i)
        fz_set(&write.slots, i,
               (double)(capacity - 1 - i)); /* pages are filled from the last one on */
    write.k_scale = scale_make(&k_scale, pages, heads_kv, &bad);
    write.v_scale = scale_make(&v_scale, pages, heads_kv, &bad);
    const gk_status written =
        fz_call("gk_kv_cache_write", &ctx, &write, no_bytes, write_call, NULL, NULL, false);
    FZ_REQUIRE(bad || written == GK_OK, "gk_kv_cache_write: %s", gk_last_error());
    for (int64_t t = 0; written == GK_OK && t < length; ++t) {
        expect_codes("k", &write.k, &write.k_cache, write.k_scale, t, capacity - 1 - t);
        expect_codes("v", &write.v, &write.v_cache, write.v_scale, t, capacity - 1 - t);
    }

    const int64_t columns = gk_max_i64(1, pages), one = 1, table_shape[2] = {1, columns};
    const int64_t tokens = length ? gk_min_i64(each, length) : each;
    const int64_t q_shape[3] = {tokens, heads, dim}, o_shape[3] = {tokens, heads, dim_v};
    gk_paged_attn_args args = GK_PAGED_ATTN_ARGS_INIT;
    fz_rules own;
    args.q = fz_make(dtype, 3, q_shape, FZ_LAST_DENSE);
    args.k_cache = write.k_cache;
    args.v_cache = write.v_cache;
    args.block_table = fz_make(GK_I32, 2, table_shape, FZ_RESULT);
    fz_all[fz_count - 1].result = false;
    for (int64_t i = 0; i < columns; ++i) fz_set(&args.block_table, i, (double)(pages - 1 - i));
    args.seq_lens = fz_make(GK_I32, 1, &one, FZ_RESULT);
    fz_all[fz_count - 1].result = false;
    /* whole pages, which the slots fill from the end */
    fz_set(&args.seq_lens, 0, (double)(length / page * page));
    if (length / page * page < tokens) fz_set(&args.seq_lens, 0, 0);
    args.k_scale = write.k_scale;
    args.v_scale = write.v_scale;
    args.out = fz_make(dtype, 3, o_shape, FZ_RESULT | FZ_CONTIGUOUS);
    args.lse = fz_make(stats, 2, o_shape, FZ_RESULT | FZ_CONTIGUOUS);
    args.rules = fz_rules_make(&own, dtype, 1, heads, dim);
    gk_tensor kv_start;
    if (fz_one_in(4)) {
        kv_start = fz_bounds_make(1);
        args.rules.kv_start = &kv_start;
    }

    gk_context plain = GK_CONTEXT_INIT;
    gk_paged_attn_args wide = args;
    gk_tensor wide_slopes, wide_sinks;
    wide.q = fz_wide(&args.q);
    wide.out = fz_wide(&args.out);
    wide.lse = fz_wide(&args.lse);
    wide.rules.alibi_slopes = fz_wide_of(args.rules.alibi_slopes, &wide_slopes);
    wide.rules.sinks = fz_wide_of(args.rules.sinks, &wide_sinks);
    const gk_status status = fz_call("gk_paged_attn", &ctx, &args, bytes_of, call, &args.workspace,
                                     &args.workspace_bytes, false);
    if (written == GK_OK &&
        fz_agree("gk_paged_attn", status, gk_paged_attn(&plain, &wide), gk_last_error())) {
        /* scores, and with them the error of a row, grow with the scales of the codes */
        double k_most = 1, v_most = 1;
        for (int64_t i = 0; i < gk_numel(&write.k); ++i)
            k_most = fmax(k_most, fabs(fz_get(&write.k, i)));
        for (int64_t i = 0; i < gk_numel(&write.v); ++i)
            v_most = fmax(v_most, fabs(fz_get(&write.v, i)));
        /* with scales of pages, key times scale is rounded to q's dtype */
        const double keys =
            args.k_scale && args.k_scale->ndim == 2 ? 2 * fz_unit(dtype) * (1 + own.scores) : 0;
        const double loss = 2 * fz_loss(dtype, 64 * (1 + own.scores)) + 2 * keys;
        fz_close("out", &args.out, &wide.out, loss * k_most * v_most);
        fz_close("lse", &args.lse, &wide.lse,
                 (fz_loss(stats, 64 * (1 + own.scores)) + keys) * k_most);
    }
    fz_free();
    return 0;
}
