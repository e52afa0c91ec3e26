/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_scaled_gemm: gk_scaled_gemm against its definition. */
#include "quant.h"

static size_t bytes_of(const gk_context *ctx, const void *args) {
    return gk_scaled_gemm_workspace_bytes(ctx, args);
}
static gk_status call(const gk_context *ctx, const void *args) { return gk_scaled_gemm(ctx, args); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype a = fz_code_dtype(), b = fz_one_in(8) ? fz_code_dtype()
                                            : a == GK_I8 ? a
                                                         : fz_code_dtype();
    static const gk_dtype results[] = {GK_BF16, GK_F32, GK_F16, GK_E4M3, GK_E5M2, GK_I8};
    const gk_dtype out = results[fz_int(0, 5)], scales = fz_one_in(4) ? GK_E8M0 : GK_F32;
    const int64_t m = fz_size(129), n = fz_size(129), k = fz_size(129), shape[2] = {m, n};
    gk_scaled_gemm_args args = GK_SCALED_GEMM_ARGS_INIT;
    args.a = fz_codes(a, m, k, FZ_INPUT);
    args.b = fz_codes(b, k, n, FZ_INPUT);
    const int64_t am = fz_blocks(m, false), ak = fz_blocks(k, true), bk = fz_blocks(k, true),
                  bn = fz_blocks(n, false);
    args.scale_a = fz_scale(scales, am, ak);
    args.scale_b = fz_scale(GK_F32, bk, bn);
    gk_tensor bias, c, out_scale;
    const int extra = (int)fz_int(0, 15);
    const gk_dtype addend = extra & 4 || gk_dtype_bytes(out) == 1 ? GK_F32 : out;
    if (extra & 1) {
        bias = fz_make(addend, 1, &n, FZ_INPUT);
        args.bias = &bias;
    }
    if (extra & 2) {
        c = fz_make(addend, 2, shape, FZ_INPUT);
        args.c = &c;
    }
    if ((gk_dtype_bytes(out) == 1) != (extra & 8 && fz_one_in(4))) {
        out_scale = fz_make(GK_F32, 0, NULL, FZ_INPUT);
        fz_set(&out_scale, 0, 0.5);
        args.out_scale = &out_scale;
    }
    static const double factors[] = {1, 0, -0.5};
    args.beta = factors[fz_int(0, 2)];
    args.activation = (gk_activation)fz_int(0, 4);
    args.accumulate = (gk_accumulate)fz_int(0, 1);
    args.out = fz_make(out, 2, shape, FZ_RESULT | FZ_LAST_DENSE);

    gk_scaled_gemm_args judge = args;
    judge.out = fz_judged(&args.out);
    gk_tensor *const all[] = {&args.a,       &args.b,   &args.scale_a,
                              &args.scale_b, &args.out, args.bias ? &bias : NULL};
    const bool wrong = fz_corrupt(all, 6, 6);
    const gk_status status = fz_call("gk_scaled_gemm", &ctx, &args, bytes_of, call, &args.workspace,
                                     &args.workspace_bytes, wrong);
    if (!wrong && status == GK_OK) {
        gk_context plain = GK_CONTEXT_INIT;
        gk_ref_scaled_gemm(&plain, &judge);
        const double unit = args.out_scale ? 2 : 1; /* codes of at most 3, scales of at most 2 */
        fz_near("out", &args.out, &judge.out,
                unit * (36 * (double)k + 8) * (16 + sqrt((double)k)) * 0x1p-24);
    }
    fz_free();
    return 0;
}
