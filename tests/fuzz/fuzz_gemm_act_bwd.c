/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_gemm_act_bwd: gk_gemm_act_bwd against the same call in float64. */
#include "fuzz.h"

static gk_status call(const gk_context *ctx, const void *args) {
    return gk_gemm_act_bwd(ctx, args);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype(), other = fz_dtype();
    const int nd = (int)fz_int(0, 4);
    int64_t shape[4];
    for (int d = 0; d < nd; ++d) shape[d] = d < 2 ? fz_size(40) : fz_int(0, 4);
    gk_gemm_act_bwd_args args = GK_GEMM_ACT_BWD_ARGS_INIT;
    args.grad_out = fz_make(dtype, nd, shape, FZ_INPUT);
    args.saved =
        fz_make((dtype == GK_F64) == (other == GK_F64) ? other : dtype, nd, shape, FZ_INPUT);
    args.grad_in = fz_make(dtype, nd, shape, FZ_RESULT);
    args.activation = (gk_activation)fz_int(0, 4);
    gk_context plain = GK_CONTEXT_INIT;
    gk_gemm_act_bwd_args wide = args;
    wide.grad_out = fz_wide(&args.grad_out);
    wide.saved = fz_wide(&args.saved);
    wide.grad_in = fz_wide(&args.grad_in);
    gk_tensor *const all[] = {&args.grad_out, &args.saved, &args.grad_in};
    const bool wrong = fz_corrupt(all, 3, 3);
    const gk_status status = fz_call("gk_gemm_act_bwd", &ctx, &args, NULL, call, NULL, NULL, wrong);
    if (!wrong &&
        fz_agree("gk_gemm_act_bwd", status, gk_gemm_act_bwd(&plain, &wide), gk_last_error()))
        fz_close("grad_in", &args.grad_in, &wide.grad_in,
                 32 * fz_unit(dtype == GK_F64 ? GK_F64 : GK_F32));
    fz_free();
    return 0;
}
