/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_kv_cache_write: gk_kv_cache_write against the same call in float64. No slot is written
 * twice. */
#include "fuzz.h"

static gk_status call(const gk_context *ctx, const void *args) {
    return gk_kv_cache_write(ctx, args);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype(), slot_dtype = fz_one_in(2) ? GK_I32 : GK_I64;
    const int64_t heads = fz_int(0, 7) == 7 ? 0 : fz_int(1, 3), pages = fz_int(0, 5),
                  page = fz_int(0, 9);
    const int64_t dim = fz_size(65), dim_v = fz_size(65), tokens = fz_int(0, 12),
                  capacity = pages * page;
    const int64_t k_shape[3] = {tokens, heads, dim}, v_shape[3] = {tokens, heads, dim_v};
    const int64_t kc_shape[4] = {pages, page, heads, dim},
                  vc_shape[4] = {pages, page, heads, dim_v};
    gk_kv_cache_write_args args = GK_KV_CACHE_WRITE_ARGS_INIT;
    args.k = fz_make(dtype, 3, k_shape, FZ_INPUT);
    args.v = fz_make(dtype, 3, v_shape, FZ_INPUT);
    args.k_cache = fz_make(dtype, 4, kc_shape, FZ_RESULT | FZ_FILLED);
    args.v_cache = fz_make(dtype, 4, vc_shape, FZ_RESULT | FZ_FILLED);
    args.slots = fz_slots(slot_dtype, tokens, capacity);
    const int scales = (int)fz_int(0, 15);
    gk_tensor k_scale, v_scale;
    if (scales & 1) {
        k_scale = fz_make(fz_stats(dtype), scales & 4 ? 1 : 0, &heads, FZ_INPUT);
        args.k_scale = &k_scale;
    }
    if (scales & 2) {
        v_scale = fz_make(fz_stats(dtype), scales & 8 ? 1 : 0, &heads, FZ_INPUT);
        args.v_scale = &v_scale;
    }
    for (int s = 0; s < 2; ++s) {
        const gk_tensor *t = s ? args.v_scale : args.k_scale;
        for (int64_t i = 0; t && i < gk_numel(t); ++i) fz_set(t, i, 0.5 + fabs(fz_get(t, i)));
    }
    gk_context plain = GK_CONTEXT_INIT;
    gk_kv_cache_write_args wide = args;
    gk_tensor wide_k, wide_v;
    wide.k = fz_wide(&args.k);
    wide.v = fz_wide(&args.v);
    wide.k_cache = fz_wide(&args.k_cache);
    wide.v_cache = fz_wide(&args.v_cache);
    wide.k_scale = fz_wide_of(args.k_scale, &wide_k);
    wide.v_scale = fz_wide_of(args.v_scale, &wide_v);
    gk_tensor *const all[] = {&args.k,
                              &args.v,
                              &args.k_cache,
                              &args.v_cache,
                              &args.slots,
                              args.k_scale ? &k_scale : NULL,
                              args.v_scale ? &v_scale : NULL};
    const bool wrong = fz_corrupt(all, 7, 7);
    const gk_status status =
        fz_call("gk_kv_cache_write", &ctx, &args, NULL, call, NULL, NULL, wrong);
    if (!wrong &&
        fz_agree("gk_kv_cache_write", status, gk_kv_cache_write(&plain, &wide), gk_last_error())) {
        const double u = fz_unit(fz_stats(dtype));
        fz_close("k_cache", &args.k_cache, &wide.k_cache, args.k_scale ? 4 * u : 0);
        fz_close("v_cache", &args.v_cache, &wide.v_cache, args.v_scale ? 4 * u : 0);
    }
    fz_free();
    return 0;
}
