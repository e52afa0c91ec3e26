/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_gemm: gk_gemm against the same call in float64. */
#include "fuzz.h"

static size_t bytes_of(const gk_context *ctx, const void *args) {
    return gk_gemm_workspace_bytes(ctx, args);
}
static gk_status call(const gk_context *ctx, const void *args) { return gk_gemm(ctx, args); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype();
    const gk_dtype out_dtype = dtype != GK_F64 && fz_one_in(3) ? GK_F32 : dtype;
    const int64_t m = fz_size(129), n = fz_size(129), k = fz_size(129);
    const int batch_ndim = (int)fz_int(0, 2);
    int64_t out_shape[4], a_shape[4], b_shape[4], c_shape[4];
    for (int d = 0; d < batch_ndim; ++d) {
        out_shape[d] = a_shape[d] = b_shape[d] = c_shape[d] = fz_int(0, 3) == 3 ? 0 : fz_int(1, 3);
        if (fz_one_in(4)) a_shape[d] = 1;
        if (fz_one_in(4)) b_shape[d] = 1;
        if (fz_one_in(4)) c_shape[d] = 1;
    }
    /* b may have fewer dimensions */
    const int nd = batch_ndim + 2, drop = (int)fz_int(0, batch_ndim);
    out_shape[nd - 2] = a_shape[nd - 2] = c_shape[nd - 2] = m;
    out_shape[nd - 1] = b_shape[nd - 1] = c_shape[nd - 1] = n;
    a_shape[nd - 1] = b_shape[nd - 2] = k;
    if (fz_one_in(4)) c_shape[nd - 2] = 1;
    if (fz_one_in(4)) c_shape[nd - 1] = 1;

    gk_gemm_args args = GK_GEMM_ARGS_INIT;
    gk_tensor bias, c, preact;
    args.a = fz_make(dtype, nd, a_shape, FZ_INPUT);
    args.b = fz_make(dtype, nd - drop, b_shape + drop, FZ_INPUT);
    args.out = fz_make(out_dtype, nd, out_shape, FZ_RESULT | FZ_LAST_DENSE);
    const int extra = (int)fz_int(0, 63);
    if (extra & 1) {
        bias = fz_make(extra & 8 ? out_dtype : dtype, 1, &n, FZ_INPUT);
        args.bias = &bias;
    }
    const int c_drop = extra & 2 && extra & 32 ? nd - (int)fz_int(0, nd) : 0;
    if (extra & 2) {
        c = fz_make(extra & 16 ? out_dtype : dtype, nd - c_drop, c_shape + c_drop, FZ_INPUT);
        args.c = &c;
    }
    if (extra & 4) {
        preact = fz_make(out_dtype, nd, out_shape, FZ_RESULT | FZ_LAST_DENSE);
        args.preact = &preact;
    }
    static const double factors[] = {1, 0, -0.5, 2, 0.3};
    args.alpha = factors[fz_int(0, 4)];
    args.beta = factors[fz_int(0, 4)];
    args.activation = (gk_activation)fz_int(0, 4);
    args.fp32_precision = (gk_precision)fz_int(0, 1);

    /* make the float64 call before a field is corrupted */
    gk_context plain = GK_CONTEXT_INIT;
    gk_gemm_args wide = args;
    gk_tensor wide_bias, wide_c, wide_preact;
    wide.a = fz_wide(&args.a);
    wide.b = fz_wide(&args.b);
    wide.out = fz_wide(&args.out);
    wide.bias = fz_wide_of(args.bias, &wide_bias);
    wide.c = fz_wide_of(args.c, &wide_c);
    wide.preact = fz_wide_of(args.preact, &wide_preact);

    gk_tensor *const all[] = {&args.a,
                              &args.b,
                              &args.out,
                              args.bias ? &bias : NULL,
                              args.preact ? &preact : NULL,
                              args.c ? &c : NULL};
    const bool wrong = fz_corrupt(all, 6, args.beta != 0 ? 6 : 5);
    const gk_status status = fz_call("gk_gemm", &ctx, &args, bytes_of, call, &args.workspace,
                                     &args.workspace_bytes, wrong);
    if (!wrong && fz_agree("gk_gemm", status, gk_gemm(&plain, &wide), gk_last_error())) {
        const double terms = fabs(args.alpha) * (double)k + fabs(args.beta) + 1;
        const double bound =
            terms * (16 + 2 * sqrt((double)k)) * fz_unit(dtype == GK_F64 ? GK_F64 : GK_F32);
        fz_close("out", &args.out, &wide.out, 1.2 * bound);
        if (args.preact) fz_close("preact", &preact, &wide_preact, bound);
    }
    fz_free();
    return 0;
}
