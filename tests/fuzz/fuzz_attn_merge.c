/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_attn_merge: gk_attn_merge against the same call in float64. */
#include "fuzz.h"

static gk_status call(const gk_context *ctx, const void *args) { return gk_attn_merge(ctx, args); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype();
    const int nd = (int)fz_int(1, 4);
    int64_t shape[4];
    for (int d = 0; d < nd; ++d)
        shape[d] = d == nd - 1 ? fz_size(129) : fz_int(0, 9) == 9 ? 0 : fz_int(1, 6);
    gk_attn_merge_args args = GK_ATTN_MERGE_ARGS_INIT;
    args.out_a = fz_make(dtype, nd, shape, FZ_INPUT);
    args.out_b = fz_make(dtype, nd, shape, FZ_INPUT);
    args.lse_a = fz_make(fz_stats(dtype), nd - 1, shape, FZ_INPUT);
    args.lse_b = fz_make(fz_stats(dtype), nd - 1, shape, FZ_INPUT);
    const int64_t empty = fz_int(0, 7);
    for (int64_t i = 0; i < gk_numel(&args.lse_a); ++i) {
        if (empty & 1 && i % 3 == 0) fz_set(&args.lse_a, i, -INFINITY);
        if (empty & 2 && i % 2 == 0) fz_set(&args.lse_b, i, -INFINITY);
    }
    args.out = fz_make(dtype, nd, shape, FZ_RESULT | FZ_CONTIGUOUS);
    args.lse = fz_make(fz_stats(dtype), nd - 1, shape, FZ_RESULT | FZ_CONTIGUOUS);
    gk_context plain = GK_CONTEXT_INIT;
    gk_attn_merge_args wide = args;
    wide.out_a = fz_wide(&args.out_a);
    wide.out_b = fz_wide(&args.out_b);
    wide.out = fz_wide(&args.out);
    wide.lse_a = fz_wide(&args.lse_a);
    wide.lse_b = fz_wide(&args.lse_b);
    wide.lse = fz_wide(&args.lse);
    gk_tensor *const all[] = {&args.out_a, &args.out_b, &args.lse_a,
                              &args.lse_b, &args.out,   &args.lse};
    const bool wrong = fz_corrupt(all, 6, 6);
    const gk_status status = fz_call("gk_attn_merge", &ctx, &args, NULL, call, NULL, NULL, wrong);
    if (!wrong &&
        fz_agree("gk_attn_merge", status, gk_attn_merge(&plain, &wide), gk_last_error())) {
        const double bound = 32 * fz_unit(fz_stats(dtype));
        fz_close("out", &args.out, &wide.out, bound);
        fz_close("lse", &args.lse, &wide.lse, bound);
    }
    fz_free();
    return 0;
}
