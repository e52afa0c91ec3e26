/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_rope_kv_write: gk_rope_kv_write into caches of q's dtype against the same call in float64.
 * No slot is written twice. */
#include "fuzz.h"
#include "gpukern.h"

static gk_status call(const gk_context *ctx, const void *args) {
    return gk_rope_kv_write(ctx, args);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype(), stats = fz_stats(dtype);
    const int64_t heads_q = fz_int(0, 4), heads = fz_int(0, 7) == 7 ? 0 : fz_int(1, 3),
                  pages = fz_int(0, 5), page = fz_int(0, 9);
    const int64_t dim = 2 * fz_size(33), dim_v = fz_size(65), tokens = fz_int(0, 12),
                  capacity = pages * page;
    const int64_t q[3] = {tokens, heads_q, dim}, k[3] = {tokens, heads, dim},
                  v[3] = {tokens, heads, dim_v};
    const int64_t k_pages[4] = {pages, page, heads, dim}, v_pages[4] = {pages, page, heads, dim_v};
    const int64_t angles[2] = {fz_int(1, 5), fz_int(0, 1) ? dim / 2 : fz_int(0, dim / 2)};
    gk_rope_kv_write_args a = GK_ROPE_KV_WRITE_ARGS_INIT;
    a.q = fz_make(dtype, 3, q, FZ_INPUT | FZ_LAST_DENSE);
    a.k = fz_make(dtype, 3, k, FZ_INPUT | FZ_LAST_DENSE);
    a.v = fz_make(dtype, 3, v, FZ_INPUT | FZ_LAST_DENSE);
    a.out_q = fz_make(dtype, 3, q, FZ_RESULT | FZ_LAST_DENSE);
    a.cos = fz_make(stats, 2, angles, FZ_INPUT | FZ_LAST_DENSE);
    a.sin = fz_make(stats, 2, angles, FZ_INPUT | FZ_LAST_DENSE);
    a.k_cache = fz_make(dtype, 4, k_pages, FZ_RESULT | FZ_FILLED);
    a.v_cache = fz_make(dtype, 4, v_pages, FZ_RESULT | FZ_FILLED);
    a.positions = fz_make(fz_int(0, 1) ? GK_I32 : GK_I64, 1, &tokens, FZ_INPUT);
    for (int64_t i = 0; i < tokens; ++i)
        fz_set(&a.positions, i,
               fz_one_in(40) ? (double)angles[0] : (double)fz_int(0, angles[0] - 1));
    a.slots = fz_slots(fz_int(0, 1) ? GK_I32 : GK_I64, tokens, capacity);
    gk_tensor q_weight = fz_make(fz_int(0, 1) ? dtype : stats, 1, &dim, FZ_INPUT), q_weight2;
    gk_tensor k_weight = fz_make(fz_int(0, 1) ? dtype : stats, 1, &dim, FZ_INPUT), k_weight2;
    if (fz_int(0, 1)) a.q_weight = &q_weight;
    if (fz_int(0, 1)) a.k_weight = &k_weight;
    a.eps = 0.1;
    a.interleaved = (int32_t)fz_int(0, 1);
    gk_rope_kv_write_args wide = a;
    wide.q = fz_wide(&a.q);
    wide.k = fz_wide(&a.k);
    wide.v = fz_wide(&a.v);
    wide.out_q = fz_wide(&a.out_q);
    wide.cos = fz_wide(&a.cos);
    wide.sin = fz_wide(&a.sin);
    wide.k_cache = fz_wide(&a.k_cache);
    wide.v_cache = fz_wide(&a.v_cache);
    wide.q_weight = fz_wide_of(a.q_weight, &q_weight2);
    wide.k_weight = fz_wide_of(a.k_weight, &k_weight2);
    gk_tensor *const all[] = {&a.q,       &a.k,       &a.v,         &a.out_q,
                              &a.k_cache, &a.v_cache, &a.positions, &a.slots};
    const bool wrong = fz_corrupt(all, 8, 8);
    const gk_status status = fz_call("gk_rope_kv_write", &ctx, &a, NULL, call, NULL, NULL, wrong);
    gk_context plain = GK_CONTEXT_INIT;
    if (!wrong &&
        fz_agree("gk_rope_kv_write", status, gk_rope_kv_write(&plain, &wide), gk_last_error())) {
        const double bound = 256 * (dtype == GK_F64 ? 0x1p-53 : 0x1p-24);
        fz_close("out_q", &a.out_q, &wide.out_q, bound);
        fz_close("k_cache", &a.k_cache, &wide.k_cache, bound);
        fz_close("v_cache", &a.v_cache, &wide.v_cache, 0);
    }
    fz_free();
    return 0;
}
