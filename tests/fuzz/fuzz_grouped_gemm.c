/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_grouped_gemm: gk_grouped_gemm against its definition. Rows and columns of no group hold NaN,
 * or 127. */
#include "quant.h"

static size_t bytes_of(const gk_context *ctx, const void *args) {
    return gk_grouped_gemm_workspace_bytes(ctx, args);
}
static gk_status call(const gk_context *ctx, const void *args) {
    return gk_grouped_gemm(ctx, args);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    static const gk_dtype dtypes[] = {GK_F32, GK_BF16, GK_F16, GK_E4M3, GK_E5M2, GK_I8};
    const gk_dtype dtype = dtypes[fz_int(0, 5)];
    const bool codes = gk_is_code(dtype), by_rows = fz_one_in(2);
    const gk_dtype out = fz_one_in(3) ? GK_F32 : codes ? GK_BF16 : dtype;
    const int64_t m = fz_size(129), n = fz_size(129), k = fz_size(129), groups = fz_int(0, 5),
                  total = by_rows ? m : k;
    const int64_t of_b[3] = {groups, k, n}, of_out[3] = {groups, m, n}, of_bias[2] = {groups, n};
    gk_grouped_gemm_args args = GK_GROUPED_GEMM_ARGS_INIT;
    args.a = fz_codes(dtype, m, k, FZ_INPUT);
    args.b = fz_make(dtype, by_rows ? 3 : 2, of_b + !by_rows, FZ_INPUT);
    fz_whole(&args.b, 3);
    args.offs = fz_make(GK_I32, 1, &groups, FZ_RESULT);
    fz_all[fz_count - 1].result = false;
    int64_t end = 0;
    bool bad = false;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t step = fz_int(0, 60);
        if (step == 60) bad = true;
        end = step == 60 ? (fz_one_in(2) ? -1 : total + 1)
                         : gk_min_i64(total, gk_max_i64(end, 0) + step);
        fz_set(&args.offs, g, (double)end);
    }
    for (int64_t i = end; !bad && by_rows && i < m; ++i)
        for (int64_t j = 0; j < k; ++j)
            gk_store(args.a.data, dtype, i * args.a.stride[0] + j * args.a.stride[1],
                     dtype == GK_I8 ? 127 : NAN);
    /* rows in one place */
    if (args.a.stride[0] == 0 || args.a.stride[1] == 0) fz_whole(&args.a, 3);
    gk_tensor scale_a, scale_b, bias;
    if (codes) {
        const int64_t am = by_rows ? fz_blocks(m, false) : m, ak = by_rows ? fz_blocks(k, true) : 1;
        scale_a = fz_scale(GK_F32, am, ak);
        args.scale_a = &scale_a;
        scale_b = by_rows ? fz_make(GK_F32, 0, NULL, FZ_INPUT) : fz_scale(GK_F32, 1, n);
        args.scale_b = &scale_b;
    }
    if (fz_one_in(2)) {
        const int one = (int)fz_int(0, 1);
        bias = fz_make(out, 2 - one, of_bias + one, FZ_INPUT);
        args.bias = &bias;
    }
    args.activation = (gk_activation)fz_int(0, 4);
    /* for wider operands the call must be refused */
    if (codes || fz_one_in(8)) args.accumulate = (gk_accumulate)fz_int(0, 1);
    args.out = fz_make(out, by_rows ? 2 : 3, of_out + by_rows, FZ_RESULT | FZ_CONTIGUOUS);

    gk_grouped_gemm_args judge = args;
    judge.out = fz_judged(&args.out);
    gk_tensor *const all[] = {&args.a, &args.b, &args.offs, &args.out, args.bias ? &bias : NULL};
    const bool wrong = fz_corrupt(all, 5, 5);
    const gk_status status = fz_call("gk_grouped_gemm", &ctx, &args, bytes_of, call,
                                     &args.workspace, &args.workspace_bytes, wrong);
    FZ_REQUIRE(wrong || !bad || status != GK_OK, "grouped_gemm took bad ends");
    if (!wrong && status == GK_OK) {
        gk_context plain = GK_CONTEXT_INIT;
        gk_ref_grouped_gemm(&plain, &judge);
        fz_near("out", &args.out, &judge.out,
                (36 * (double)k + 8) * (16 + sqrt((double)k)) * 0x1p-24);
    }
    fz_free();
    return 0;
}
