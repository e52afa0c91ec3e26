/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_sparse_gemm: gk_sparse_pack and gk_sparse_gemm against their definitions. A mask that is not
 * 2:4 must be refused. */
#include "quant.h"

static size_t bytes_of(const gk_context *ctx, const void *args) {
    return gk_sparse_gemm_workspace_bytes(ctx, args);
}
static gk_status call(const gk_context *ctx, const void *args) { return gk_sparse_gemm(ctx, args); }
static gk_status pack(const gk_context *ctx, const void *args) { return gk_sparse_pack(ctx, args); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    static const gk_dtype dtypes[] = {GK_BF16, GK_F16, GK_E4M3, GK_E5M2, GK_I8};
    const gk_dtype dtype = dtypes[fz_int(0, 4)],
                   out = fz_one_in(3) || gk_is_code(dtype) ? GK_F32 : dtype;
    const int64_t m = fz_size(129), n = fz_size(129), k = 4 * fz_size(33), of_out[2] = {m, n};
    const int64_t of_values[2] = {n, k / 2}, of_meta[2] = {n, gk_ceil_div(k, 8)}, of_w[2] = {n, k};
    gk_sparse_pack_args to = GK_SPARSE_PACK_ARGS_INIT;
    to.w = fz_make(dtype, 2, of_w, FZ_INPUT | FZ_CONTIGUOUS);
    const int kept = (int)fz_int(0, 7);
    int64_t most = 0;
    for (int64_t f = 0; f < gk_numel(&to.w) / 4; ++f) {
        int64_t found = 0;
        for (int e = 0; e < 4; ++e) {
            const double x = rint(fz_uniform() * 3);
            const bool keep = found < (kept == 7 ? 3 : 2) && fz_uniform() < 0.5;
            fz_set(&to.w, 4 * f + e, keep ? x : 0);
            found += keep && x != 0;
        }
        most = gk_max_i64(most, found);
    }
    to.values = fz_make(dtype, 2, of_values, FZ_RESULT | FZ_CONTIGUOUS);
    to.meta = fz_make(GK_U8, 2, of_meta, FZ_RESULT | FZ_CONTIGUOUS);
    const gk_status packed = fz_call("gk_sparse_pack", &ctx, &to, NULL, pack, NULL, NULL, false);
    FZ_REQUIRE((packed == GK_OK) == (most <= 2), "sparse_pack of %lld in four: %s", (long long)most,
               gk_status_name(packed));
    if (packed == GK_OK) {
        gk_sparse_gemm_args args = GK_SPARSE_GEMM_ARGS_INIT;
        args.a = fz_codes(dtype, m, k, FZ_INPUT);
        args.values = to.values;
        args.meta = to.meta;
        gk_tensor scale_a, scale_b, bias;
        if (gk_is_code(dtype) && fz_one_in(2)) {
            scale_a = fz_scale(GK_F32, m, 1);
            args.scale_a = &scale_a;
        }
        if (gk_is_code(dtype) && fz_one_in(2)) {
            scale_b = fz_scale(GK_F32, 1, n);
            args.scale_b = &scale_b;
        }
        if (fz_one_in(2)) {
            bias = fz_make(out, 1, &n, FZ_INPUT);
            args.bias = &bias;
        }
        args.activation = (gk_activation)fz_int(0, 4);
        args.out = fz_make(out, 2, of_out, FZ_RESULT | FZ_CONTIGUOUS);
        gk_sparse_gemm_args judge = args;
        judge.out = fz_judged(&args.out);
        gk_tensor *const all[] = {&args.a, &args.values, &args.meta, &args.out,
                                  args.bias ? &bias : NULL};
        const bool wrong = fz_corrupt(all, 5, 5);
        const gk_status status = fz_call("gk_sparse_gemm", &ctx, &args, bytes_of, call,
                                         &args.workspace, &args.workspace_bytes, wrong);
        if (!wrong && status == GK_OK) {
            gk_context plain = GK_CONTEXT_INIT;
            gk_ref_sparse_gemm(&plain, &judge);
            fz_near("out", &args.out, &judge.out,
                    (36 * (double)k + 8) * (16 + sqrt((double)k)) * 0x1p-24);
        }
    }
    fz_free();
    return 0;
}
